"""Losses whose result keeps memory in torch."""

import pytest
import torch
from graphir.runtime.kernels.bindings import fastest
from graphir.runtime.kernels.losses import LOSSES
from runnable import forward_plan

import graphir
from graphir import passes, runtime
from graphir.ir.opset import overload

REDUCED = {"none": 0, "mean": 1, "sum": 2}


@pytest.mark.parametrize("reduction", REDUCED)
@pytest.mark.parametrize("type", LOSSES)
def test_a_loss_has_torchs_bits_and_no_more_memory_than_it_needs(type, reduction):
    x, y = torch.rand(2, 40, 50)
    given = [None, REDUCED[reduction]] if "binary" in type else [REDUCED[reduction]]
    found, expected = fastest(type)(x, y, *given), overload(type)(x, y, *given)
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.parametrize("executor", ["reference", "serial"])
def test_what_a_step_returns_holds_one_number(executor):
    body = "input x : f32[8,8] @gpu:0\nh : f32[8,8] @gpu:0 = aten.neg(x)\ny : f32[] @gpu:0 = aten.mse_loss(h, x)"
    x = torch.rand(8, 8)
    with runtime.Session(forward_plan(body, "x", output="y"), {}, executor=executor) as session:
        loss = session.step(x)
    assert torch.equal(loss, torch.nn.functional.mse_loss(-x, x))
    assert loss.untyped_storage().nbytes() == 4


def test_measured_bytes_are_the_predicted_ones():
    model = torch.nn.Linear(16, 16)
    x, y = torch.randn(2, 32, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, inputs=(x,), targets=(y,), loss=torch.nn.functional.mse_loss, optimizer=optimizer)
    with runtime.Session(passes.emit(program), program.state) as session:
        with session.measured():
            session.step(x, y)
        assert all(device.peak == device.predicted_peak for device in session.report().devices)
