"""Programs that compute other values where the eye, one size, or the first two steps see none; each must be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small import program_of, two_layers
from tiny import edited, inserted, op
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.caffe2 import load_program
from graphir.errors import EquivalenceError, PassError, VerifyError
from graphir.ir.device import Device
from graphir.ir.program import Program

REFUSED = (EquivalenceError, VerifyError)


def differ(before: Program, after: Program, match: str = "") -> None:
    """Both are programs, and are not certified to be one."""
    graphir.verify(before, placed=False)
    with pytest.raises(REFUSED, match=match):
        graphir.certify(before, after)


def text(body: str, **changes: Any) -> Program:
    return program_of(body, dims={"batch": 8}, **changes)


# Operators that read beyond a view's elements


class Reaching(nn.Module):
    """Every other row of a linear layer, and then elements by their place in memory."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.read(self.fc(x)[::2]))


READERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "as_strided_copy": lambda v: torch.as_strided_copy(v, (5,), (3,), 1),
    "as_strided": lambda v: v.as_strided((5,), (3,), 1) * 2,
    "slice_scatter": lambda v: v.slice_scatter(v[:, :2] * 2, 1, 0, 2).as_strided((3,), (5,), 1) * 3,
}


@pytest.mark.parametrize("name", READERS)
def test_every_placement_of_what_reads_beyond_a_view_gives_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    model, x = Reaching(READERS[name]), torch.randn(6, 4)
    program = graphir.capture(model, inputs=(x,))
    with torch.no_grad():
        expected = model(x)
    for activations in _cuts(program):
        moved = passes.inject_copies(passes.shift_activations(program, activations, shifts={0: 1}))
        graphir.certify(program, moved)
        for executor in ("reference", "threads"):
            with runtime.Session(passes.emit(moved), program.state, executor=executor) as session:
                assert torch.equal(session.step(x), expected), (activations, executor)


def _cuts(program: Program) -> list[list[str]]:
    found = passes.find_activations(program)
    return [found[i:] for i in range(1, len(found))] + [[name] for name in found]


def test_a_copy_of_a_view_does_not_stand_for_what_is_around_it() -> None:
    read = """
        input x : f32[8,4] @gpu:0
        y : f32[8,4] @gpu:0 = aten.relu(x)
        v : f32[4,4] strides [8,1] in y @gpu:0 = aten.slice.Tensor(y, step=2)
        output z : f32[5] @gpu:0 = aten.as_strided_copy(v, size=[5], stride=[3], storage_offset=1)
        output z
    """
    copied = read.replace("output z : ", "w : f32[4,4] strides [8,1] @gpu:0 = Copy(v)\n        output z : ", 1)
    copied = copied.replace("as_strided_copy(v,", "as_strided_copy(w,")
    differ(program_of(read), program_of(copied), "output 'z'")


@pytest.mark.parametrize("x", ["f32[4,4] strides [8,1]", "f32[4,4] strides [1,4]"])
def test_only_a_dense_storage_crosses_for_what_reads_beyond_its_operand(x: str) -> None:
    body = f"""
        input x : {x} @gpu:0
        output z : f32[4] @gpu:0 = aten.as_strided_copy(x, size=[4], stride=[3], storage_offset=0)
        output z
    """
    program = program_of(body)
    device = Device.parse("gpu:1")
    net = program.step
    moved = net.with_(ops=(net.ops[0].on(device, "by hand"),), blobs={**net.blobs, "z": net.blobs["z"].on(device)})
    moved = program.with_(step=moved)
    if "[8,1]" in x:
        with pytest.raises(PassError, match="may read beyond the elements of 'x'"):
            passes.inject_copies(moved)
    else:
        assert graphir.certify(program, passes.inject_copies(moved)).holds


# What a view is: its elements, with their sign, at every size


def test_a_conjugate_is_not_its_operand() -> None:
    conjugate = """
        input x : c64[4] @gpu:0
        input v : c64[4] in x @gpu:0 = aten._conj(x)
        output z : c64[4] @gpu:0 = aten.mul.Tensor(v, v)
        output z
    """
    negative = conjugate.replace("aten._conj", "aten._neg_view")
    alias = conjugate.replace("aten._conj", "aten.alias")
    dropped = conjugate.replace("Tensor(v, v)", "Tensor(x, x)")
    for other in (negative, alias, dropped):
        differ(program_of(conjugate), program_of(other), "output 'z'")
    differ(program_of(negative), program_of(alias), "output 'z'")


