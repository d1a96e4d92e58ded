"""Captured steps on pretended devices, whose graphs execute their kernels when they are replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import models
import pytest
import torch
from fake_cuda import FakeMachine, FakeStream, Watch, watched
from graphir.runtime import Session
from graphir.runtime.cuda.graphs import CudaGraphs
from graphir.runtime.cuda.streams import TorchCuda
from runnable import captured, forward_plan, sgd, spread
from torch.torch_version import TorchVersion

import graphir
from graphir import RunError, SessionError, passes

TOGETHER = {f"gpu:{i}": "cuda:0" for i in range(4)}


@pytest.mark.parametrize("fused", [False, True])
def test_a_replayed_step_has_the_bits_of_the_reference(fused: bool) -> None:
    """Also with another learning rate and other random numbers than those that were captured."""
    example = models.resnet(batch=4, blocks=1, dropout=0.3)
    program = captured(example, sgd(example.model.parameters(), fused=fused, foreach=False))
    plan = passes.emit(spread(program))
    batch = [torch.cat([tensor] * 2) for tensor in (*example.inputs, *example.targets)]
    session, machine = watched(plan, program.state, TOGETHER, CudaGraphs)
    with session, Session(plan, program.state, executor="reference") as reference:
        for step in range(4):
            given = [tensor.roll(step, 0) for tensor in batch]
            for one in (session, reference):
                one.param_groups[0]["lr"] = 0.1 / (step + 1)
            assert torch.equal(session.step(*given), reference.step(*given))
        mine, its = session.state(), reference.state()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert not machine.races
    assert [call[0] for call in machine.calls if call[0] in ("capture", "replay")] == ["capture", *["replay"] * 3]
    (capture,) = [call for call in machine.calls if call[0] == "capture"]
    assert capture[2] == sum(op.seed is not None for op in plan.step.ops) > 0


def test_a_graph_for_each_size() -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(program)
    batch = (*example.inputs, *example.targets)
    session, machine = watched(plan, program.state, TOGETHER, CudaGraphs)
    with session, Session(plan, program.state, executor="reference") as reference:
        for rows in (4, 4, 3, 4, 3, 4):
            given = [tensor[:rows] for tensor in batch]
            assert torch.equal(session.step(*given), reference.step(*given))
    calls = [call[0] for call in machine.calls if call[0] in ("capture", "replay", "reset")]
    assert calls == ["capture", "replay", "replay", "capture", "replay", "replay", "reset", "reset"]


def test_receive_buffers_that_a_failed_step_gave_back_are_taken_before_a_capture() -> None:
    """Within one they would lie in memory of the graph's."""
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    x, y = (*example.inputs, *example.targets)
    session, machine = watched(plan, program.state, TOGETHER, CudaGraphs)
    with session, Session(plan, program.state, executor="reference") as reference:
        for rows in (4, 4, 6, 12, 6, 4, 6, 6):
            if rows == 12:
                with pytest.raises(RunError, match="out of bounds"):
                    session.step(x.repeat(2, 1), y.repeat(2) + 99)
                continue
            assert torch.equal(session.step(x[:rows], y[:rows]), reference.step(x[:rows], y[:rows]))
    assert not machine.races
    calls = [call[0] for call in machine.calls if call[0] in ("capture", "replay")]
    assert calls == ["capture", "replay", "replay", "capture", "replay", "replay"]


def test_a_thread_that_captures_has_made_a_step_before() -> None:
    """Libraries keep what they have for each thread, and cannot take it within a capture."""
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    batch = (*example.inputs, *example.targets)
    session, machine = watched(passes.emit(program), program.state, TOGETHER, CudaGraphs)
    session.step(*batch)
    seen = []

    def steps() -> None:
        for _ in range(3):
            session.step(*batch)
            seen.append([call[0] for call in machine.calls if call[0] in ("capture", "replay")])

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert seen == [[], ["capture", "replay"], ["capture", "replay", "replay"]] and not machine.races


def test_a_capture_that_fails_comes_to_its_end() -> None:
    """Lanes that do not come back would let torch's allocator take every later step for a part of it."""
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    batch = (*example.inputs, *example.targets)
    session, machine = watched(passes.emit(spread(program)), program.state, TOGETHER, CudaGraphs)
    session.step(*batch)
    machine.fails["aten::addmm", torch.device("cuda:0")] = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(RunError, match=r"cannot be captured as a CUDA graph: OutOfMemoryError(.|\n)*at   .*aten.addmm"):
        session.step(*batch)
    assert not machine.races


def test_graphs_are_of_one_gpu() -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(passes.replicate(program, [0, 1]))
    with pytest.raises(SessionError, match=r"is of one GPU, the plan is on cuda:0, cuda:1(.|\n)*cuda_graph=False"):
        watched(plan, program.state, {"gpu:0": "cuda:0", "gpu:1": "cuda:1"}, CudaGraphs)


