"""Proofs that hold, and programs that differ where a test can tell."""

from __future__ import annotations

from typing import Any

import nets
import pytest
import tiny
import torch
from small import program_of, two_layers
from tiny import BATCH, GPU0, GPU1, dropped, edited, inserted, op, position, reblobbed

import graphir
from graphir import passes
from graphir.analysis.certify import certify
from graphir.analysis.values import Numbering, Run
from graphir.errors import EquivalenceError, VerifyError
from graphir.ir.blob import Blob
from graphir.ir.device import CPU
from graphir.ir.operator import Effects
from graphir.ir.program import Program
from graphir.ir.size import Polynomial

TINY, MOVED = tiny.program(), tiny.moved()
RELU, MASK, SGD = 1, 2, 13
LESS = Polynomial.of({("batch",): 1, (): -1})


def blob(name: str, shape: Any = (BATCH, 4), **changes: Any) -> Blob:
    return Blob(name, shape, "f32", GPU0, "activation", name)._replace(**changes)


def read_instead(p: Program, at: int, old: str, new: str) -> Program:
    return edited(p, at, inputs=tuple(new if i == old else i for i in p.step.ops[at].inputs))


# Programs that are the same


def test_a_program_is_itself() -> None:
    found = certify(TINY, TINY)
    assert found.holds
    assert found.compared == {"outputs": 1, "states": 3}
    assert set(found.values) == {"w", "count", "m", "loss"}
    assert len(set(found.values.values())) == 4
    assert str(found) == (
        "'tiny' computes what 'tiny' computes, bit for bit: 1 output, 3 states, in every step\n"
        "  given that operators of one type give the same bits from the same operands in the same layout, "
        "with equal threads"
    )


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_themselves(seed: int) -> None:
    assert certify(nets.random_program(seed), nets.random_program(seed)).holds


def test_devices_and_copies_drop_out() -> None:
    assert certify(TINY, MOVED).holds
    assert certify(tiny.plan(TINY), tiny.plan(MOVED)).holds


def test_in_place_is_the_functional_operator() -> None:
    p = edited(reblobbed(TINY, "r", storage="h"), RELU, type="aten.relu_.default", effects=Effects(writes=((0, 0),)))
    assert certify(TINY, p).holds


def test_a_view_of_a_copied_storage_is_the_view() -> None:
    p = inserted(TINY, 4, op("Copy", ("d",), ("d2",)), blob("d2"))
    p = edited(p, 5, inputs=("d2",))
    assert certify(TINY, reblobbed(p, "d.t", storage="d2")).holds


def test_a_copied_view_is_the_view_and_so_are_views_of_it() -> None:
    cut = {"dim": 1, "start": 1}
    part, rest = (
        op("aten.slice.Tensor", (a,), (b,), args=cut, effects=Effects(views=((0, 0),))) for a, b in ("dp", "pq")
    )
    total = op("aten.sum.default", ("q",), ("z",))
    views = [
        blob("p", (BATCH, 3), storage="d", strides=(4, 1), offset=1),
        blob("q", (BATCH, 2), storage="d", strides=(4, 1), offset=2),
        blob("z", (), role="output"),
    ]
    base = TINY
    for o, b in zip((total, rest, part), (views[2], views[1], views[0]), strict=True):
        base = inserted(base, 4, o, b)
    base = base.with_(step=base.step.with_(external_outputs=("loss", "z")))
    copied = inserted(base, 5, op("Copy", ("p",), ("p2",)), blob("p2", (BATCH, 3), strides=(4, 1)))
    copied = reblobbed(edited(copied, 6, inputs=("p2",)), "q", storage="p2", offset=1)
    assert certify(base, copied).holds

    elsewhere = reblobbed(edited(copied, 6, args={"dim": 1, "start": 0, "end": 2}), "q", offset=0)
    with pytest.raises(EquivalenceError, match="blob 'q' has another value, so that output 'z' differs after step 0"):
        certify(base, elsewhere)


