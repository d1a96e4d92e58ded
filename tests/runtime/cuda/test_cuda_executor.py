"""What the CUDA executor asks of streams and events, on devices that are pretended (:mod:`fake_cuda`)."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import cache
from itertools import groupby
from typing import Any

import models
import nets
import pytest
import torch
from fake_cuda import FakeEvent, watched
from graphir.runtime import Session
from graphir.runtime.codegen.handoffs import handoffs
from graphir.runtime.cuda.executor import Cuda
from graphir.runtime.cuda.graphs import CudaGraphs
from graphir.runtime.failures.faults import fault
from runnable import captured, forward_plan, sgd, spread

import graphir
from graphir import RunError, SessionError, memory, passes
from graphir.ir.device import CPU
from graphir.ir.plan import Plan
from graphir.ir.program import Program

APART = {f"gpu:{i}": f"cuda:{i}" for i in range(4)}
TOGETHER = {f"gpu:{i}": "cuda:0" for i in range(4)}
PAIRS = {f"gpu:{i}": f"cuda:{i % 2}" for i in range(4)}
MIXED = {"gpu:0": "cuda:0", "gpu:1": "cuda:0", "gpu:2": "cpu", "gpu:3": "cuda:1"}
BINDINGS = {"apart": APART, "together": TOGETHER, "pairs": PAIRS, "mixed": MIXED}


@cache
def resnet() -> tuple[Program, Plan, list[torch.Tensor]]:
    example = models.resnet(batch=4, blocks=1, dropout=0.3)
    program = captured(example, sgd(example.model.parameters()))
    batch = [torch.cat([tensor] * 2)[:7] for tensor in (*example.inputs, *example.targets)]
    return program, passes.emit(spread(program)), batch


@cache
def mlp(devices: tuple[int, ...] = (0, 1)) -> tuple[Program, Plan, list[torch.Tensor]]:
    example = models.mlp()
    program = captured(example, torch.optim.AdamW(example.model.parameters(), fused=True))
    placed = passes.replicate(program, devices) if len(devices) > 1 else program
    return program, passes.emit(placed), [*example.inputs, *example.targets]


def assert_equal(ours: Session, theirs: Session) -> None:
    mine, its = ours.state(), theirs.state()
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("binding", BINDINGS)
def test_the_bits_of_the_reference_and_no_race(binding: str) -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, BINDINGS[binding])
    with session, Session(plan, program.state, executor="reference") as reference:
        assert torch.equal(session.step(*batch), reference.step(*batch))
        assert_equal(session, reference)
        assert not machine.races


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(seed: int) -> None:
    program = nets.random_program(seed)
    plan = passes.emit(spread(program))
    session, machine = watched(plan, program.state, PAIRS)
    with session, Session(plan, program.state, executor="reference") as reference:
        for step, rows in enumerate((12, 7)):
            given = nets.example_inputs(program, seed=step, batch=rows)
            assert torch.equal(session.step(*given).nan_to_num(), reference.step(*given).nan_to_num())
        assert not machine.races


@pytest.mark.parametrize("binding", ["together", "pairs"])
def test_a_step_never_stops_the_host_and_takes_its_buffers_once(binding: str) -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, BINDINGS[binding])
    session.step(*batch)
    first = Counter(call[0] for call in machine.calls)
    machine.calls.clear()
    session.step(*batch)
    second = Counter(call[0] for call in machine.calls)
    assert first["empty"] > 0 and second["empty"] == 0
    assert not (first + second).keys() & {"stop", "synchronize"}
    assert first["copy"] == second["copy"] > 0


def test_the_plans_waits_and_no_others() -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, APART)
    executor: Any = session._executor
    session.step(*batch)
    machine.calls.clear()
    session.step(*batch)
    found = handoffs(plan, {name: i for i, name in enumerate(plan.lanes)})
    names = {stream.name: lane for lane, stream in executor.executor.lanes.streams.items()}
    lanes = len(names)
    recorded = {call[1]: names.get(call[2]) for call in machine.calls if call[0] == "record"}
    waits = Counter((recorded[call[1]], names.get(call[2])) for call in machine.calls if call[0] == "wait")
    source = {taken: position for position, given in found.given.items() for taken in given}
    planned = Counter(
        (plan.instructions[source[taken]].lane, plan.instructions[position].lane)
        for position, taken in found.taken.items()
    )
    for lane in names.values():  # the gate: before the step and after it
        planned[None, lane] += 1
        planned[lane, None] += 1
    rest = [instruction for instruction in plan.instructions if instruction.kind not in ("record", "wait")]
    runs = groupby(rest, lambda instruction: instruction.kind == "collective")
    joint = [lane for is_joint, run in runs if is_joint for lane in {instruction.lane for instruction in run}]
    for lane in joint:  # the memory of collectives that stand side by side is taken once, from the compute stream
        planned[lane.replace("copy_in", "compute"), lane] += 1
    assert len(joint) == 4 and sum(waits.values()) == found.total + 2 * lanes + len(joint) + 2 * 4
    assert {pair: n for pair, n in waits.items() if pair != (None, None)} == dict(planned)


class Summed(torch.nn.Module):
    """Gradients that are dense, in another element type, and one number that is shown everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).double()
        self.summed = torch.nn.Parameter(torch.randn(7, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).double()) * self.summed.sum()