def test_what_the_host_computes_cannot_be_captured() -> None:
    plan = forward_plan(
        """
        input x : f32[3] @gpu:0
        a_cpu : f32[3] @cpu = Copy(x)
        h : f32[3] @cpu = aten.exp(a_cpu)
        b : f32[3] @gpu:0 = Copy(h)
        """,
        "x",
        output="b",
    )
    with pytest.raises(SessionError, match=r"an operator that is no update needs the host(.|\n)*at   a_cpu"):
        watched(plan, {}, TOGETHER, CudaGraphs)


def test_sparse_sums_wait_for_their_device() -> None:
    model = torch.nn.Embedding(5, 3, sparse=True)
    program = graphir.capture(
        model,
        inputs=(torch.tensor([1, 2]),),
        targets=(),
        loss=lambda found: found.sum(),
        optimizer=torch.optim.SparseAdam(model.parameters()),
    )
    plan = passes.emit(passes.inject_copies(passes.replicate(program, [0, 1])))
    with pytest.raises(SessionError, match=r"an operator that is no update needs the host(.|\n)*graphir.sparse_sum"):
        watched(plan, program.state, TOGETHER, CudaGraphs)


def test_lengths_of_sequences_are_read_on_the_host() -> None:
    lengths = torch.tensor([3, 4])
    program = graphir.capture(
        torch.nn.LogSoftmax(-1),
        inputs=(torch.randn(4, 2, 3, requires_grad=True),),
        targets=(torch.ones(2, 2, dtype=torch.int64), lengths, lengths - 2),
        loss=torch.nn.CTCLoss(),
        batch_dims=((1,), {}, (0, 0, 0)),
    )
    with pytest.raises(SessionError, match=r"an operator that is no update needs the host(.|\n)*graphir.ctc_loss"):
        watched(passes.emit(program), program.state, TOGETHER, CudaGraphs)


def test_graphs_are_the_cuda_executors() -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    options: dict[str, Any] = {"cuda_graph": True}
    with pytest.raises(SessionError, match="cuda_graph=True is for the executor 'cuda'"):
        Session(passes.emit(program), program.state, **options)


def test_a_graph_keeps_the_buffers_that_a_larger_size_replaces() -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    batch = [torch.cat([tensor] * 4) for tensor in (*example.inputs, *example.targets)]
    session, machine = watched(plan, program.state, TOGETHER, CudaGraphs)
    with session, Session(plan, program.state, executor="reference") as reference:
        for rows in (4, 4, 16, 16, 4):
            given = [tensor[:rows] for tensor in batch]
            assert torch.equal(session.step(*given), reference.step(*given))
        assert not machine.races