def test_beyond_a_copied_view_there_is_nothing() -> None:
    """The gaps of a strided copy do not hold what lies between the elements of its source."""
    view = op("aten.slice.Tensor", ("d",), ("p",), args={"dim": 1, "start": 1}, effects=Effects(views=((0, 0),)))
    whole = {"size": (5, 4), "stride": (4, 1), "storage_offset": 1}
    strided = op("aten.as_strided.default", ("p",), ("q",), args=whole, effects=Effects(views=((0, 0),)))
    base = inserted(TINY, 4, op("aten.sum.default", ("q",), ("z",)), blob("z", (), role="output"))
    base = inserted(base, 4, strided, blob("q", (5, 4), storage="d", offset=1))
    base = inserted(base, 4, view, blob("p", (BATCH, 3), storage="d", strides=(4, 1), offset=1))
    base = base.with_(step=base.step.with_(external_outputs=("loss", "z")))
    copied = inserted(base, 5, op("Copy", ("p",), ("p2",)), blob("p2", (BATCH, 3), strides=(4, 1)))
    copied = edited(copied, 6, inputs=("p2",), args={**whole, "storage_offset": 0})
    copied = reblobbed(copied, "q", storage="p2", offset=0)
    certify(base, base)
    with pytest.raises(EquivalenceError, match="output 'z' differs"):
        certify(base, copied)


def test_recomputing_batch_norm_needs_no_statistics() -> None:
    args = {"training": True, "momentum": 0.1, "eps": 1e-5}
    stats = {n: Blob(n, (4,), "f32", GPU0, "buffer", n) for n in ("mean", "var")}
    norm = op("aten.native_batch_norm.default", ("d", "mean", "var"), ("n", "s", "i", "mean", "var"), args=args)
    norm = norm._replace(operands="t__tt", effects=Effects(writes=((3, 1), (4, 2))), output_versions=(0, 0, 0, 1, 1))
    again = op("aten.native_batch_norm.default", ("d",), ("n2", "s2", "i2"), args=args, operands="t____")
    total = op("aten.sum.default", ("n",), ("z",))

    def build(p: Program) -> Program:
        declared = {"z": blob("z", (), role="output"), **stats}
        for suffix in ("", "2"):
            declared |= {n + suffix: blob(n + suffix, (4,)) for n in "si"} | {"n" + suffix: blob("n" + suffix)}
        net = p.step
        used = {n for o in net.ops for n in o.outputs} | {*stats, *net.external_inputs}
        blobs = {n: b for n, b in {**net.blobs, **declared}.items() if n in used}
        outputs = ("loss", "z")
        net = net.with_(blobs=blobs, external_inputs=(*net.external_inputs, *stats), external_outputs=outputs)
        loads = tuple(op("graphir.load", (), (n,), args={"key": n}, phase="init") for n in stats)
        init = p.init.with_(ops=(*p.init.ops, *loads), blobs={**p.init.blobs, **stats})
        return p.with_(init=init, step=net, state={})

    base = build(inserted(inserted(TINY, 4, total), 4, norm))
    recomputed = build(inserted(inserted(inserted(TINY, 4, total._replace(inputs=("n2",))), 4, again), 4, norm))
    assert certify(base, recomputed).holds
    forgotten = edited(base, 4, args={**args, "momentum": 0.2})
    with pytest.raises(EquivalenceError, match="state 'mean' differs after step 0"):
        certify(base, forgotten)


def test_a_reduction_has_one_value_for_all_participants() -> None:
    reduced = [blob(n, (4, 4), role="gradient", device=d) for n, d in (("a", GPU0), ("b", GPU1))]
    reduce = op("AllReduce", ("w_grad", "g"), ("a", "b"), phase="reduce", operands="[tt]", results="[tt]")
    p = inserted(TINY, SGD, reduce, *reduced)
    p = inserted(p, SGD, op("Copy", ("w_grad",), ("g",), device=GPU1), blob("g", (4, 4), role="gradient", device=GPU1))
    first = read_instead(p, SGD + 2, "w_grad", "a")
    second = inserted(p, SGD + 2, op("Copy", ("b",), ("c",)), blob("c", (4, 4), role="gradient"))
    second = read_instead(second, SGD + 3, "w_grad", "c")
    assert certify(first, second).holds
    with pytest.raises(EquivalenceError, match="blob 'a' has another value"):
        certify(first, edited(first, SGD + 1, args={"reduction": "mean"}))


