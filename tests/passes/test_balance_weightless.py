"""passes.balance where much of a model has no parameters: layers and calls of functions are placed by themselves."""

from __future__ import annotations

import models
import parking
import pytest
import torch
import torch.nn.functional as F
from runnable import batch_of, captured, sgd
from torch import nn

import graphir
from graphir import Program, passes

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = graphir.Topology.named("cpu")
DEPTH = 10


class Functional(nn.Module):
    """A convolution, and behind it functions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        for _ in range(DEPTH):
            x = torch.tanh(x)
        return x.mean((2, 3))


class Tail(nn.Module):
    """Functions in a module of their own, which has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = F.silu(x)
        return x.mean((2, 3))


def pools() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[nn.MaxPool2d(3, 1, 1) for _ in range(DEPTH)])


def tail() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Tail())


def dropouts() -> nn.Module:
    layers = [layer for _ in range(DEPTH // 2) for layer in (nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


NETS = {"pools": pools, "functional": Functional, "tail": tail, "dropouts": dropouts}


def example(name: str, size: int = 32) -> models.Example:
    torch.manual_seed(0)
    model = NETS[name]()
    x = torch.randn(4, 3, size, size)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    return models.Example(model, (x,), (y,), F.mse_loss)


def trained(name: str, **options: object) -> Program:
    one = example(name)
    return captured(one, sgd(one.model.parameters()), **options)


def need(program: Program) -> int:
    return max(graphir.memory(passes.emit(program), threads=1, profile=None).peak.values())


@pytest.mark.parametrize("name", NETS)
def test_what_has_no_parameters_moves_and_bits_are_equal(name: str) -> None:
    one = example(name)
    program = captured(one, sgd(one.model.parameters()))
    limits = dict.fromkeys(["gpu:0", "gpu:1"], int(0.75 * need(program)))
    balanced = passes.balance(program, limits, topology=CPU, options=["shift"], evaluations=400)
    assert balanced.pipeline
    placed = parking.placed(program, balanced.program, share=False)
    found = graphir.memory(passes.emit(placed), threads=1, profile=None).peak
    assert all(found[device] <= limits[device] for device in limits)
    again = passes.Pipeline(balanced.pipeline)(program)
    assert str(again.step) == str(balanced.program.step)
    parking.assert_runs_the_same(program, placed, [(batch_of(one), {})] * 2, ("serial", "threads"))
