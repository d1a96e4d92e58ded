"""Copies into receive buffers that are allocated once."""

import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.kernels.communication import receive
from runnable import forward_plan

from graphir import passes


def test_a_buffer_that_fits_takes_the_values():
    source, buffer = torch.randn(4, 8).t(), torch.empty(4, 8).t()
    assert receive(source, buffer) is buffer
    assert torch.equal(buffer, source)


@pytest.mark.parametrize(
    ("source", "buffer"),
    [
        pytest.param(torch.randn(64)[3:35], torch.empty(32), id="another address"),
        pytest.param(torch.randn(4, 8), torch.empty(8, 4).t(), id="other strides"),
        pytest.param(torch.randn(3, 8), torch.empty(4, 8), id="another shape"),
        pytest.param(torch.randn(1, 8).expand(4, 8), torch.empty(4, 8), id="elements at one address"),
    ],
)
def test_a_buffer_that_does_not_fit_is_left_alone(source, buffer):
    before = buffer.fill_(7).clone()
    received = receive(source, buffer)
    assert torch.equal(received, source)
    assert received.stride() == source.stride()
    assert received.data_ptr() % 64 == source.data_ptr() % 64
    assert torch.equal(buffer, before)


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


@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_buffers_are_filled_again_in_each_step(executor, monkeypatch):
    filled = {}

    def noting(source, buffer):
        filled.setdefault(buffer.shape[0], []).append(buffer.data_ptr())
        return receive(source, buffer)

    monkeypatch.setattr("graphir.runtime.codegen.statements.receive", noting)
    plan = forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 128})
    assert plan.buffers == {"a_gpu_1": 0, "b_gpu_0": 0, "c_gpu_1": 0}
    with Session(plan, {}, executor=executor) as session, Session(plan, {}, executor="reference") as reference:
        for batch in (128, 100, 128, 128):
            x = torch.randn(batch, 256)
            assert torch.equal(session.step(x), reference.step(x))
    assert {batch: (len(found), len(set(found))) for batch, found in filled.items()} == {128: (9, 2), 100: (3, 2)}


@pytest.mark.parametrize("executor", ["threads", "serial"])
def test_all_sizes_share_the_memory_of_the_largest(executor, monkeypatch):
    filled = {}

    def noting(source, buffer):
        received = receive(source, buffer)
        assert received is buffer
        filled[buffer.untyped_storage()._cdata] = buffer  # kept, so that no other storage takes its place
        return received

    monkeypatch.setattr("graphir.runtime.codegen.statements.receive", noting)
    plan = forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 128})
    with Session(plan, {}, executor=executor) as session, Session(plan, {}, executor="reference") as reference:
        for batch in (100, 128, 70, 160, 100, 128, 1):
            x = torch.randn(batch, 256)
            assert torch.equal(session.step(x), reference.step(x))
    assert [buffer.untyped_storage().nbytes() for buffer in filled.values()] == [160 * 256 * 4] * 2


def test_small_copies_take_fresh_memory(monkeypatch):
    monkeypatch.setattr("graphir.runtime.codegen.statements.receive", None)
    plan = passes.emit(forward_plan(BODY, "x", output="d_gpu_0", dims={"batch": 4}).program)
    with Session(plan, {}, executor="threads") as session:
        session.step(torch.randn(4, 256))