@pytest.mark.parametrize("rows", [9, 7], ids=["even", "uneven"])
@pytest.mark.parametrize("binding", ["apart", "together", "pairs", "mixed"])
def test_gradients_of_several_kinds_are_reduced_side_by_side(binding: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = Summed(), torch.randn(9, 3)
    program = graphir.capture(
        model, inputs=(x[:3],), loss=lambda found: found.square().mean(), optimizer=sgd(model.parameters())
    )
    plan = passes.emit(passes.replicate(program, range(3)))
    session, machine = watched(plan, program.state, BINDINGS[binding])
    with session, Session(plan, program.state, executor="reference") as reference:
        for _ in range(2):
            assert torch.equal(session.step(x[:rows]), reference.step(x[:rows]))
        assert_equal(session, reference)
    assert not machine.races


SHOWN = """
    input x : f32[3] @gpu:0
    input y : f32[3] @gpu:1
    input z : f32[3] @gpu:2
    a : f32[3] @gpu:0 = aten.relu(x)
    b : f32[3] @gpu:1 = aten.relu(y)
    c : f32[3] @gpu:2 = aten.relu(z)
    a2 : f32[2,3] strides [0,1] in a @gpu:0 = aten.expand(a, size=[2, 3])
    b2 : f32[2,3] strides [0,1] in b @gpu:1 = aten.expand(b, size=[2, 3])
    c2 : f32[2,3] strides [0,1] in c @gpu:2 = aten.expand(c, size=[2, 3])
    [r : f32[3] @gpu:0, s : f32[3] @gpu:1, t : f32[3] @gpu:2] = AllReduce([a, b, c])
    [r2 : f32[2,3] @gpu:0, s2 : f32[2,3] @gpu:1, t2 : f32[2,3] @gpu:2] = AllReduce([a2, b2, c2])
    t_gpu_0 : f32[3] @gpu:0 = Copy(t)
    t2_gpu_0 : f32[2,3] @gpu:0 = Copy(t2)
    u : f32[2,3] @gpu:0 = aten.add.Tensor(t2_gpu_0, t_gpu_0)
    v : f32[2,3] @gpu:0 = aten.add.Tensor(u, r2)
"""


@pytest.mark.parametrize("binding", ["apart", "together", "pairs"])
def test_rows_that_share_memory_are_reduced_beside_others(binding: str) -> None:
    plan = forward_plan(SHOWN, "x", "y", "z", output="v")
    session, machine = watched(plan, {}, BINDINGS[binding])
    with session, Session(plan, {}, executor="reference") as reference:
        for _ in range(2):
            given = [torch.randn(3) for _ in range(3)]
            assert torch.equal(session.step(*given), reference.step(*given))
    assert not machine.races


def moved(plan: Plan, what: str) -> Plan:
    """Between the first collective's parts, a free and what the second part waits for, or a wait for the first part."""
    order = list(plan.instructions)
    first = next(i for i, instruction in enumerate(order) if instruction.kind == "collective")
    if what == "free":
        between = [next(i for i in reversed(range(first)) if order[i].kind == "free")]
        between += [i for i in range(first) if order[i].kind == "wait" and order[i].lane == order[first + 1].lane]
        assert len(between) == 3
        order[first + 1 : first + 1] = [order[i] for i in between]
        for i in sorted(between, reverse=True):
            del order[i]
    else:
        record = next(i for i in range(first, len(order)) if order[i].kind == "record")
        assert order[record - 1].part == 0 and order[record + 1].part == 1
        event = order[record].event
        index = next(i for i in range(record, len(order)) if order[i].kind == "wait" and order[i].event == event)
        assert order[index].lane not in {instruction.lane for instruction in order[record:index]}
        order.insert(record + 1, order.pop(index))
    return plan.with_(instructions=tuple(order))


@pytest.mark.parametrize("what", ["free", "wait"])
def test_a_lane_may_go_on_before_another_one_has_its_part(what: str) -> None:
    program, plan, batch = mlp()
    plan = moved(plan, what)
    session, machine = watched(plan, program.state, APART)
    with session, Session(plan, program.state, executor="reference") as reference:
        assert torch.equal(session.step(*batch), reference.step(*batch))
        assert_equal(session, reference)
    assert not machine.races
    executor: Any = session._executor
    assert any(
        " from " in name for name in executor.executor.lanes.streams
    )  # a part alone copies on streams of its own


def test_one_gradient_alone_is_not_packed() -> None:
    model, x = torch.nn.Linear(3, 5, bias=False), torch.randn(4, 3)
    program = graphir.capture(model, inputs=(x[:2],), loss=lambda found: found.sum(), optimizer=sgd(model.parameters()))
    plan = passes.emit(passes.replicate(program, range(2)))
    session, machine = watched(plan, program.state, APART)
    with session, Session(plan, program.state, executor="reference") as reference:
        assert torch.equal(session.step(x), reference.step(x))
        assert_equal(session, reference)
    assert not machine.races
    copied = [call[1] for call in machine.calls if call[:1] == ("run",) and call[1].startswith("aten::_foreach_copy_")]
    assert len(copied) == 1  # the first participant's own


def test_a_fused_update_is_one_kernel_beside_that_of_its_counts() -> None:
    program, plan, batch = mlp()
    session, machine = watched(plan, program.state, TOGETHER)
    session.step(*batch)
    updates = [call[1:] for call in machine.calls if call[0] == "run" and ("_fused" in call[1] or "add_" in call[1])]
    assert [name.split(".")[0] for name, _ in updates][-4:] == ["aten::_foreach_add_", "aten::_fused_adamw_"] * 2
    assert len({stream for _, stream in updates[-4:]}) == 2


MOVED = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    b : f32[3] @gpu:1 = aten.neg(a_gpu_1)
"""


def calls_of(plan: Plan, *inputs: torch.Tensor) -> list[str]:
    """The calls of a second step, streams by the names of their lanes."""
    session, machine = watched(plan, {}, APART)
    executor: Any = session._executor
    session.step(*inputs)
    machine.calls.clear()
    session.step(*inputs)
    assert not machine.races
    names = {stream.name: lane for lane, stream in executor.executor.lanes.streams.items()}
    names[executor.executor.gate.name] = "gate"
    return [" ".join(str(names.get(word, word)) for word in call) for call in machine.calls]


def test_the_order_of_calls() -> None:
    """Ours within the fork and the join of the gate, which has waited for the caller's streams on both devices."""
    calls = calls_of(forward_plan(MOVED, "x", output="b"), torch.tensor([1.0, -2.0, 3.0]))
    assert calls[:8] == [
        *("record 10 caller of cuda:0", "wait 10 gate", "record 11 caller of cuda:1", "wait 11 gate"),
        *("record 4 gate", "wait 4 gpu:0.compute", "wait 4 gpu:1.compute", "wait 4 gpu:1.copy_in"),
    ]
    ours = calls[8:-11]
    freeing = ours.index("wait 3 gpu:0.compute")
    assert freeing > ours.index("record 3 gpu:1.copy_in")
    assert ours[:freeing] + ours[freeing + 1 :] == [
        "wait 4 gpu:1.copy_in from cuda:0",
        *("use gpu:0.compute", "run aten::relu gpu:0.compute", "record 1 gpu:0.compute"),
        "wait 1 gpu:1.copy_in",
        *("use gpu:1.copy_in from cuda:0", "use gpu:1.copy_in"),
        *("copy gpu:1.copy_in from cuda:0", "then gpu:1.copy_in", "record 3 gpu:1.copy_in"),
        "wait 3 gpu:1.compute",
        *("use gpu:1.compute", "run aten::neg gpu:1.compute"),
    ]
    assert calls[-11:] == [
        *("record 6 gpu:0.compute", "wait 6 gate", "record 7 gpu:1.compute", "wait 7 gate"),
        *("record 8 gpu:1.copy_in", "wait 8 gate", "record 9 gpu:1.copy_in from cuda:0", "wait 9 gate"),
        *("record 5 gate", "wait 5 caller of cuda:0", "wait 5 caller of cuda:1"),
    ]


PARKED = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_cpu : f32[3] @cpu = Copy(a)
    a_back : f32[3] @gpu:0 = Copy(a_cpu)
    b : f32[3] @gpu:0 = aten.neg(a_back)
"""


def test_what_is_parked_on_the_host_passes_it_by() -> None:
    calls = calls_of(forward_plan(PARKED, "x", output="b"), torch.tensor([1.0, -2.0, 3.0]))
    assert sum(call.startswith("copy") for call in calls) == 2
    assert not [call for call in calls if call.startswith(("stop", "synchronize"))]


@pytest.mark.parametrize("to", ["gpu:1", "cpu"])
@pytest.mark.parametrize("binding", BINDINGS)
def test_what_is_parked_takes_no_memory_that_is_kept(binding: str, to: str) -> None:
    program, _, batch = resnet()
    parked = passes.park(passes.park(program, "**", to, ahead=1), "**.momentum_buffer", to)
    plan = passes.emit(passes.inject_copies(parked))
    session, machine = watched(plan, program.state, BINDINGS[binding])
    size = program.dims["batch"]
    with session, Session(plan, program.state, executor="reference") as reference:
        for _ in range(2):
            given = [tensor[:size] for tensor in batch]
            assert torch.equal(session.step(*given), reference.step(*given))
            assert_equal(session, reference)
        assert not machine.races
        watch: Any = session._executor
        assert not [device for device, _ in watch.executor.buffers if device == "gpu:0"]


ON_HOST = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_cpu : f32[3] @cpu = Copy(a)
    h : f32[3] @cpu = aten.exp(a_cpu)
    h_back : f32[3] @gpu:0 = Copy(h)
    b : f32[3] @gpu:0 = aten.neg(h_back)
"""


def test_the_host_stops_once_for_what_it_reads() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    calls = calls_of(forward_plan(ON_HOST, "x", output="b"), x)
    stops = [i for i, call in enumerate(calls) if call.startswith("stop")]
    assert len(stops) == 1 and calls[stops[0] + 1] == "run aten::exp host"


def test_results_on_the_host_are_there_when_the_step_returns() -> None:
    plan = forward_plan(ON_HOST.split("h :")[0], "x", output="a_cpu")
    calls = calls_of(plan, torch.tensor([1.0, -2.0, 3.0]))
    assert [call for call in calls if call.startswith("stop")]


@pytest.mark.parametrize("dropped", [1, 2, 3, 7, 8, 11, 14, 15])
def test_a_wait_left_out_is_a_race(dropped: int) -> None:
    """Into the gate and out of it, to the copy and from it, back to the gate, to the callers: these imply the rest."""
    plan = forward_plan(MOVED, "x", output="b")
    session, machine = watched(plan, {}, APART)
    session.step(torch.ones(3))
    machine.dropped = machine.waits + dropped
    session.step(torch.ones(3))
    session.step(torch.ones(3))
    assert machine.races


def test_nccl_reduces_all_parts_at_once_in_its_own_order() -> None:
    program, plan, batch = mlp()
    session, machine = watched(plan, program.state, APART, collectives="native")
    with session, Session(plan, program.state, executor="reference") as reference:
        for _ in range(2):
            torch.testing.assert_close(session.step(*batch), reference.step(*batch))
        ours, theirs = session.state_dict(1), reference.state_dict(1)
        assert all(torch.allclose(ours[name], theirs[name]) for name in ours)
    calls = [call for call in machine.calls if call[0] == "all_reduce"]
    assert len(calls) == 2 * sum(op.type == "AllReduce" for op in plan.step.ops)
    assert all(len(set(call[1:])) == 2 for call in calls)
    assert not machine.races


@pytest.mark.parametrize(
    ("binding", "what"),
    [(TOGETHER, "gpu:0 and gpu:1 share cuda:0"), ({"gpu:0": "cuda:0", "gpu:1": "cpu"}, "gpu:1 is on cpu")],
)
def test_nccl_needs_distinct_gpus(binding: dict[str, str], what: str) -> None:
    program, plan, _ = mlp()
    with pytest.raises(SessionError, match=f"NCCL reduces among distinct GPUs, but {what}(.|\n)*ordered"):
        watched(plan, program.state, binding, collectives="native")


def test_nccl_gives_the_sum_to_all_participants() -> None:
    captured = graphir.capture(torch.nn.Linear(3, 2), inputs=(torch.ones(4, 3),), backward=True)
    halves = passes.split_backward(passes.replicate(captured, [0, 1], reduction="sum"))
    with pytest.raises(SessionError) as caught:
        watched(passes.emit(halves.backward), captured.state, APART, collectives="native")
    assert str(caught.value) == (
        "collectives='native': NCCL gives the sum to all participants, and some want none\n"
        "  in   plan 'linear.backward'\n"
        "  fix  leave collectives='ordered'"
    )


def test_a_failed_step_lets_the_devices_come_to_rest_and_names_the_operator() -> None:
    plan = forward_plan(MOVED.replace("aten.neg(a_gpu_1)", "aten.embedding(a_gpu_1, a_gpu_1)"), "x", output="b")
    session, machine = watched(plan, {}, APART)
    with pytest.raises(RunError, match=r"aten.embedding.default failed(.|\n)*lane gpu:1.compute"):
        session.step(torch.ones(3))
    stopped = {call[1] for call in machine.calls if call[0] == "synchronize"}
    assert len(stopped) == machine.made


def test_a_failed_step_gives_its_receive_buffers_back() -> None:
    program, plan, batch = mlp()
    session, machine = watched(plan, program.state, APART)
    executor: Any = session._executor
    with Session(plan, program.state, executor="reference") as reference:
        for _ in range(2):
            assert torch.equal(session.step(*batch), reference.step(*batch))
            held = executor.executor.kept().nbytes
            with pytest.raises(RunError, match="out of bounds") as failed:
                session.step(batch[0].repeat(9, 1), batch[1].repeat(9) + 99)
            assert failed.value.usable
            assert not any(executor.executor.kept().nbytes.values())
            assert torch.equal(session.step(*batch), reference.step(*batch))
            assert executor.executor.kept().nbytes == held
            assert len(executor.executor.kept().sizes) == 1
    assert not machine.races


def test_bytes_that_are_held() -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, PAIRS)
    executor: Any = session._executor
    session.step(*batch)
    ledger = executor.executor.ledger()
    assert [str(held.place) for held in ledger.values()] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cpu"]
    del ledger[CPU]
    for device, held in ledger.items():
        assert 0 < held.state < held.predicted
        assert bool(held.received) == any(op.type == "Copy" and op.device == device for op in plan.step.ops)
        assert held.allocator == machine.statistics(held.place)