def test_a_plan_does_not_take_an_alias_for_a_conjugate() -> None:
    body = """
        input x : c64[4] @gpu:0
        input v : c64[4] in x @gpu:0 = {}(x)
        output z : c64[4] @gpu:0 = aten.mul.Tensor(v, v)
        output z
    """
    plan, other = (passes.emit(program_of(body.format(type))) for type in ("aten._conj", "aten.alias"))
    assert not runtime.check(plan)
    (finding,) = runtime.check(plan.with_(program=other.program))
    assert finding.kind == "wrong value"


def test_a_conjugate_that_moves_is_a_conjugate() -> None:
    torch.manual_seed(0)

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = torch.fft.fft(x) @ torch.fft.fft(self.w).conj()
            return (h * h.conj()).real.tanh() + torch.view_as_real(h).sum(-1)

    model, x = Spectrum(), torch.randn(6, 4)
    program = graphir.capture(model, inputs=(x,), loss=lambda y: y.sum(), optimizer=None)
    plain = passes.emit(program)
    with runtime.Session(plain, program.state) as session:
        expected = session.step(x)
    for activations in _cuts(program):
        moved = passes.inject_copies(passes.shift_activations(program, activations, shifts={0: 1}))
        graphir.certify(program, moved)
        with runtime.Session(passes.emit(moved), program.state) as session:
            assert torch.equal(session.step(x), expected)


@pytest.mark.parametrize(
    ("type", "ours", "theirs"),
    [
        ("aten.select.int", "dim=0, index=-1", "dim=0, index=7"),
        ("aten.slice.Tensor", "start=1", "start=1, end=8"),
        ("aten.view", "size=[batch, 4]", "size=[8, 4]"),
        ("aten._unsafe_view", "size=[4*batch]", "size=[32]"),
        ("aten.transpose.int", "dim0=0, dim1=1", "dim0=0, dim1=batch-7"),
        ("aten.narrow_copy", "dim=0, start=0, length=batch", "dim=0, start=0, length=8"),
    ],
)
def test_arguments_that_agree_at_the_captured_size_only(type: str, ours: str, theirs: str) -> None:
    declared = {
        "aten.select.int": "f32[4] offset 4*batch-4 in y",
        "aten.slice.Tensor": "f32[batch-1,4] offset 4 in y",
        "aten.view": "f32[batch,4] in y",
        "aten._unsafe_view": "f32[4*batch] in y",
        "aten.transpose.int": "f32[4,batch] strides [1,4] in y",
        "aten.narrow_copy": "f32[batch,4]",
    }[type]
    programs = [
        text(f"""
            input x : f32[batch,4] @gpu:0
            y : f32[batch,4] @gpu:0 = aten.relu(x)
            v : {declared} @gpu:0 = {type}(y, {args})
            output z : f32[] @gpu:0 = aten.sum(v)
            output z
        """)
        for args in (ours, theirs)
    ]
    differ(*programs, match="output 'z'")


@pytest.mark.parametrize("last", ["zeros_like(u)", "neg(u)", "fill.Scalar(u, value=1)"])
def test_a_view_that_is_declared_as_it_is_at_the_captured_size_only(last: str) -> None:
    """The second view is declared [4, 2] though the first one has fewer rows at another batch."""
    body = f"""
        param w : f32[8,8] @gpu:0
        input x : f32[batch,8] @gpu:0
        v : f32[{{rows}},8] in w @gpu:0 = aten.slice.Tensor(w, dim=0, start=0, end={{rows}})
        u : f32[4,2] strides [8,1] in w @gpu:0 = aten.slice.Tensor(v, dim=1, start=0, end=2)
        output z : f32[4,2] @gpu:0 = aten.{last}
        output z
    """
    body = body.replace("        v :", "        param v :").replace("        u :", "        param u :")
    differ(*(program_of(body.format(rows=rows), dims={"batch": 2}) for rows in ("4", "-batch+6")), match="output 'z'")


