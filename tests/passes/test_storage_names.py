"""passes.share_storage on Caffe2 nets: dead names are used again."""

from __future__ import annotations

import random
import time

import pytest

import graphir
from graphir import passes
from graphir.caffe2.dialect import CAFFE2, IN_PLACE
from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.device import CPU, Device, gpu
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator
from graphir.ir.program import Program

Call = tuple[str, str, str]
"""The type of an operator, its inputs and its outputs, as words."""


class Builder:
    """A Caffe2 program, operator by operator; what nobody made is external."""

    def __init__(self) -> None:
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = {}
        self.latest: dict[str, int] = {}
        self.external: list[str] = []

    def blob(self, name: str, size: int | None, device: Device, dtype: str = "f32") -> None:
        shape = None if size is None else (size,)
        self.blobs.setdefault(name, Blob(name, shape, dtype, device, "activation", name))

    def add(self, type: str, inputs: list[str], outputs: list[str], device: Device, **fields: object) -> None:
        for name in inputs:
            if name not in self.latest:
                self.latest[name] = 0
                self.external.append(name)
        reads = tuple(self.latest[name] for name in inputs)
        for name in outputs:
            self.latest[name] = self.latest.get(name, -1) + 1
        makes = tuple(self.latest[name] for name in outputs)
        writes = tuple((k, inputs.index(name)) for k, name in enumerate(outputs) if name in inputs)
        op = Operator(type, tuple(inputs), tuple(outputs), {}, device, effects=Effects(writes))
        self.ops.append(op._replace(input_versions=reads, output_versions=makes, **fields))

    def program(self, outputs: tuple[str, ...] = (), state: tuple[str, ...] = ()) -> Program:
        external = tuple(self.external)
        blobs = {name: self.blobs[name] for name in (*external, *self.blobs)}
        for name in external:
            blobs[name] = blobs[name]._replace(role="state" if name in state else "input")
        fills = tuple(Operator("XavierFill", (), (name,), {}, blobs[name].device, "init") for name in state)
        init = Net("init", fills, {name: blobs[name] for name in state}, dialect=CAFFE2)
        return Program("small", init, Net("step", tuple(self.ops), blobs, external, outputs, dialect=CAFFE2))


def program_of(calls: list[Call], sizes: dict[str, int | None] | None = None, **options: object) -> Program:
    builder = Builder()
    for type, inputs, outputs in calls:
        for name in (*inputs.split(), *outputs.split()):
            builder.blob(name, (sizes or {}).get(name, 100), gpu(0))
        builder.add(type, inputs.split(), outputs.split(), gpu(0))
    return builder.program(**options)  # type: ignore[arg-type]


def shared(program: Program, **options: object) -> Program:
    after = passes.share_storage(program, **options)  # type: ignore[arg-type]
    assert graphir.certify(program, after).holds
    return after


def calls_of(program: Program) -> list[Call]:
    return [(op.type, " ".join(op.inputs), " ".join(op.outputs)) for op in program.step.ops]


def nbytes(program: Program) -> int:
    return sum(graphir.memory(program, frees="operators").total.values())


CHAIN = [("FC", "x", "a"), ("FC", "a", "b"), ("FC", "b", "c"), ("FC", "c", "d"), ("FC", "d", "y")]


def test_a_chain_goes_back_and_forth_between_two_names() -> None:
    after = shared(program_of(CHAIN, outputs=("y",)))
    assert calls_of(after) == [
        ("FC", "x", "y"),
        ("FC", "y", "b"),
        ("FC", "b", "y"),
        ("FC", "y", "b"),
        ("FC", "b", "y"),
    ]
    last = after.step.ops[-1]
    assert last.input_versions == (1,) and last.output_versions == (2,)
    assert all(op.by == "share_storage" for op in after.step.ops)
    assert list(after.step.blobs) == ["x", "y", "b"]


def test_a_name_has_the_geometry_of_the_largest_that_it_holds() -> None:
    program = program_of(CHAIN, {"a": 10, "c": 300, "y": 20}, outputs=("y",))
    after = shared(program)
    assert after.step.blobs["y"].shape == (300,)
    assert nbytes(program) - nbytes(after) == (10 + 100 + 20) * 4