def test_a_report_has_the_allocators_figures_beside_the_plans() -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, PAIRS)
    with session.measured():
        session.step(*batch)
    report = session.report()
    assert not machine.races
    assert all(entry.peak == entry.predicted_peak for entry in report.devices)
    first, second = report.allocators
    assert (first.place, first.devices) == ("cuda:0", ("gpu:0", "gpu:2"))
    assert (second.place, second.devices) == ("cuda:1", ("gpu:1", "gpu:3"))
    measurement: Any = session._measurement
    peak = memory(plan, measurement.dims).peak
    for use in report.allocators:
        own = [peak[device] for device in use.devices]
        assert max(own) <= use.predicted_peak <= sum(own)
        assert (use.allocated, use.allocated_peak, use.reserved_peak, use.shortages) == (0, 1000, 2000, 3000)
    assert first.received + second.received > 0
    line = next(line for line in str(report).splitlines() if line.split()[0] == "cuda:1")
    assert line.split()[-1] == "3000"


def test_an_observed_step_has_the_same_bits() -> None:
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, APART)
    cuda: Any = session._executor
    seen: list[tuple[int, Any]] = []

    class Marks:
        def begin(self, position: int) -> None:
            seen.append((position, cuda.clock.mark(plan.instructions[position].lane)))

        def end(self, position: int, reads: Any, makes: Any) -> None:
            self.begin(position)

    cuda.run = lambda dims, inputs, step: cuda.run_observed(dims, inputs, step, Marks())
    with session, Session(plan, program.state, executor="reference") as reference:
        assert torch.equal(session.step(*batch), reference.step(*batch))
        assert_equal(session, reference)
        seconds = cuda.clock.seconds([mark for _, mark in seen])
    assert not machine.races
    executed = {i for i, instruction in enumerate(plan.instructions) if instruction.op >= 0}
    assert len(seconds) >= len(executed) and min(seconds) > 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"executor": "cuda"}, "the executor 'cuda' runs where a device is bound to CUDA"),
        ({"collectives": "native"}, "collectives='native' are NCCL's"),
        ({"collectives": "none"}, "collectives 'none' is not supported"),
    ],
)
def test_options_that_need_cuda(options: dict[str, Any], what: str) -> None:
    program, plan, _ = mlp()
    with pytest.raises(SessionError, match=what):
        Session(plan, program.state, **options)