def test_memory_that_is_filled_later_may_start_as_anything() -> None:
    size: Any = {"size": (4,)}
    zero = Effects(writes=((0, 0),))
    p = inserted(TINY, 0, op("aten.empty.memory_format", (), ("e",), args=size), blob("e", (4,), role="temporary"))
    filled = inserted(p, 1, op("aten.zero_.default", ("e",), ("e",), effects=zero, output_versions=(1,)))
    assert not certify(with_output(filled, "e"), with_output(filled, "e")).caveats
    assert certify(with_output(p, "e"), with_output(p, "e")).caveats == (UNWRITTEN,)
    assert not certify(p, p).caveats, "nothing reads it"
    with pytest.raises(EquivalenceError, match="output 'e' differs"):
        certify(with_output(p, "e"), with_output(filled, "e"))


UNWRITTEN = (
    "aten.empty.memory_format (1 operators) leaves memory unwritten, of which a part may be read before it is written"
)


def test_memory_that_another_name_is_given_to_is_other_memory() -> None:
    size: Any = {"size": (4,)}
    made = [op("aten.empty.memory_format", (), (name,), args=size) for name in "ab"]
    p = TINY
    for operator in made:
        p = inserted(p, 0, operator, blob(operator.outputs[0], (4,), role="temporary"))
    total = [inserted(p, 2, op("aten.neg.default", (n,), ("z",)), blob("z", (4,), role="output")) for n in "ab"]
    with pytest.raises(EquivalenceError, match="output 'z' differs"):
        certify(*(with_output(t, "z") for t in total))


DRAWN = """
    input x : f32[4,4] @gpu:0
    e : f32[4,4] @gpu:0 = aten.empty_like(x)
    e_t : f32[4,4] strides [1,4] in e @gpu:0 = aten.t(e)
    n : f32[4,4] @gpu:0 = aten.bernoulli.p(e_t, p=0.5) {seed=0}
    y : f32[4,4] @gpu:0 = aten.mul.Tensor(x, n)
    output z : f32[4,4] @gpu:0 = aten.mul.Tensor(y, n)
    output z
"""
AGAIN = """
    e_again : f32[4,4] @gpu:0 = aten.empty_like(x)
    e_t_again : f32[4,4] strides [1,4] in e_again @gpu:0 = aten.t(e_again)
    n_again : f32[4,4] @gpu:0 = aten.bernoulli.p(e_t_again, p=0.5) {seed=0}
    output z : f32[4,4] @gpu:0 = aten.mul.Tensor(y, n_again)
"""
REPEATED = DRAWN.replace("    output z : f32[4,4] @gpu:0 = aten.mul.Tensor(y, n)\n", AGAIN[1:])


def test_memory_that_is_overwritten_may_be_made_again() -> None:
    found = certify(program_of(DRAWN), program_of(REPEATED))
    assert found.holds and not found.caveats


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aten.mul.Tensor(y, n_again)", "aten.mul.Tensor(y, e_again)"),
        ("aten.bernoulli.p(e_t_again, p=0.5) {seed=0}", "aten.exp(e_again)"),
        ("aten.bernoulli.p(e_t_again, p=0.5) {seed=0}", "aten.bernoulli(e_again) {seed=0}"),
        ("aten.bernoulli.p(e_t_again, p=0.5) {seed=0}", "aten.bernoulli.p(e_t_again, p=0.5) {seed=1}"),
        ("aten.bernoulli.p(e_t_again, p=0.5) {seed=0}", "aten.bernoulli.p(e_again, p=0.5) {seed=0}"),
        ("aten.empty_like(x)", "aten.empty_like(y)"),
    ],
    ids=["unwritten", "read", "read as probabilities", "seed", "layout", "made like another"],
)
def test_what_depends_on_memory_made_again_is_not_certified(old: str, new: str) -> None:
    before, _, again = REPEATED.partition("    e_again")
    mutant = program_of(f"{before}    e_again{again.replace(old, new)}")
    with pytest.raises(EquivalenceError):
        certify(program_of(DRAWN), mutant)