def test_inputs_lie_in_a_graph_as_they_did_without_it() -> None:
    """The address decides which kernels are taken, and in which order they sum."""
    example = models.mlp()
    program = captured(example)
    plan = passes.emit(program)
    session, _ = watched(plan, program.state, TOGETHER, CudaGraphs)
    room = torch.zeros(1024)
    start = (8 - room.data_ptr() // 4) % 16  # 32 bytes behind a multiple of 64
    (x,), (y,) = example.inputs, example.targets
    placed = room[start : start + x.numel()].view(x.shape).copy_(x)
    executor: Any = session._executor
    place = executor.executor.placed
    assert (place(placed).data_ptr() - placed.data_ptr()) % 64 == 0
    taken = []
    executor.executor.placed = lambda value: taken.append(place(value)) or taken[-1]
    with session:
        for _ in range(3):
            session.step(placed, y)
        (found,) = executor.executor.graphs.values()
        assert [tensor is ours for tensor, ours in zip(found.inputs, taken, strict=True)] == [True, True]


HOST_UPDATE = """
    buffer s : f32[3] @cpu
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    loss : f32[3] @gpu:0 = aten.neg(a)
    a_cpu : f32[3] @cpu = Copy(a) {phase=update}
    b : f32[3] @cpu = aten.exp(a_cpu) {phase=update}
    s;1 = aten.add_.Tensor(s, b) {phase=update, writes=[0:0]}
"""


@pytest.mark.parametrize("host", ["cpu", "gpu:1"])
def test_an_update_on_the_host_reads_what_has_come(host: str) -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(HOST_UPDATE.replace("@cpu", f"@{host}"), "x", output="loss", state=state)
    assert "a_cpu" in plan.buffers
    session, machine = watched(plan, state, {"gpu:0": "cuda:0"}, CudaGraphs)
    for _ in range(3):
        session.step(torch.ones(3))
    assert ("replay",) in {call[:1] for call in machine.calls} and not machine.races


REFILLED = """
    buffer s : f32[3] @cpu
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    a_cpu : f32[3] @cpu = Copy(a_gpu_1) {phase=update}
    s;1 = aten.add_.Tensor(s, a_cpu) {phase=update, writes=[0:0]}
    b : f32[3] @gpu:0 = aten.neg(x)
    b_gpu_1 : f32[3] @gpu:1 = Copy(b)
    c : f32[3] @gpu:1 = aten.exp(b_gpu_1)
    c_gpu_0 : f32[3] @gpu:0 = Copy(c)
    d : f32[3] @gpu:0 = aten.neg(c_gpu_0)
    d_gpu_1 : f32[3] @gpu:1 = Copy(d)
    loss : f32[3] @gpu:1 = aten.exp(d_gpu_1)
"""


def test_an_update_reads_what_came_before_its_buffer_is_filled_again() -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(REFILLED, "x", output="loss", state=state)
    assert plan.buffers["a_gpu_1"] == plan.buffers["d_gpu_1"]
    session, machine = watched(plan, state, {"gpu:0": "cuda:0", "gpu:1": "cuda:0"}, CudaGraphs)
    for step in range(1, 4):
        session.step(torch.ones(3))
        assert session.state()["s"].tolist() == [step] * 3
    assert ("replay",) in {call[:1] for call in machine.calls} and not machine.races


VIEWED = """
    buffer s : f32[2,3] @cpu
    buffer w : f32[2,3] @gpu:0
    input x : f32[2,2] @gpu:0
    a : f32[2,3] @gpu:0 = aten.mm(x, w)
    w_cpu : f32[2,3] @cpu = Copy(w) {phase=update}
    s;1 = aten.add_.Tensor(s, w_cpu) {phase=update, writes=[0:0]}
    w.t : f32[3,2] strides [1,3] in w @gpu:0 = aten.t(w) {views=[0:0]}
    loss : f32[2,2] @gpu:0 = aten.mm(a, w.t)
"""


def test_a_view_of_what_an_update_on_the_host_reads_is_captured() -> None:
    state = {"s": torch.zeros(2, 3), "w": torch.randn(2, 3)}
    plan = forward_plan(VIEWED, "x", output="loss", state=state)
    session, machine = watched(plan, state, TOGETHER, CudaGraphs)
    x = torch.randn(2, 2)
    with session, Session(plan, state, executor="reference") as reference:
        for _ in range(3):
            assert torch.equal(session.step(x), reference.step(x))
        assert torch.equal(session.state()["s"], reference.state()["s"])
    assert ("replay",) in {call[:1] for call in machine.calls} and not machine.races


@pytest.mark.parametrize("read", ["w.t", "w"])
def test_what_an_update_has_written_is_read_after_it(read: str) -> None:
    """Also by a view, which only updates may take then."""
    body = f"""
        buffer s : f32[3] @cpu
        buffer w : f32[3,3] @gpu:0
        input x : f32[3,3] @gpu:0
        w_cpu : f32[3,3] @cpu = Copy(w) {{phase=update}}
        n : f32[] @cpu = aten.sum(w_cpu) {{phase=update}}
        n_gpu_0 : f32[] @gpu:0 = Copy(n) {{phase=update}}
        w;1 = aten.add_.Tensor(w, n_gpu_0) {{phase=update, writes=[0:0]}}
        w.t : f32[3,3] strides [1,3] in w @gpu:0 = aten.t(w;1) {{phase=update, views=[0:0]}}
        loss : f32[3,3] @gpu:0 = aten.mm(x, {read if read == "w.t" else "w;1"})
        """
    state = {"s": torch.zeros(3), "w": torch.randn(3, 3)}
    plan = forward_plan(body, "x", output="loss", state=state)
    with pytest.raises(SessionError, match=r"comes after one(.|\n)*at   loss"):
        watched(plan, state, TOGETHER, CudaGraphs)


@pytest.mark.parametrize(("version", "told"), [("2.11.0+cu130", 2), ("2.13.1", 2), ("2.14.0", 0), ("2.15.0+cu132", 0)])
def test_torch_is_told_of_generators_where_it_has_to_be(
    version: str, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2.14 on it prints a warning for each, which nothing silences."""
    graph = Mock()
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: nullcontext())
    with TorchCuda().capture(Mock(), [torch.Generator(), torch.Generator()]) as found:
        assert found is graph and torch.is_inference_mode_enabled()
    assert graph.register_generator_state.call_count == told


def joined(machine: FakeMachine, gate: FakeStream, lane: FakeStream) -> None:
    event = machine.event()
    event.record(gate)
    event.wait(lane)


def run_on(machine: FakeMachine, stream: FakeStream) -> None:
    machine.use(stream)
    made = machine.like(torch.ones(3), stream.device)
    with Watch(machine):
        made.mul_(2)


REFUSED: dict[str, Callable[[FakeMachine, FakeStream, FakeStream, Any], object]] = {
    "a wait of the host": lambda machine, gate, lane, before: before.synchronize(),
    "a query": lambda machine, gate, lane, before: lane.query(),
    "across the border": lambda machine, gate, lane, before: before.wait(gate),
    "does not come back": lambda machine, gate, lane, before: joined(machine, gate, lane),
    "does not belong to it": lambda machine, gate, lane, before: run_on(machine, lane),
}


@pytest.mark.parametrize("what", ["", *REFUSED])
def test_what_cuda_refuses_within_a_capture_is_a_race_here(what: str) -> None:
    machine, place = FakeMachine(), torch.device("cuda:0")
    gate, lane, before = machine.stream(place), machine.stream(place), machine.event()
    before.record(lane)
    with machine.capture(gate, []):
        if what:
            REFUSED[what](machine, gate, lane, before)
        run_on(machine, gate)
    assert all(what in race for race in machine.races) and bool(machine.races) == bool(what)
