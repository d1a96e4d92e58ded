"""Copies into receive buffers that are allocated once."""

from contextlib import nullcontext

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.kernels.buffers import Buffer, buffer_on
from runnable import batch_of, captured, forward_plan, sgd, spread

from graphir import passes
from graphir.errors import RunError

SOURCES = {
    "dense": torch.randn(4, 8),
    "strided": torch.randn(4, 8).t(),
    "another address": torch.randn(64)[3:35],
    "gaps": torch.randn(8, 8)[:, :3],
    "elements at one address": torch.randn(4, 1).expand(4, 8),
    "nothing": torch.empty(0, 8),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_buffer_takes_any_values_as_they_lie(source):
    buffer = buffer_on(torch.device("cpu"))
    for values in (source, torch.randn(2, 2), source):
        received = buffer.receive(values)
        assert torch.equal(received, values)
        assert (received.stride(), received.storage_offset()) == (values.stride(), 0)
        assert not received.numel() or (received.data_ptr() - values.data_ptr()) % 64 == 0


def test_a_buffer_is_as_large_as_the_largest_takes():
    taken = []

    def take(nbytes):
        taken.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    buffer = Buffer(take)
    rows = torch.randn(100, 4)
    for count in (3, 10, 2, 10, 4):
        assert torch.equal(buffer.receive(rows[:count]), rows[:count])
    assert buffer.nbytes == 10 * 4 * 4
    assert taken == [3 * 4 * 4 + 64, 10 * 4 * 4 + 64]
    assert torch.equal(buffer.receive(rows[1:11]), rows[1:11]), "at another address"
    assert (buffer.nbytes, len(taken)) == (10 * 4 * 4, 2)


BODY = """
    input x : f32[batch,256] @gpu:0
    a : f32[batch,256] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[batch,256] @gpu:1 = Copy(a)
    b : f32[batch,256] @gpu:1 = aten.exp(a_gpu_1)
    b_gpu_0 : f32[batch,256] @gpu:0 = Copy(b)
    c : f32[batch,256] @gpu:0 = aten.add.Tensor(b_gpu_0, x)
    c_gpu_1 : f32[batch,256] @gpu:1 = Copy(c)
    d : f32[batch,256] @gpu:1 = aten.neg(c_gpu_1)
    d_gpu_0 : f32[batch,256] @gpu:0 = Copy(d)
"""


@pytest.fixture
def filled(monkeypatch):
    """For each buffer, the memory that each copy got."""
    found = {}

    def receive(self, source):
        received = plain(self, source)
        found.setdefault(self, []).append(received.data_ptr())
        return received

    plain = Buffer.receive
    monkeypatch.setattr(Buffer, "receive", receive)
    return found


@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_buffers_are_filled_again_in_each_step(executor, filled):
    plan = forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 128})
    assert plan.buffers == {"a_gpu_1": 0, "b_gpu_0": 0, "c_gpu_1": 0}
    with Session(plan, {}, executor=executor) as session, Session(plan, {}, executor="reference") as reference:
        for batch in (128, 100, 70, 128, 1):
            x = torch.randn(batch, 256)
            assert torch.equal(session.step(x), reference.step(x))
    assert sorted(map(len, filled.values())) == [5, 10]
    assert [len(set(places)) for places in filled.values()] == [1, 1]


@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_all_sizes_share_the_memory_of_the_largest_measured_or_not(executor, filled):
    plan = forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 128})
    with Session(plan, {}, executor=executor) as session, Session(plan, {}, executor="reference") as reference:
        for batch in (100, 128, 70, 160, 1):
            x = torch.randn(batch, 256)
            with session.measured():
                assert torch.equal(session.step(x), reference.step(x))
            assert torch.equal(session.step(x), reference.step(x))
    assert [buffer.nbytes for buffer in filled] == [160 * 256 * 4] * 2


def test_a_step_for_which_a_buffer_has_no_memory_leaves_room_for_a_smaller_one(monkeypatch):
    def take(nbytes):
        if nbytes > 150 * 1024:
            raise MemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr("graphir.runtime.codegen.statements.buffer_on", lambda place: Buffer(take))
    plan = forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 128})
    with Session(plan, {}, executor="serial") as session, Session(plan, {}, executor="reference") as reference:
        for batch in (128, 100):
            with pytest.raises(RunError, match="MemoryError") as failed:
                session.step(torch.randn(200, 256))
            assert failed.value.usable
            x = torch.randn(batch, 256)
            assert torch.equal(session.step(x), reference.step(x))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_step_that_fails_leaves_no_buffers_of_its_size_behind(executor, measured):
    """It filled those before the failure and not those after it, so that no sizes would say what they take."""
    example = models.mlp()
    program = spread(captured(example, sgd(example.model.parameters())))
    x, y = batch_of(example)
    with Session(passes.emit(program), program.state, executor=executor) as session:
        for _ in range(2):
            session.step(x, y)
            with (
                session.measured() if measured else nullcontext(),
                pytest.raises(RunError, match="out of bounds") as failed,
            ):
                session.step(x.repeat(100, 1), y.repeat(100) + 9)
            assert failed.value.usable
            with session.measured():
                session.step(x, y)
            for device in session.report().devices:
                assert (device.peak, device.state) == (device.predicted_peak, device.predicted_state)
