"""The CUDA executor where some devices are on the host and others on pretended GPUs."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import nets
import pytest
import torch
from fake_cuda import FakeEvent, FakeStream, stand_in, watched
from graphir.runtime import Session
from graphir.runtime.failures.shortage import shortage
from runnable import forward_plan, spread

from graphir import RunError, passes
from graphir.ir.device import CPU, gpu
from graphir.ir.net import Net
from graphir.ir.plan import Plan
from graphir.ir.program import Program

MIXTURES = {
    "host and cuda:0": {"gpu:0": "cuda:0", "gpu:2": "cuda:0"},
    "host and cuda:1": {"gpu:1": "cuda:1"},
    "state on the host": {"gpu:1": "cuda:0", "gpu:2": "cuda:1", "gpu:3": "cuda:1"},
    "two and the host": {"gpu:0": "cuda:1", "gpu:2": "cuda:0", "gpu:3": "cuda:0"},
    "one on the host": {"gpu:0": "cuda:0", "gpu:1": "cuda:0", "gpu:3": "cuda:0"},
}
ROWS = (4, 6, 4)


def moved(net: Net) -> Net:
    """The net with the host in place of gpu:4."""
    return net.with_(
        blobs={name: blob._replace(device=CPU) if blob.device == gpu(4) else blob for name, blob in net.blobs.items()},
        ops=tuple([op._replace(device=CPU) if op.device == gpu(4) else op for op in net.ops]),
    )


@cache
def scattered(seed: int, share: bool = False) -> tuple[Program, Plan]:
    """A random step spread over four logical devices and the host, whose scalars torch's operators read anywhere."""
    program = nets.random_program(seed, ops=30, devices=5, spread=0.6)
    program = passes.inject_copies(program.with_(step=moved(program.step)))
    return program, passes.emit(passes.share_storage(program) if share else program)


@cache
def replicated(seed: int) -> tuple[Program, Plan]:
    program = nets.random_program(seed, ops=30)
    return program, passes.emit(spread(program))


def assert_bits_of_the_reference(program: Program, plan: Plan, session: Session) -> None:
    with session, Session(plan, program.state, binding="cpu", executor="reference") as reference:
        for step, rows in enumerate(ROWS):
            given = nets.example_inputs(program, seed=step, batch=rows)
            assert torch.equal(session.step(*given).nan_to_num(), reference.step(*given).nan_to_num())
        mine, its = session.state(), reference.state()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name].nan_to_num(), its[name].nan_to_num()) for name in mine)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("seed", [1, 3])
def test_the_bits_of_the_reference_and_no_race(seed: int, mixture: str) -> None:
    program, plan = scattered(seed, share=seed > 1)
    session, machine = watched(plan, program.state, MIXTURES[mixture])
    assert_bits_of_the_reference(program, plan, session)
    assert not machine.races


@pytest.mark.parametrize("mixture", MIXTURES)
def test_replicas_on_the_host_and_on_gpus(mixture: str) -> None:
    program, plan = replicated(1)
    session, machine = watched(plan, program.state, MIXTURES[mixture])
    assert_bits_of_the_reference(program, plan, session)
    assert not machine.races


STATE = """
    buffer s : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    s_gpu_1 : f32[3] @gpu:1 = Copy(s)
    t : f32[3] @gpu:1 = aten.add.Tensor(s_gpu_1, x)
    s;1 = Copy(t)
    loss : f32[3] @gpu:1 = aten.neg(t)
"""


def test_state_on_the_host_is_there_when_the_step_returns() -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(STATE, "x", output="loss", state=state)
    session, machine = watched(plan, state, {"gpu:1": "cuda:0"})
    for step in range(1, 3):
        session.step(torch.ones(3))
        machine.access(machine.host, session._setting.state["s"], False, "the caller")
        assert session.state_dict()["s"].tolist() == [step] * 3
    assert not machine.races