def test_what_nobody_reads_may_fail_where_nothing_failed() -> None:
    body = """
        input x : f32[batch,4,2] @gpu:0
        p : f32[4,batch,2] strides [2,8,1] in x @gpu:0 = aten.permute(x, dims=[1, {}, 2])
        dead : f32[4,batch,2] strides [2,8,1] @gpu:0 = aten.neg(p)
        output z : f32[batch,4,2] @gpu:0 = aten.relu(x)
        output z
    """.replace("        p :", "        input p :")
    programs = [program_of(body.format(dim), dims={"batch": 3}) for dim in ("0", "batch-3")]
    differ(*programs, match="no operator of the first program computes what this operator of the second does")
    net = programs[0].step
    blobs = {name: blob for name, blob in net.blobs.items() if name not in ("p", "dead")}
    less = programs[0].with_(step=net.with_(ops=net.ops[-1:], blobs=blobs))
    assert graphir.certify(programs[0], less).holds


def test_a_check_is_not_left_out() -> None:
    body = """
        input x : f32[4] @gpu:0
        ok : bool[] @gpu:0 = aten.all(x)
        {}
        output z : f32[4] @gpu:0 = aten.relu(x)
        output z
    """
    unchecked = program_of(body.format(""))
    check = op("aten._assert_async.default", ("ok",), ())
    checked = inserted(unchecked, 1, check)
    differ(checked, unchecked, "nothing any more computes what this operator of the first does")


# Operators that alias only sometimes


@pytest.mark.parametrize(
    ("type", "args"),
    [
        ("aten.contiguous.default", {}),
        ("aten.reshape.default", {"shape": (4, 4)}),
        ("aten.flatten.using_ints", {}),
        ("aten.ravel.default", {}),
        ("aten.to.dtype", {"dtype": "f32"}),
    ],
)
def test_an_operator_that_may_copy_is_no_view(type: str, args: Any) -> None:
    program = program_of("""
        param w : f32[4,4] @gpu:0
        input x : f32[4,4] @gpu:0
        param w.t : f32[4,4] strides [1,4] in w @gpu:0 = aten.t(w)
        param c : f32[4,4] in w @gpu:0 = aten.alias(w.t)
        output z : f32[4,4] @gpu:0 = aten.mm(x, c)
        w;1 = aten.add_.Tensor(w, z) {phase=update}
        output z
    """)
    with pytest.raises(VerifyError, match=r"torch decides what it consists of when it runs"):
        graphir.verify(edited(program, 1, type=type, args=args))


# States


def chain(length: int, second: str, *, twin: bool = False) -> Program:
    """A constant that is handed down a chain of states, and shows in the output of the step after the last.

    Args:
        length: of the chain.
        second: the constant.
        twin: the output reads a state beside the last one that is always equal to it.
    """
    names = [f"s{i}" for i in range(length)]
    links = list(zip(names, [second, *names[:-1]], strict=True))
    if twin:
        links.append(("twin", names[-2]))
    body = [f"buffer {name} : f32[2] @gpu:0" for name in (*(name for name, _ in links), "one", "two")]
    body += ["input x : f32[2] @gpu:0", f"output z : f32[2] @gpu:0 = aten.add.Tensor(x, {links[-1][0]})"]
    for name, source in reversed(links):
        body.append(f"{name};1 = aten.copy_({name}, {source}) {{phase=update}}")
    return program_of("\n".join([*body, "output z"]))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 40])
def test_a_constant_at_the_end_of_a_chain_of_states(length: int) -> None:
    graphir.certify(chain(length, "one"), chain(length, "one"))
    differ(chain(length, "one"), chain(length, "two"), f"output 'z' differs after step {length}")


def test_a_chain_that_is_too_long_to_follow_to_its_end_is_refused() -> None:
    differ(chain(150, "one"), chain(150, "two"), "state 's0' differs after step 0")
    graphir.certify(chain(150, "one"), chain(150, "one"))


def starting_alike(program: Program) -> Program:
    """All states start from one tensor."""
    ops = tuple(op._replace(args={"key": "one"}) for op in program.init.ops)
    return program.with_(init=program.init.with_(ops=ops))


def test_a_proof_that_takes_too_many_rounds_is_not_found() -> None:
    """States that start alike part one a step, and the output reads another one than before."""
    short, long = ([starting_alike(chain(n, "one", twin=twin)) for twin in (False, True)] for n in (20, 150))
    assert graphir.certify(*short).holds
    differ(*long, match="no proof was found: after 100 steps there still are states that part from each other")