def test_callers_that_change_their_streams() -> None:
    """The one that was left may still read what a step handed back when the next step comes from another."""
    session, machine = watched(forward_plan(MOVED, "x", output="b"), {}, APART)
    for _ in range(3):
        session.step(torch.ones(3))
        machine.use(machine.stream(torch.device("cuda:1")))
    assert not machine.races


@pytest.mark.parametrize("write", [False, True])
def test_state_is_read_and_written_between_steps_on_any_stream(write: bool) -> None:
    program, plan, batch = mlp()
    session, machine = watched(plan, program.state, APART)
    executor: Any = session._executor
    for _ in range(2):
        session.step(*batch)
        before = dict(machine.current)
        machine.use(machine.stream(torch.device("cuda:0")))
        machine.use(machine.stream(torch.device("cuda:1")))
        with session._between_steps():
            for name, tensor in executor.setting.state.items():
                place = executor.executor.places[plan.step.blobs[name].device]
                machine.access(machine.caller(place), tensor, write, "the caller")
        machine.current.update(before)
    assert not machine.races


@pytest.mark.parametrize("binding", ["pairs", "mixed"])
def test_a_probe_reads_what_has_come(binding: str) -> None:
    """Copies to the host end before they are looked at."""
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, BINDINGS[binding])
    cuda: Any = session._executor

    class Look:
        def begin(self, position: int) -> None:
            pass

        def end(self, position: int, reads: Any, makes: Any) -> None:
            for tensor in makes:
                tensor.sum()

    cuda.run = lambda dims, inputs, step: cuda.run_observed(dims, inputs, step, Look())
    for _ in range(2):
        session.step(*batch)
    assert not machine.races