PARKED = """
    input x : f32[batch,64] @gpu:0
    a : f32[batch,64] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[batch,64] @gpu:1 = Copy(a)
    a_back : f32[batch,64] @gpu:0 = Copy(a_gpu_1)
    b : f32[batch,64] @gpu:0 = aten.neg(a_back)
"""


def test_a_buffer_that_grows_is_given_back_once_nobody_uses_it() -> None:
    session, machine = watched(forward_plan(PARKED, "x", output="b", dims={"batch": 2}), {}, {"gpu:0": "cuda:0"})
    larger = (2, 4, 8)
    for rows in (2, 4, 3, 8):
        machine.calls.clear()
        session.step(torch.ones(rows, 64))
        assert (("empty", "cpu") in machine.calls) == (rows in larger)
    assert not machine.races


REDUCED = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    [r0 : f32[3] @gpu:0, r1 : f32[3] @gpu:1] = AllReduce([a, a_gpu_1], reduction="sum")
    a_gpu_1;1 = aten.mul_.Tensor(a_gpu_1, other=2) {writes=[0:0]}
    b : f32[3] @gpu:1 = aten.add.Tensor(a_gpu_1;1, r1)
    b_gpu_0 : f32[3] @gpu:0 = Copy(b)
    c : f32[3] @gpu:0 = aten.add.Tensor(r0, b_gpu_0)
"""


def test_the_host_overwrites_what_a_gpu_has_summed_up() -> None:
    session, machine = watched(forward_plan(REDUCED, "x", output="c"), {}, {"gpu:0": "cuda:0"})
    for _ in range(2):
        assert session.step(torch.ones(3)).tolist() == [6.0] * 3
    assert not machine.races


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("make", [scattered, replicated])
def test_a_measured_step(make: Callable[[int], tuple[Program, Plan]], mixture: str, tmp_path: Path) -> None:
    """Its bits, its bytes, its allocators, and a trace; and nothing in it that is not finite."""
    program, plan = make(1)
    session, machine = watched(plan, program.state, MIXTURES[mixture], check_finite=True)
    with session, Session(plan, program.state, binding="cpu", executor="reference") as reference:
        for step, rows in enumerate(ROWS):
            given = nets.example_inputs(program, seed=step, batch=rows)
            with session.measured():
                assert torch.equal(session.step(*given), reference.step(*given))
            report = session.report()
            for entry in report.devices:
                assert (entry.peak, entry.state) == (entry.predicted_peak, entry.predicted_state)
                assert entry.place == MIXTURES[mixture].get(entry.device, "cpu")
        used = [str(device) for device in plan.devices]
        gpus = {place for device, place in MIXTURES[mixture].items() if device in used}
        assert {use.place for use in report.allocators} == gpus
        session.trace(tmp_path / "trace.json")
    assert not machine.races
    lanes = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert lanes >= {instruction.lane for instruction in plan.instructions if instruction.op >= 0}


THERE_AND_BACK = """
    buffer s : f32[3] @gpu:0
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    b : f32[3] @gpu:1 = aten.log(a_gpu_1)
    b_gpu_0 : f32[3] @gpu:0 = Copy(b)
    s;1 = aten.add_.Tensor(s, b_gpu_0) {writes=[0:0]}
    loss : f32[3] @gpu:0 = aten.neg(b_gpu_0)