def test_states_that_are_equal_for_ever_may_stand_for_each_other() -> None:
    body = """
        buffer a : f32[2] @gpu:0
        buffer b : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        output z : f32[2] @gpu:0 = aten.add.Tensor(x, {})
        a;1 = aten.add_.Tensor(a, x) {{phase=update}}
        b;1 = aten.add_.Tensor(b, {}) {{phase=update}}
        output z
    """

    first, second = starting_alike(program_of(body.format("a", "x"))), starting_alike(program_of(body.format("b", "x")))
    assert graphir.certify(first, second).holds
    differ(program_of(body.format("a", "x")), program_of(body.format("b", "x")), "output 'z' differs after step 0")
    differ(first, starting_alike(program_of(body.format("b", "z"))), "output 'z' differs after step 1")


# The interface


def trained() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    halves = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "lr": 0.2}]
    optimizer = torch.optim.SGD(halves, momentum=0.9)
    x, y = torch.randn(2, 6, 4)
    return graphir.capture(model, inputs=(x,), targets=(y,), loss=F.mse_loss, optimizer=optimizer)


TRAINED = trained()
REPLICATED = passes.replicate(TRAINED, devices=[0, 1])


def with_interface(program: Program, **changes: Any) -> Program:
    return program.with_(interface=replace(program.interface, **changes))


INTERFACE: Mapping[str, Callable[[Program], Program]] = {
    "feeds of the interface": lambda p: with_interface(
        p, feeds=(p.interface.feeds[0]._replace(blob=p.interface.feeds[1].blob), *p.interface.feeds[1:])
    ),
    "module_state of the interface": lambda p: with_interface(
        p, module_state={**p.interface.module_state, "0.weight": "2.weight", "2.weight": "0.weight"}
    ),
    "param_groups of the interface": lambda p: with_interface(p, param_groups=p.interface.param_groups[::-1]),
    "optimizer_state of the interface": lambda p: with_interface(
        p, optimizer_state={**p.interface.optimizer_state, "0.bias": p.interface.optimizer_state["2.bias"]}
    ),
    "optimizers of the interface": lambda p: with_interface(p, optimizers=("Adam",)),
    "guards": lambda p: p.with_(covers=p.covers.with_guards(())),
    "captured sizes": lambda p: p.with_(dims={name: size + 2 for name, size in p.dims.items()}),
    "fixed sizes": lambda p: p.with_(covers=replace(p.covers, fixed="" if p.covers.fixed else "always")),
    "tensors of program.state": lambda p: p.with_(state={**p.state, "0.bias": p.state["2.bias"]}),
}


@pytest.mark.parametrize("what", INTERFACE)
@pytest.mark.parametrize("program", [TRAINED, REPLICATED], ids=["captured", "replicated"])
def test_what_a_session_reads_is_compared(program: Program, what: str) -> None:
    changed = INTERFACE[what](program)
    differ(program, changed, what)


def test_the_order_of_replicas_is_compared() -> None:
    differ(REPLICATED, REPLICATED.with_(replicas=REPLICATED.replicas[::-1]), "replicas differ")


def test_the_shares_of_replicas_are_compared() -> None:
    differ(REPLICATED, REPLICATED.with_(shares=(3, 1)), "shares of the batch differ")


def test_a_constant_option_is_compared_with_its_type() -> None:
    groups = TRAINED.interface.param_groups
    options = {**groups[0].options, "momentum": 1.0}, {**groups[0].options, "momentum": True}
    changed = [with_interface(TRAINED, param_groups=(groups[0]._replace(options=o), *groups[1:])) for o in options]
    differ(*changed, match="param_groups of the interface differ")


@pytest.mark.parametrize(("name", "role"), [("0.weight", "buffer"), ("0", "param"), ("3.running_mean", "state")])
def test_the_role_of_what_a_session_keeps_is_compared(name: str, role: Any) -> None:
    def changed(net: Any) -> Any:
        blobs = {n: b._replace(role=role) if b.storage == net.blobs[name].storage else b for n, b in net.blobs.items()}
        return net.with_(blobs=blobs) if name in net.blobs else net

    init = TRAINED.init if name not in TRAINED.init.blobs else changed(TRAINED.init)
    with pytest.raises(REFUSED, match=r"roles of|blobs that hold state"):
        graphir.certify(TRAINED, TRAINED.with_(init=init, step=changed(TRAINED.step)), verified=True)