@pytest.mark.parametrize(("type", "positions"), IN_PLACE.items())
def test_an_output_takes_the_name_of_an_operand_where_caffe2_allows_it(
    type: str, positions: tuple[tuple[int, int], ...]
) -> None:
    inputs, outputs = 7, 5
    for source in range(inputs):
        operands = [f"w{k}" for k in range(inputs)]
        operands[source] = "a"
        results = [f"r{k}" for k in range(outputs)]
        program = program_of([("FC", "x", "a"), (type, " ".join(operands), " ".join(results))])
        op = shared(program).step.ops[1]
        allowed = [target for k, target in positions if k == source]
        assert op.effects.writes == tuple((target, source) for target in allowed)
        assert [k for k, name in enumerate(op.outputs) if name == op.inputs[source]] == allowed


@pytest.mark.parametrize(
    ("calls", "sizes"),
    [
        pytest.param([("Relu", "x", "b")], {}, id="an external input"),
        pytest.param([("FC", "x", "a"), ("Relu", "a", "b"), ("FC", "a b", "c")], {}, id="read later"),
        pytest.param([("FC", "x", "a"), ("Softmax", "a", "b")], {}, id="not allowed"),
        pytest.param([("FC", "x", "a"), ("Sum", "a a", "b")], {}, id="one of two positions is not allowed"),
        pytest.param([("FC", "x", "a"), ("Add", "a x", "b")], {"b": 200}, id="another shape"),
        pytest.param([("FC", "x", "a"), ("Relu", "a", "b")], {"a": None, "b": None}, id="unknown shapes"),
    ],
)
def test_what_may_not_be_in_place_is_not(calls: list[Call], sizes: dict[str, int | None]) -> None:
    after = shared(program_of(calls, sizes))
    assert not any(op.effects.writes for op in after.step.ops)


def test_what_is_in_place_stays_in_place() -> None:
    after = shared(program_of([("FC", "x", "a"), ("Odd", "a", "a"), ("FC", "a", "b"), ("FC", "b", "c")]))
    assert calls_of(after) == [("FC", "x", "c"), ("Odd", "c", "c"), ("FC", "c", "b"), ("FC", "b", "c")]
    assert after.step.ops[1].effects.writes == ((0, 0),)


def test_what_nobody_reads_what_is_kept_and_single_elements_are_there_after_the_step() -> None:
    calls = [*CHAIN[:3], ("Loss", "c", "loss"), ("Grad", "loss c", "g"), ("Grad", "g", "x_grad"), ("Count", "x", "n")]
    program = program_of(calls, {"loss": 1})
    after = shared(program)
    assert {"loss", "x_grad", "n"} <= after.step.blobs.keys()
    assert "a" not in {*after.step.ops[-2].outputs, *after.step.ops[-3].outputs}
    kept = shared(program, keep=["a"])
    assert [op.outputs for op in kept.step.ops if "a" in op.outputs] == [("a",)], "its value is the last under the name"


def test_kept_blobs_have_to_be_there() -> None:
    with pytest.raises(GraphirError, match="no blob 'aa' in net 'step'"):
        passes.share_storage(program_of(CHAIN), keep=["aa"])


def test_keeping_is_part_of_the_history() -> None:
    assert passes.share_storage(program_of(CHAIN), keep=["a"]).history == ("share_storage{keep=[a]}",)


def test_state_that_is_written_before_it_is_read_is_left_alone() -> None:
    builder = Builder()
    for name in "xabcd":
        builder.blob(name, 100, gpu(0))
    builder.latest["b"], builder.external = 0, ["b"]
    for source, target in ("xa", "ab", "bc", "cd", "dx"):
        builder.add("FC", [source], [target], gpu(0))
    after = shared(builder.program(state=("b",)))
    assert [k for k, op in enumerate(after.step.ops) if "b" in op.outputs] == [1]
    assert [op.outputs for op in after.step.ops] == [("a",), ("b",), ("a",), ("d",), ("x",)]