"""
HOST, GPU = torch.device("cpu"), torch.device("cuda:1")
STRAIGHT, CROSSED = {"gpu:0": "cuda:1"}, {"gpu:1": "cuda:1"}


@pytest.mark.parametrize("binding", [STRAIGHT, CROSSED], ids=["straight", "crossed"])
def test_what_is_not_finite_is_found_on_either_side(binding: dict[str, str]) -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(THERE_AND_BACK, "x", output="loss", state=state)
    session, machine = watched(plan, state, binding, check_finite=True)
    session.step(torch.ones(3))
    with pytest.raises(RunError, match=r"aten.log.default made 1 infinity(.|\n)*lane gpu:1.compute"):
        session.step(torch.tensor([1.0, 0.0, 2.0]))
    assert session.usable and not machine.races
    assert session.step(torch.ones(3)).tolist() == [0.0] * 3


def test_state_is_looked_at_from_any_stream() -> None:
    """What comes after a scaled loss is not looked at as it is made, so nothing has waited for it."""
    state = {"s": torch.zeros(3)}
    session, machine = watched(
        forward_plan(THERE_AND_BACK, "x", output="loss", state=state), state, STRAIGHT, check_finite=True
    )
    assert session._watch is not None
    session._watch.made.clear()
    for _ in range(3):
        session.step(torch.ones(3))
        machine.use(machine.stream(GPU))
    assert not machine.races


FULL_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 bytes")
FULL_HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes")
LOCKED_HOST = torch.AcceleratorError("CUDA error: out of memory")


@pytest.mark.parametrize(
    ("binding", "at", "error", "what", "where"),
    [
        (STRAIGHT, ("aten::relu", GPU), FULL_GPU, "aten.relu.default", "cuda:1"),
        (STRAIGHT, ("aten::log", HOST), FULL_HOST, "aten.log.default", "cpu"),
        (STRAIGHT, ("empty", HOST), LOCKED_HOST, "Copy", "cpu"),
        (STRAIGHT, ("empty", GPU), FULL_GPU, "Copy", "cuda:1"),
        (CROSSED, ("aten::relu", HOST), FULL_HOST, "aten.relu.default", "cpu"),
        (CROSSED, ("aten::log", GPU), FULL_GPU, "aten.log.default", "cuda:1"),
    ],
)
def test_memory_that_runs_out_on_either_side(
    binding: dict[str, str], at: tuple[str, torch.device], error: Exception, what: str, where: str
) -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(THERE_AND_BACK, "x", output="loss", state=state)
    session, machine = watched(plan, state, binding)
    machine.fails[at] = error
    with pytest.raises(RunError, match=rf"{what} ran out of memory") as caught:
        session.step(torch.ones(3))
    assert f" on {stand_in(torch.device(where))} (" in str(caught.value) and "no state was written" in str(caught.value)
    stopped = {call[1] for call in machine.calls if call[0] == "synchronize"}
    assert len(stopped) == machine.made
    machine.fails.clear()
    for _ in range(3):
        assert session.step(torch.full((3,), 2.0)).tolist() == torch.full((3,), 2.0).log().neg().tolist()
    assert not machine.races


def test_what_is_parked_in_the_hosts_memory_runs_out_of_that() -> None:
    """The lane is the GPU's, the memory is not."""
    plan = forward_plan(STATE.replace("gpu:0", "cpu"), "x", output="loss", state={"s": torch.zeros(3)})
    copied = next(i for i in plan.instructions if i.kind == "copy" and i.lane == "gpu:1.copy_out")
    places = {device: torch.device("cpu" if device.is_host else "cuda:0") for device in plan.devices}
    live, _ = shortage(plan, copied, plan.dims, places)
    assert " on cpu (cpu:0)" in live


@pytest.mark.parametrize("lost", [False, True])
def test_page_locked_memory_of_a_lost_device_is_never_freed(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would end the process."""

    def refuse(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    session, _ = watched(forward_plan(PARKED, "x", output="b", dims={"batch": 2}), {}, {"gpu:0": "cuda:0"})
    session.step(torch.ones(2, 64))
    executor: Any = session._executor
    (room,) = [weakref.ref(b.room) for (device, _), b in executor.executor.buffers.items() if device == gpu(1)]
    if lost:
        monkeypatch.setattr(FakeEvent, "record", refuse)
        monkeypatch.setattr(FakeStream, "synchronize", refuse)
        with pytest.raises(RunError, match="new process"):
            session.step(torch.ones(2, 64))
    session.close()
    del session, executor
    gc.collect()
    assert (room() is not None) == lost