def test_a_captured_model_that_fills_new_memory_part_by_part() -> None:
    """Circular padding writes the middle and both ends of an empty tensor."""
    torch.manual_seed(0)
    model = torch.nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular")
    p = graphir.capture(model, inputs=(torch.randn(4, 2, 8),))
    found = certify(p, p)
    assert found.holds
    assert all("leaves memory unwritten" in caveat for caveat in found.caveats)


def test_what_a_blob_is_declared_to_be_counts() -> None:
    declared = [reblobbed(TINY, "h", shape=shape) for shape in ((BATCH, 4), (4, BATCH))]
    with pytest.raises(EquivalenceError, match=r"(?s)h : f32\[batch,4\].*after:.*h : f32\[4,batch\]"):
        certify(*declared, verified=True)


def with_output(p: Program, name: str) -> Program:
    return p.with_(step=p.step.with_(external_outputs=("loss", name)))


def test_caveats() -> None:
    put = op("aten.index_add.default", ("d", "i", "d"), ("z",), args={"dim": 0})
    p = inserted(TINY, 4, put, blob("z"))
    p = inserted(p, 4, op("aten.arange.default", (), ("i",), args={"end": BATCH}), blob("i", (BATCH,), dtype="i64"))
    found = certify(p, p)
    assert found.caveats == ("aten.index_add.default (1 operators) adds in no fixed order on CUDA",)
    assert str(found).splitlines()[2].startswith("  but aten.index_add.default")


def test_another_kind_of_device_is_a_caveat() -> None:
    host = {n: b._replace(device=CPU) for n, b in MOVED.step.blobs.items() if b.device == GPU1}
    ops = tuple(o._replace(device=CPU) if o.device == GPU1 else o for o in MOVED.step.ops)
    p = MOVED.with_(step=MOVED.step.with_(ops=ops, blobs={**MOVED.step.blobs, **host}))
    says = "aten.relu.default (1 operators): on {0} instead of {1}, so bits are those of {0}'s kernels"
    assert certify(TINY, p).caveats == (says.format("the host", "a gpu"),)
    assert certify(p, TINY).caveats == (says.format("a gpu", "the host"),)


def test_what_is_copied_or_shown_elsewhere_is_no_caveat() -> None:
    """Neither copies that give parked state its values nor views compute anything."""
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (x,), targets=(x,), loss=torch.nn.functional.mse_loss, optimizer=optimizer)
    parked = passes.inject_copies(passes.park(program, "weight", "cpu"))
    assert certify(program, parked).caveats == ()


def test_offsets_count_in_bytes_through_views_of_another_type() -> None:
    """Elements 2 and 3 of f32 are element 1 of c64, in a copy that begins at element 2 as anywhere."""
    view = Effects(views=((0, 0),))
    part = op("aten.slice.Tensor", ("v",), ("p",), args={"dim": 0, "start": 1}, effects=view)
    real = op("aten.view_as_real.default", ("p",), ("q",), effects=view)
    made = op("aten.complex.default", ("h", "h"), ("v",))
    total = op("aten.sum.default", ("q",), ("z",))
    base = inserted(TINY, 1, total, blob("z", (), role="output"))
    base = inserted(base, 1, real, blob("q", (LESS, 4, 2), storage="v", offset=8))
    base = inserted(base, 1, part, blob("p", (LESS, 4), storage="v", offset=4, dtype="c64"))
    base = with_output(inserted(base, 1, made, blob("v", dtype="c64")), "z")
    copied = inserted(base, 3, op("Copy", ("p",), ("p2",)), blob("p2", (LESS, 4), dtype="c64"))
    copied = reblobbed(edited(copied, 4, inputs=("p2",)), "q", storage="p2", offset=0)
    assert certify(base, copied).holds