def test_what_init_makes_is_left_alone() -> None:
    program = program_of([("FC", "x", "a"), ("FC", "a w", "b"), ("FC", "b", "c"), ("FC", "c", "d")], state=("w",))
    filled = Operator("ConstantFill", (), ("a",), {}, gpu(0), "init")
    init = program.init.with_(
        ops=(*program.init.ops, filled), blobs={**program.init.blobs, "a": program.step.blobs["a"]}
    )
    after = shared(program.with_(init=init))
    assert [op for op in after.step.ops if "a" in op.outputs or "a" in op.inputs] == [
        after.step.ops[0],
        after.step.ops[1],
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"proto": 'control_input: "b"'},
        {"proto": 'arg { name: "net" n { op { input: "b" output: "q" type: "Relu" } } }'},
        {"args": {"step_net": ("p", "b")}},
        {"args": {"blob": "b"}},
    ],
    ids=["control input", "nested net", "strings", "string"],
)
def test_what_is_named_otherwise_than_as_an_operand_is_left_alone(fields: dict[str, object]) -> None:
    program = program_of(CHAIN, outputs=("y",))
    ops = (*program.step.ops[:-1], program.step.ops[-1]._replace(**fields))
    after = shared(program.with_(step=program.step.with_(ops=ops)))
    assert [k for k, op in enumerate(after.step.ops) if "b" in op.outputs] == [1]


def test_what_has_two_names_in_memory_is_left_alone() -> None:
    after = shared(program_of([("FC", "x", "a"), ("Alias", "a", "b"), *[("FC", "b", "c"), ("FC", "c", "d")]]))
    assert calls_of(after)[:2] == [("FC", "x", "a"), ("Alias", "a", "b")]
    assert not {"a", "b"} & {name for op in after.step.ops[2:] for name in op.outputs}


def test_gradients_of_what_shares_are_forgotten() -> None:
    program = program_of(CHAIN, outputs=("y",))
    step = program.step.with_(gradients={"a": "c", "x": "x"})
    assert shared(program.with_(step=step)).step.gradients == {"x": "x"}


def test_nothing_to_share_is_the_same_net() -> None:
    program = program_of(CHAIN[:1])
    assert passes.share_storage(program).step is program.step


TYPES = ("FC", "Relu", "ReluGradient", "Sum", "Add", "WeightedSum", "SpatialBN", "ConstantFill", "Odd")


def random_program(seed: int, ops: int = 60) -> Program:
    """Operators over blobs of few sizes on few devices, in place, written again, freed, and unread ones among them."""
    rng = random.Random(seed)
    devices = rng.choice(([gpu(0)], [gpu(0), gpu(1), CPU]))
    sizes = rng.choice(([8], [1, 8, 40, None], list(range(2, 60))))
    builder = Builder()
    state = ("w0", "w1", "w2")
    for name in ("x0", "x1", *state):
        builder.blob(name, rng.choice(sizes), rng.choice(devices))
        builder.add("Use", [name], [], builder.blobs[name].device)
    readable = dict.fromkeys(builder.external)
    for k in range(ops):
        recent = list(readable)[-8:]
        inputs = [rng.choice(recent) for _ in range(rng.choice((1, 1, 2, 3)))]
        first = builder.blobs[inputs[0]]
        outputs = {}
        for j in range(rng.choice((1, 1, 1, 2))):
            name = f"{rng.choice(('', 'gpu_0/', 'gpu_1/'))}b{k}_{j}"
            if rng.random() < 0.2:
                name = rng.choice([inputs[0], *builder.latest])
            size = first.shape[0] if first.shape and rng.random() < 0.7 else rng.choice(sizes)
            builder.blob(name, size, rng.choice((first.device, rng.choice(devices))), rng.choice(("f32", "f32", "i64")))
            outputs[name] = None
        one_each = len(inputs) == len(outputs) == 1 and inputs != list(outputs)
        builder.add(
            "Copy" if one_each and rng.random() < 0.2 else rng.choice(TYPES), inputs, list(outputs), first.device
        )
        readable |= outputs
        freed = rng.choice(list(readable))
        if rng.random() < 0.1 and freed not in builder.external:
            builder.add("Free", [freed], [freed], builder.blobs[freed].device)
            del readable[freed]
    made = [name for name in readable if name not in builder.external]
    return builder.program(tuple(rng.sample(made, min(3, len(made)))), state)