def test_the_phase_in_which_state_is_written_is_compared() -> None:
    net = TRAINED.step
    ops = tuple(op._replace(phase="backward") if op.phase == "update" else op for op in net.ops)
    differ(TRAINED, TRAINED.with_(step=net.with_(ops=ops)), "writes to '0.bias' before the update differ")


# Text of imported nets


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ('s: "device_id: 3"', 's: "device_id: 4"'),
        ('s: "a  b"', 's: "a b"'),
        ('s: "control_input: \\"x\\""', 's: ""'),
        (
            'n { op { type: "Scale" arg { name: "k" s: "device_id: 3" } } }',
            'n { op { type: "Scale" arg { name: "k" s: "device_id: 4" } } }',
        ),
    ],
)
def test_text_inside_of_an_argument_is_an_argument(tmp_path: Any, ours: str, theirs: str) -> None:
    programs = []
    for i, argument in enumerate((ours, theirs)):
        path = tmp_path / f"{i}.pbtxt"
        path.write_text(
            f'name: "n" external_input: "x" op {{ input: "x" output: "y" type: "Odd" arg {{ name: "a" {argument} }} }}'
        )
        programs.append(load_program(path))
    differ(*programs, match="output 'y'")
    placed = tmp_path / "placed.pbtxt"
    placed.write_text(
        f'name: "n" external_input: "x" op {{ input: "x" output: "y" type: "Odd" arg {{ name: "a" {ours} }} '
        "device_option { device_type: 1 device_id: 1 } }"
    )
    assert graphir.certify(programs[0], load_program(placed)).holds


# What imported nets are given, hand back and are filled with


def imported(tmp_path: Any, text: str, init: str = "") -> Program:
    """The program of these two texts of nets."""
    paths = [tmp_path / f"{name}.pbtxt" for name in ("step", "init")]
    for path, body in zip(paths, (text, init), strict=True):
        path.write_text(f'name: "n" {body}')
    return load_program(paths[0], init=paths[1]) if init else load_program(paths[0])


GIVEN = 'external_input: "x" external_input: "u"'
HANDED = 'external_output: "y" external_output: "z"'
ADDED = 'op { input: "x" input: "u" output: "y" type: "Add" } op { input: "y" output: "z" type: "Relu" }'


@pytest.mark.parametrize(
    ("ours", "theirs", "match"),
    [
        (f"{GIVEN} {HANDED}", f'external_input: "u" external_input: "x" {HANDED}', "inputs of the step"),
        (f"{GIVEN} {HANDED}", f'{GIVEN} external_output: "z" external_output: "y"', "outputs of the step"),
    ],
)
def test_the_order_in_which_an_imported_net_takes_and_hands_back_is_compared(
    tmp_path: Any, ours: str, theirs: str, match: str
) -> None:
    """``caffe2.lower`` makes an interface of it, which is compared between programs that have one."""
    differ(imported(tmp_path, f"{ours} {ADDED}"), imported(tmp_path, f"{theirs} {ADDED}"), match)


def test_what_init_computes_and_overwrites_may_fail(tmp_path: Any) -> None:
    """Of one dimension no deviation follows, so that MSRAFill refuses it."""
    step = 'external_input: "w" op { input: "w" output: "y" type: "Relu" }'
    fill = 'op {{ output: "w" type: "{}" arg {{ name: "shape" ints: 3 }} }}'
    before, after = (
        imported(tmp_path, step, fill.format(type) + fill.format("ConstantFill"))
        for type in ("ConstantFill", "MSRAFill")
    )
    differ(before, after, r"no operator of the first program computes(.|\n)*MSRAFill")


def test_what_a_certificate_takes_for_granted_is_said() -> None:
    program = two_layers()
    shared = passes.share_storage(program)
    certificate = graphir.certify(program, shared)
    assert "in-place forms give the bits of their functional operators" in str(certificate)
    assert len(graphir.certify(program, program).assumptions) == 1