def test_each_step_has_its_own_inputs_and_random_numbers() -> None:
    for name in ("x.t", "mask"):
        run, values = Run(Numbering(), TINY), []
        run.net(TINY.init, -1)
        for step in range(2):
            run.net(TINY.step, step)
            values.append(run.read(name))
        assert values[0] != values[1]


# Programs that differ


def test_what_a_write_to_a_part_leaves_counts() -> None:
    """The upper part of e is cleared; its lower part is e's old value."""
    shares, cut = Effects(views=((0, 0),)), {"dim": 0, "start": 1}
    whole = {"size": (BATCH, 4), "stride": (4, 1), "storage_offset": 0}
    steps = (
        (op("aten.add.Tensor", ("r", "r"), ("e",)), blob("e")),
        (
            op("aten.slice.Tensor", ("e",), ("p",), args=cut, effects=shares),
            blob("p", (LESS, 4), storage="e", offset=4),
        ),
        (op("aten.zero_.default", ("p",), ("p",), effects=Effects(writes=((0, 0),)), output_versions=(1,)), None),
        (op("aten.as_strided.default", ("p",), ("q",), args=whole, effects=shares), blob("q", storage="e")),
        (op("aten.sum.default", ("q",), ("z",)), blob("z", (), role="output")),
    )
    p = TINY
    for at, (operator, made) in enumerate(steps, 4):
        p = inserted(p, at, operator, *([made] if made else []))
    p = edited(p, 7, input_versions=(1,))
    p = with_output(p, "z")
    assert certify(p, p).holds
    with pytest.raises(EquivalenceError, match="blob 'e' has another value, so that output 'z'"):
        certify(p, edited(p, 4, inputs=("r", "h")))


def test_dropped_update() -> None:
    with pytest.raises(EquivalenceError, match=r"(?s)output 'loss' differs after step 1.*graphir\.sgd.*after:"):
        certify(TINY, dropped(TINY, SGD))


def test_update_that_reaches_a_copy_only() -> None:
    """Within the first step nothing shows; the second one reads the old parameter."""
    p = inserted(TINY, SGD, op("Copy", ("w",), ("w2",)), blob("w2", (4, 4), role="param"))
    p = edited(p, SGD + 1, inputs=("w2", "w_grad", "m", "lr"), outputs=("w2", "m"))
    with pytest.raises(EquivalenceError, match="output 'loss' differs after step 1"):
        certify(TINY, p)


def test_update_that_is_written_back() -> None:
    p = inserted(TINY, SGD, op("Copy", ("w",), ("w2",)), blob("w2", (4, 4), role="param"))
    p = edited(p, SGD + 1, inputs=("w2", "w_grad", "m", "lr"), outputs=("w2", "m"))
    back = op("Copy", ("w2",), ("w",), input_versions=(1,), output_versions=(1,), phase="update")
    assert certify(TINY, inserted(p, SGD + 2, back)).holds


def test_swapped_operands() -> None:
    swapped = edited(TINY, 10, inputs=("r", "r_grad"))
    with pytest.raises(EquivalenceError) as e:
        certify(TINY, swapped.with_(name="swapped", history=("swap",)))
    lines = str(e.value).splitlines()
    assert lines[0] == "blob 'h_grad' has another value, so that output 'loss' differs after step 1"
    assert lines[1] == "  at   before:"
    assert lines[-2:] == ["  in   program 'swapped', after swap", "  fix  compare the two derivations above"]
    assert len(lines) <= 2 + 5 + 1 + 5 + 2
    text = str(e.value)
    assert "aten.threshold_backward(r_grad, r, threshold=0)" in text.partition("after:")[0]
    assert "aten.threshold_backward(r, r_grad, threshold=0)" in text.partition("after:")[2]