PROGRAMS = [random_program(seed) for seed in range(50)]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_random_nets_certify_and_take_no_more(program: Program) -> None:
    after = shared(program)
    graphir.verify(after, placed=False)
    assert nbytes(after) <= nbytes(program)
    assert passes.share_storage(program) == after


def test_random_nets_share() -> None:
    less = [nbytes(passes.share_storage(program)) < nbytes(program) for program in PROGRAMS]
    assert sum(less) > len(PROGRAMS) // 2


def values(net: Net) -> tuple[list[list[object]], dict[str, object]]:
    """What each operator finds under the names that it reads, and what is there at the end: by name alone.

    A value is the operator and output that it was made by, or the name under which it was given.
    """
    workspace: dict[str, object] = {name: name for name in net.external_inputs}
    found = []
    for position, op in enumerate(net.ops):
        found.append([workspace[name] for name in op.inputs])
        for k, name in enumerate(op.outputs):
            workspace[name] = None if op.type == "Free" else (position, k)
    return found, workspace


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_every_operator_reads_the_values_that_it_read(program: Program) -> None:
    """No two live values are under one name, else the later one would be read in place of the other."""
    before, after = program.step, passes.share_storage(program).step
    (reads, end), (reads_after, end_after) = values(before), values(after)
    assert reads == reads_after
    unread = {name for name, value in end.items() if value and not any(value in r for r in reads)}
    for name in {*before.external_inputs, *before.external_outputs, *unread}:
        assert end_after[name] == end[name]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_names_stay_on_their_device_and_with_their_replica(program: Program) -> None:
    after = passes.share_storage(program)
    for a, b in zip(program.step.ops, after.step.ops, strict=True):
        for old, new in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
            ours, theirs = program.step.blobs[old], after.step.blobs[new]
            assert ours.device == theirs.device
            assert old == new or ("/" in old) == ("/" in new)
            assert ours.nbytes({}) <= theirs.nbytes({})
            assert (ours.shape is None) == (theirs.shape is None)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_what_is_new_in_place_is_allowed_there(program: Program) -> None:
    after = passes.share_storage(program)
    for a, b in zip(program.step.ops, after.step.ops, strict=True):
        for k, name in enumerate(b.outputs):
            for source in [i for i, read in enumerate(b.inputs) if read == name and a.inputs[i] != a.outputs[k]]:
                assert (source, k) in IN_PLACE[a.type]
                ours, theirs = program.step.blobs[a.inputs[source]], program.step.blobs[a.outputs[k]]
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def long_program(ops: int) -> Program:
    """A forward and a backward chain, with blobs of many sizes."""
    builder = Builder()
    builder.blob("a0", 7, gpu(0))
    half = ops // 2
    for k in range(half):
        builder.blob(f"a{k + 1}", 2 + k * 37 % 1009, gpu(0))
        builder.add(("FC", "Relu", "Sum")[k % 3], [f"a{k}"], [f"a{k + 1}"], gpu(0))
    for k in reversed(range(half)):
        builder.blob(f"a{k}_grad", 2 + k * 37 % 1009, gpu(0))
        last = f"a{k + 1}_grad" if k + 1 < half else f"a{half}"
        builder.add(("ReluGradient", "FCGradient")[k % 2], [f"a{k}", last], [f"a{k}_grad"], gpu(0))
    return builder.program()


def test_time_grows_with_the_net_and_not_faster() -> None:
    def seconds(ops: int) -> float:
        program = long_program(ops)
        start = time.process_time()
        passes.ShareStorage().recorded(program)
        return time.process_time() - start

    assert seconds(20_000) < 30 * min(seconds(2_000) for _ in range(3))