def test_lost_devices() -> None:
    """CUDA tells late of a kernel that failed, and then refuses everything: no operator here is to blame for sure."""
    plan = forward_plan(MOVED, "x", output="b")
    cause = torch.AcceleratorError("CUDA error: device-side assert triggered")
    error = fault(plan, plan.instructions[0], 3, cause, usable=True)
    assert not error.usable and "CUDA_LAUNCH_BLOCKING=1" in str(error) and "new process" in str(error)


def test_a_kernel_that_failed_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = watched(forward_plan(MOVED, "x", output="b"), {}, APART)
    session.step(torch.ones(3))

    def refuse(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(FakeEvent, "record", refuse)
    with pytest.raises(RunError, match=r"a step failed: AcceleratorError: CUDA error(.|\n)*new process"):
        session.step(torch.ones(3))
    assert not session.usable


def test_a_device_that_hangs_is_waited_for_until_the_deadline() -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    session, machine = watched(forward_plan(ON_HOST, "x", output="b"), {}, APART, deadline=0.05)
    session.step(x)
    executor: Any = session._executor
    lanes = executor.executor.lanes.streams
    machine.hangs = lanes["gpu:0.copy_out"].name
    with pytest.raises(RunError, match=r"aten.exp.default failed: TimeoutError: .* 0.05 s: gpu:0.copy_out(.|\n)*unus"):
        session.step(x)
    assert not session.usable
    session.close()
    del session, executor, lanes
    gc.collect()
    assert not machine.races  # nobody gets page-locked memory that it may fill yet


@pytest.mark.parametrize("kind", [Cuda, CudaGraphs])
def test_a_session_gives_its_memory_back_without_the_collector(kind: type[Cuda]) -> None:
    """Which knows nothing of devices' memory: buffers when it is closed, the rest when nobody has it any more."""
    program, plan, batch = resnet()
    session, machine = watched(plan, program.state, TOGETHER, kind)
    executor: Any = session._executor
    gc.disable()
    try:
        for _ in range(3):
            session.step(*batch)
        setting, rooms = weakref.ref(session._setting), [block.name for block in machine.blocks.values()]
        session.close()
        assert "buffer on cuda:0" in rooms
        assert "buffer on cuda:0" not in [block.name for block in machine.blocks.values()]
        del session, executor
        assert setting() is None
    finally:
        gc.enable()


def test_a_session_that_parks_on_the_host_goes_without_the_collector() -> None:
    session, _ = watched(forward_plan(PARKED, "x", output="b"), {}, APART)
    gc.disable()
    try:
        session.step(torch.ones(3))
        setting = weakref.ref(session._setting)
        del session
        assert setting() is None
    finally:
        gc.enable()