def test_stale_copy() -> None:
    """A copy made before the counter goes up is read after it."""
    total = op("aten.mul.Tensor", ("d", "count"), ("e",), input_versions=(0, 1))
    base = with_output(inserted(TINY, 6, total, blob("e", role="output")), "e")
    copied = read_instead(base, 6, "count", "c")
    count = blob("c", (), dtype="i64", role="temporary")
    early = inserted(edited(copied, 6, input_versions=None), 5, op("Copy", ("count",), ("c",)), count)
    late = inserted(
        edited(copied, 6, input_versions=None), 6, op("Copy", ("count",), ("c",), input_versions=(1,)), count
    )
    assert certify(base, late).holds
    with pytest.raises(EquivalenceError, match="blob 'e' has another value"):
        certify(base, early)


def test_copy_of_the_wrong_blob() -> None:
    wrong = edited(MOVED, position(MOVED, "r_gpu_0"), inputs=("h",))
    with pytest.raises(EquivalenceError, match="blob 'mask' has another value"):
        certify(TINY, wrong)


def test_changed_seed() -> None:
    with pytest.raises(EquivalenceError, match="blob 'mask' has another value, so that output 'loss'"):
        certify(TINY, edited(TINY, MASK, seed=1))


@pytest.mark.parametrize("p", [0.25, 1, True])
def test_changed_argument(p: Any) -> None:
    with pytest.raises(EquivalenceError, match="blob 'mask' has another value"):
        certify(edited(TINY, MASK, args={"p": 1.0}), edited(TINY, MASK, args={"p": p}))


def test_the_sign_of_zero_is_an_argument() -> None:
    a, b = (edited(TINY, 10, args={"threshold": zero}) for zero in (0.0, -0.0))
    with pytest.raises(EquivalenceError):
        certify(a, b)


def test_changed_order_of_a_reduction() -> None:
    add = op("aten.add.Tensor", ("d", "r"), ("e",))
    a = with_output(inserted(TINY, 4, add, blob("e", role="output")), "e")
    b = edited(a, 4, inputs=("r", "d"))
    with pytest.raises(EquivalenceError, match="blob 'e' has another value"):
        certify(a, b)


def test_another_start() -> None:
    ops = tuple(o._replace(args={"key": "m"}) if o.outputs == ("w",) else o for o in TINY.init.ops)
    with pytest.raises(EquivalenceError, match="init"):
        certify(TINY, TINY.with_(init=TINY.init.with_(ops=ops)))


def test_missing_output() -> None:
    fewer = TINY.with_(step=TINY.step.with_(external_outputs=("loss",)))
    with pytest.raises(EquivalenceError, match="output 'd' is missing from the second program"):
        certify(with_output(TINY, "d"), fewer)
    with pytest.raises(EquivalenceError, match="output 'd' is missing from the first program"):
        certify(fewer, with_output(TINY, "d"))


def test_a_replicated_program_is_not_held_against_the_captured_one() -> None:
    with pytest.raises(EquivalenceError, match="fix  certify programs with the same replicas"):
        certify(two_layers(), passes.replicate(two_layers(), devices=[0, 1]))


def test_a_view_that_lies_about_its_operator_is_refused() -> None:
    with pytest.raises(VerifyError):
        certify(TINY, edited(TINY, 4, args={"dim0": 0}))


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_with_one_operand_changed(seed: int) -> None:
    """Whatever reaches an output or a state shows there; the rest as something that nobody computed before."""
    program = nets.random_program(seed, ops=30)
    run = Run(Numbering(), program)
    run.net(program.init, -1)
    run.net(program.step, 0)
    for at, o in enumerate(program.step.ops):
        if o.type == "aten.add.Tensor" and len({run.read(name) for name in o.inputs}) == 2:
            with pytest.raises(EquivalenceError, match=r"has another value|no operator of the first program computes"):
                certify(program, edited(program, at, inputs=o.inputs[::-1]), verified=True)
