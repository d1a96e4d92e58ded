"""Each invariant, broken once; the numbers are those of the list in graphir/ir/verify.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import nets
import pytest
import tiny
import torch
from small import program_of
from tiny import GPU0, GPU1, dropped, edited, inserted, op, reblobbed

from graphir import passes
from graphir.caffe2.dialect import CAFFE2
from graphir.errors import PlacementError, VerifyError
from graphir.ir.blob import Blob
from graphir.ir.device import CPU
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Effects, Symbol
from graphir.ir.plan import Event, Instruction, Plan
from graphir.ir.program import ParamGroup, Program
from graphir.ir.size import dimension
from graphir.ir.verify import verify

TINY = tiny.program()
RELU, MASK, SGD = 1, 2, 13
SCALAR = Blob("z", (), "f32", GPU0, "temporary", "z")


def step(**changes: Any) -> Program:
    return TINY.with_(step=TINY.step.with_(**changes))


def with_blob(name: str, blob: Blob) -> Program:
    return step(blobs={**TINY.step.blobs, name: blob})


def interface(**changes: Any) -> Program:
    return TINY.with_(interface=replace(TINY.interface, **changes))


def in_place_relu() -> Program:
    p = reblobbed(TINY, "r", storage="h")
    return edited(p, RELU, type="aten.relu_.default", effects=Effects(writes=((0, 0),)))


def two_participants() -> Program:
    """Two replicas' gradients, added; the second one's lives on gpu:1."""
    reduced = [Blob(f"w_grad_{i}", (4, 4), "f32", d, "gradient", f"w_grad_{i}") for i, d in enumerate((GPU0, GPU1))]
    p = inserted(
        TINY,
        SGD,
        op("Copy", ("w_grad",), ("g",), device=GPU1),
        Blob("g", (4, 4), "f32", GPU1, "gradient", "g"),
    )
    reduce = op("AllReduce", ("w_grad", "g"), ("w_grad_0", "w_grad_1"), phase="reduce", operands="[tt]", results="[tt]")
    return inserted(p, SGD + 1, reduce, *reduced)


BROKEN: dict[str, tuple[Program, str]] = {
    "1 key": (with_blob("h", TINY.step.blobs["r"]), "blob 'r' is kept under the name 'h'"),
    "2 no storage": (reblobbed(TINY, "d.t", storage="dd"), "blob 'd.t' is a view of 'dd', which is not declared"),
    "2 chain": (reblobbed(TINY, "x.t", storage="d.t"), "blob 'x.t' is a view of 'd.t', which is itself a view of 'd'"),
    "2 device": (reblobbed(TINY, "d.t", device=GPU1), "blob 'd.t' is on gpu:1 but its storage 'd' is on gpu:0"),
    "2 role": (
        reblobbed(TINY, "d.t", role="temporary"),
        "blob 'd.t' has role temporary but its storage 'd' has role activation",
    ),
    "3 undeclared": (step(external_inputs=(*TINY.step.external_inputs, "z")), "external input 'z' is not declared"),
    "3 twice": (step(external_inputs=(*TINY.step.external_inputs, "x")), "external input 'x' is listed twice"),
    "3 made": (edited(TINY, SGD, output_versions=(0, 1)), "external input 'w' is made by an operator"),
    "4 undeclared": (edited(TINY, RELU, inputs=("hh",)), "blob 'hh' is not declared"),
    "4 unmade": (dropped(TINY, RELU), "blob 'r' is never made"),
    "4 orphan": (
        with_blob("z", SCALAR),
        "blob 'z' is declared, but it is not external and no operator makes it",
    ),
    "5 twice": (inserted(TINY, 2, TINY.step.ops[RELU]), "version 0 of blob 'r' is made twice"),
    "5 skipped": (edited(TINY, SGD, output_versions=(1, 2)), "version 2 of blob 'm' is made where version 1 is due"),
    "5 count": (
        edited(TINY, SGD, output_versions=(1,)),
        "the operator does not have one version for each operand",
    ),
    "6 order": (
        step(ops=(TINY.step.ops[1], TINY.step.ops[0], *TINY.step.ops[2:])),
        "blob 'h' is read before it is made",
    ),
    "6 version": (
        edited(TINY, SGD, input_versions=(1, 0, 0, 0)),
        "an operator reads version 1 of blob 'w', whose last version there is 0",
    ),
    "7 stale": (
        inserted(in_place_relu(), 2, op("aten.sum.default", ("h",), ("z",)), SCALAR),
        "blob 'h' is stale: its storage 'h' was written over since, by r = aten.relu_.default",
    ),
    "8 not a view": (reblobbed(TINY, "r", storage="h"), "output 'r' is new but declared as a view of 'h'"),
    "8 not shared": (
        edited(reblobbed(TINY, "d.t", storage="r"), 4, phase="forward"),
        "output 'd.t' is a view of 'd' but its storage is 'r'",
    ),
    "8 not overwritten": (
        edited(TINY, RELU, type="aten.relu_.default", effects=Effects(writes=((0, 0),))),
        "output 'r' overwrites 'h' but its storage is 'r'",
    ),
    "8 operands": (
        edited(TINY, RELU, effects=Effects(views=((1, 0),))),
        "the effects name operands that the operator does not have",
    ),
    "9 undeclared": (step(external_outputs=("loss", "z")), "external output 'z' is not declared"),
    "9 gradients": (
        step(gradients={"h": "z"}),
        "net.gradients maps 'h' to 'z', but 'z' is not declared",
    ),
    "10 effects": (edited(TINY, 4, effects=PURE), "but its schema gives ((), ((0, 0),), False)"),
    "10 no seed": (edited(TINY, MASK, seed=None), "the operator is random, but has no seed id"),
    "10 seed": (edited(TINY, RELU, seed=3), "the operator has a seed id, but is not random"),
    "11 type": (edited(TINY, RELU, type="aten.rleu.default"), "has no operator 'aten.rleu.default'"),
    "11 other type": (edited(TINY, RELU, type="os.system"), "neither torch nor graphir has an operator 'os.system'"),
    "11 own type": (
        edited(TINY, RELU, type="graphir.lod"),
        "neither torch nor graphir has an operator 'graphir.lod'; did you mean 'graphir.load' or",
    ),
    "11 argument": (edited(TINY, MASK, args={"q": 0.5}), "aten.bernoulli.p has no argument 'q'"),
    "11 element type as a number": (
        edited(TINY, 0, type="aten._to_copy.default", inputs=("x",), args={"dtype": -1}),
        "aten._to_copy.default takes a torch.dtype as dtype, not -1",
    ),
    "11 memory format as a number": (
        edited(TINY, RELU, type="aten.clone.default", args={"memory_format": 255}),
        "aten.clone.default takes a torch.memory_format as memory_format, not 255",
    ),
    "11 element type as memory format": (
        edited(TINY, RELU, type="aten.clone.default", args={"memory_format": Symbol("f32")}),
        "aten.clone.default takes a torch.memory_format as memory_format, not f32",
    ),
    "11 missing": (edited(TINY, MASK, args={}), "aten.bernoulli.p needs an argument 'p'"),
    "11 inputs": (edited(TINY, RELU, inputs=("h", "x")), "aten.relu.default has 2 inputs, but its signature takes"),
    "11 inputs of mm": (
        edited(TINY, 0, inputs=("x", "w", "w")),
        "aten.mm.default has 3 inputs, but its signature takes 2 (self, mat2)",
    ),
    "11 pattern": (
        edited(TINY, 0, operands="ttt"),
        "aten.mm.default has 2 inputs, but its pattern 'ttt' takes 3",
    ),
    "11 outputs": (edited(TINY, RELU, results="_"), "aten.relu.default makes 0 outputs but 1 are named"),
    "12 shape": (
        reblobbed(TINY, "h", shape=(4, tiny.BATCH)),
        "blob 'h' is declared f32[4,6] but aten.mm.default gives f32[6,4]",
    ),
    "12 negative": (
        reblobbed(TINY, "h", shape=(-1, 4)),
        "blob 'h' is declared f32[-1,4], which is not a possible size",
    ),
    "12 absurd": (
        reblobbed(TINY, "h", shape=(2**40, 2**40)),
        f"blob 'h' is declared f32[{2**40},{2**40}], which is not a possible size",
    ),
    "12 dims": (TINY.with_(dims={"batch": -6}), "blob 'x' is declared f32[-6,4], which is not a possible size"),
    "12 rank": (reblobbed(TINY, "h", strides=(1,)), "blob 'h' has 1 strides for 2 dimensions"),
    "12 unknown type": (reblobbed(TINY, "h", dtype="f31"), "blob 'h' has the unknown element type 'f31'"),
    "12 no sizes": (reblobbed(TINY, "h", shape=("x",)), "blob 'h' has a geometry that cannot be read: "),
    "12 argument": (edited(TINY, 8, args={"size": (2**70, 4)}), "aten.expand.default"),
    "12 unhashable argument": (
        edited(TINY, 8, args={"size": [6, 4]}),
        "aten.expand.default cannot be checked: TypeError",
    ),
    "12 dtype": (
        reblobbed(TINY, "r", dtype="f64"),
        "blob 'r' is declared f64[6,4] but aten.relu.default gives f32[6,4]",
    ),
    "12 strides": (
        reblobbed(TINY, "d.t", strides=(2, 4)),
        "blob 'd.t' is declared f32[4,6] strides [2,4] but aten.t.default gives f32[4,6] strides [1,4]",
    ),
    "12 offset": (reblobbed(TINY, "d.t", offset=1), "is declared f32[4,6] strides [1,4] offset 1 but"),
    "12 operands": (edited(TINY, 0, inputs=("w", "x")), "aten.mm.default refuses its operands"),
    "12 optimizer": (
        edited(TINY, SGD, inputs=("w", "h_grad", "m", "lr")),
        "graphir.sgd takes grad of shape [4, 4], not f32[6,4]",
    ),
    "13 collective": (
        edited(two_participants(), SGD + 1, device=GPU1),
        "AllReduce is on gpu:1 but its first participant is on gpu:0",
    ),
    "13 issue": (edited(TINY, RELU, issue="placed"), "aten.relu.default is not a Copy, so it cannot have issue=placed"),
    "13 received": (edited(TINY, RELU, received="lost"), "received cannot be 'lost', only '' or 'fresh'"),
    "15 reduction": (TINY.with_(reduction="max"), "reduction cannot be 'max', only 'mean' or 'sum'"),
    "15 ahead": (
        TINY.with_(ahead=-1),
        "copies cannot be issued -1 operators ahead, only a whole number from 0 up",
    ),
    "15 shares": (
        TINY.with_(shares=(3, 1)),
        "the replicas cannot share a batch by [3, 1]: 2 shares for 1 device",
    ),
    "15 shares of nothing": (
        two_participants().with_(replicas=("a/", "b/"), shares=(3, 0)),
        "the replicas cannot share a batch by [3, 0]: a share cannot be 0",
    ),
    "15 shares in lowest terms": (
        two_participants().with_(replicas=("a/", "b/"), shares=(4, 2)),
        "the shares [4, 2] are not in lowest terms: [2, 1]",
    ),
    "15 replicas": (TINY.with_(replicas=("", "")), "the replicas ['', ''] are not distinct prefixes"),
    "16 phase": (edited(TINY, RELU, phase="init"), "an operator of step has the phase init"),
    "17 not made": (
        TINY.with_(init=TINY.init.with_(ops=TINY.init.ops[1:], blobs=dict(list(TINY.init.blobs.items())[1:]))),
        "param 'w' is not made by init",
    ),
    "17 device": (reblobbed(TINY, "m", device=GPU1), "state 'm' is on gpu:0 in init but on gpu:1 in step"),
    "17 geometry": (reblobbed(TINY, "m", shape=(4, 5)), "state 'm' differs in shape between init and step"),
    "18 key": (
        TINY.with_(state={k: v for k, v in TINY.state.items() if k != "w"}),
        "program.state has no entry 'w'",
    ),
    "18 shape": (
        TINY.with_(state={**TINY.state, "w": torch.ones(3)}),
        "program.state['w'] is float32[3], unlike blob 'w'",
    ),
    "19 replica": (
        TINY.with_(replicas=("", "gpu_1/")),
        "module state 'gpu_1/w' of the interface is not an external input of step",
    ),
    "19 sharing": (
        TINY.with_(replicas=("", "gpu_1/"), dims={**TINY.dims, "gpu_1/batch": 2}),
        "input 'gpu_1/x' of the interface is not an external input of step",
    ),
    "19 loss": (interface(loss="lss"), "loss 'lss' of the interface is not an external output of step"),
    "20 lr": (interface(param_groups=(ParamGroup("m", ("w",), {}),)), "learning rate 'm' is not an input f64[] @cpu:0"),
    "20 number": (
        interface(param_groups=(ParamGroup("lr", (), {}, {"momentum": "x"}),)),
        "number 'x' is not an input f64[] @cpu:0",
    ),
    "20 no number": (
        interface(param_groups=(ParamGroup("lr", (), {}, {"momentum": "z"}),)),
        "number 'z' is not an external input of step",
    ),
    "20 no lr": (
        interface(param_groups=(ParamGroup("z", (), {}),)),
        "learning rate 'z' is not an external input of step",
    ),
    "21 blob": (TINY.with_(dims={}), "dimension 'batch' of blob 'x' has no value"),
    "21 argument": (
        edited(TINY, 8, args={"size": (dimension("n"), 4)}),
        "dimension 'n' of an argument of 'd_grad' has no value",
    ),
}


def test_sound_programs_pass() -> None:
    for program in (TINY, in_place_relu(), two_participants(), tiny.moved()):
        verify(program)
        verify(program.step)


@pytest.mark.parametrize(("program", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_invariant_is_reported(program: Program, message: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(message)) as e:
        verify(program)
    assert not isinstance(e.value, PlacementError)


def test_host_scalars_may_be_read_anywhere() -> None:
    assert TINY.step.blobs["lr"].device == CPU
    verify(TINY)


def test_stale_external_output() -> None:
    p = in_place_relu()
    with pytest.raises(VerifyError, match="blob 'h' is stale"):
        verify(p.with_(step=p.step.with_(external_outputs=("loss", "h"))))


def test_types_of_caffe2_are_taken_as_they_are_in_its_nets_alone() -> None:
    blobs = {n: Blob(n, None, None, GPU0, "activation", n) for n in "xyz"}
    relu = op("Relu", ("y",), ("y",), output_versions=(1,), effects=Effects(writes=((0, 0),)))
    fc = op("FC", ("x",), ("y",))
    last = op("Softmax", ("y",), ("z",), input_versions=(1,))
    verify(Net("caffe2", (fc, relu, last), blobs, ("x",), ("z",), dialect=CAFFE2))
    with pytest.raises(VerifyError, match="has an operator 'FC'"):
        verify(Net("captured", (fc, relu, last), blobs, ("x",), ("z",)))


def test_a_bare_net_is_compared_with_shapes_where_dims_are_given() -> None:
    wrong = reblobbed(TINY, "h", shape=(tiny.BATCH, 5)).step
    verify(wrong)
    with pytest.raises(VerifyError, match=r"declared f32\[3,5\]"):
        verify(wrong, dims={"batch": 3})


def test_a_size_that_forgot_the_batch_shows_at_another_batch() -> None:
    fixed = reblobbed(TINY, "h", shape=(6, 4))
    verify(fixed)
    with pytest.raises(VerifyError, match="blob 'h' is declared"):
        verify(fixed, dims={"batch": 7})


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_are_sound_at_every_batch(seed: int) -> None:
    program = nets.random_program(seed, mutate=seed % 3 != 0)
    for batch in (6, 10, 15):
        verify(program, dims={"batch": batch})


@pytest.mark.parametrize("seed", range(8))
def test_random_programs_lose_an_operator(seed: int) -> None:
    program = nets.random_program(seed)
    read = {name for o in program.step.ops for name in o.inputs}
    for position, o in enumerate(program.step.ops):
        if any(name in read and name not in program.step.external_inputs for name in o.outputs):
            with pytest.raises(VerifyError):
                verify(dropped(program, position))


# Plans


def instructions(change: Callable[[list[Instruction]], Any], p: Program | None = None) -> Plan:
    """The plan of the moved program with its instructions changed in place."""
    plan = tiny.plan(p or tiny.moved())
    listed = list(plan.instructions)
    change(listed)
    return plan.with_(instructions=tuple(listed))


def index(listed: list[Instruction], kind: str, n: int = 0) -> int:
    return [i for i, instruction in enumerate(listed) if instruction.kind == kind][n]


def swap(listed: list[Instruction], i: int, j: int) -> None:
    listed[i], listed[j] = listed[j], listed[i]


def change(listed: list[Instruction], i: int, **changes: Any) -> None:
    listed[i] = listed[i]._replace(**changes)


BROKEN_PLANS: dict[str, tuple[Plan, str]] = {
    "22 kind": (instructions(lambda s: change(s, index(s, "copy"), kind="run")), "Copy is issued as run, not as copy"),
    "22 unmade": (
        instructions(lambda s: swap(s, index(s, "run", 4), index(s, "run", 6))),
        "'d.t';0 is read before it is made",
    ),
    "22 early": (
        instructions(lambda s: swap(s, index(s, "run", 3), index(s, "run", 4))),
        "storage 'd' is used before a write that comes first in the program",
    ),
    "22 late": (
        instructions(lambda s: s.append(s.pop(index(s, "run")))),
        "storage 'w' is used after a write that comes later in the program",
    ),
    "33 part": (instructions(lambda s: change(s, index(s, "free"), part=9)), "a free has no part, and this one has 9"),
    "33 storage": (
        instructions(lambda s: change(s, index(s, "run"), storage="d")),
        "a run has no storage, and this one has 'd'",
    ),
    "33 operator": (instructions(lambda s: change(s, index(s, "wait"), op=1)), "a wait has no op, and this one has 1"),
    "29 dims": (instructions(lambda s: None).with_(dims={}), "the plan has no size for dimension 'batch'"),
    "23 twice": (instructions(lambda s: s.insert(0, s[index(s, "run")])), "the operator is issued twice"),
    "23 never": (instructions(lambda s: s.pop(index(s, "run", -1))), "the operator is never issued"),
    "23 no operator": (
        instructions(lambda s: s.append(Instruction("run", "gpu:0.compute", 99))),
        "there is no operator 99",
    ),
    "23 part": (instructions(lambda s: s.append(Instruction("run", "gpu:0.compute", 15, 1))), "has no part 1"),
    "24 run": (
        instructions(lambda s: change(s, index(s, "run"), lane="gpu:1.compute")),
        "the operator is issued on gpu:1.compute, not on gpu:0.compute",
    ),
    "24 copy": (
        instructions(lambda s: change(s, index(s, "copy"), lane="gpu:0.copy_out")),
        "the operator is issued on gpu:0.copy_out, not on gpu:1.copy_in",
    ),
    "25 lane": (
        instructions(lambda s: change(s, index(s, "record"), lane="gpu:1.compute")),
        "an event of gpu:0.compute is recorded on gpu:1.compute",
    ),
    "25 untouched": (
        instructions(
            lambda s: s.insert(0, Instruction("record", "gpu:1.compute", event=Event("x", 0, "gpu:1.compute")))
        ),
        "gpu:1.compute has neither made nor read 'x';0",
    ),
    "26 wait": (
        instructions(lambda s: s.insert(0, s.pop(index(s, "wait")))),
        "the event is waited for before it is recorded",
    ),
    "27 used": (
        instructions(lambda s: s.insert(index(s, "run", -1), s.pop(index(s, "free", -1)))),
        "is used after it is freed",
    ),
    "27 twice": (instructions(lambda s: s.append(s[index(s, "free")])), "is freed twice"),
    "27 early": (instructions(lambda s: s.insert(0, s.pop(index(s, "free")))), "is freed before it is made"),
    "27 state": (
        instructions(lambda s: s.append(Instruction("free", "gpu:0.compute", storage="w"))),
        "storage 'w' is freed, but it is still needed after the step",
    ),
    "27 view": (
        instructions(lambda s: s.append(Instruction("free", "gpu:0.compute", storage="d.t"))),
        "'d.t' is freed, but it is not a storage",
    ),
}


def relayed(**buffers: int) -> Plan:
    """Four copies to gpu:1, the first two freed one after the other."""
    plan = passes.emit(
        program_of("""
        input x : f32[8] @gpu:0
        input y : f32[4] @gpu:0
        a : f32[8] @gpu:1 = Copy(x)
        b : f32[8] @gpu:1 = aten.neg(a)
        b_gpu_0 : f32[8] @gpu:0 = Copy(b)
        c : f32[8] @gpu:1 = Copy(b_gpu_0)
        d : f32[4] @gpu:1 = Copy(y)
        e : f32[8] @gpu:1 = Copy(x)
        f : f32[8] @gpu:1 = aten.add.Tensor(c, c)
        g : f32[4] @gpu:1 = aten.neg(d)
        output e
    """)
    )
    return plan.with_(buffers=buffers)


def test_receive_buffers_that_are_taken_in_turn_pass() -> None:
    verify(relayed(a=0, c=0, d=1, b_gpu_0=0))


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ({"c": 0, "d": 0}, "buffer 0 of gpu:1 takes"),
        ({"b": 0}, "'b' has a receive buffer, but no copy makes it or nothing frees it"),
        ({"e": 0}, "'e' has a receive buffer, but no copy makes it or nothing frees it"),
        ({"z": 0}, "'z' has a receive buffer, but no copy makes it or nothing frees it"),
    ],
)
def test_broken_receive_buffers_are_reported(buffers: dict[str, int], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        verify(relayed(**buffers))


def test_sound_plan_passes() -> None:
    verify(tiny.plan(TINY))
    verify(tiny.plan(tiny.moved()))


@pytest.mark.parametrize(("plan", "message"), BROKEN_PLANS.values(), ids=BROKEN_PLANS)
def test_broken_plan_is_reported(plan: Plan, message: str) -> None:
    with pytest.raises(VerifyError, match=re.escape(message)):
        verify(plan)


def test_a_collective_is_issued_once_for_each_participant() -> None:
    plan = tiny.plan(two_participants())
    verify(plan)
    without = tuple(i for i in plan.instructions if i.part != 1)
    with pytest.raises(VerifyError, match="1 parts are never issued"):
        verify(plan.with_(instructions=without))


def test_a_part_is_on_its_participants_lane_for_what_comes_in() -> None:
    plan = tiny.plan(two_participants())
    for lane in ("gpu:1.compute", "gpu:0.copy_in"):
        elsewhere = tuple(i._replace(lane=lane) if i.part == 1 else i for i in plan.instructions)
        with pytest.raises(VerifyError, match=f"issued on {lane}, not on gpu:1.copy_in"):
            verify(plan.with_(instructions=elsewhere))


def test_a_participant_makes_its_own_output_only() -> None:
    plan = tiny.plan(two_participants())
    record = Instruction("record", "gpu:0.copy_in", event=Event("w_grad_1", 0, "gpu:0.copy_in"))
    with pytest.raises(VerifyError, match=r"gpu:0\.copy_in has neither made nor read 'w_grad_1';0"):
        verify(plan.with_(instructions=(*plan.instructions, record)))


def test_a_plan_whose_program_is_broken_reports_the_program() -> None:
    plan = tiny.plan(TINY)
    with pytest.raises(VerifyError, match=r"(?s)is not declared.*in   plan 'tiny'"):
        verify(plan.with_(program=edited(TINY, RELU, inputs=("hh",))))
