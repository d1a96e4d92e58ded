"""Numbers that a step reads out of tensors: those that follow from sizes and literals are known, others are refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from direct import matches_eager
from models import Example
from torch import Tensor, nn

import graphir
from graphir.errors import CaptureError


class Read(nn.Module):
    """Scales its input by what *number* reads."""

    def __init__(self, number: Callable[[Tensor, nn.Module], float]) -> None:
        super().__init__()
        self.number = number
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0, 3.0]))
        self.register_buffer("kept", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * self.number(x, self)


def example(number: Callable[[Tensor, nn.Module], float]) -> Example:
    return Example(Read(number), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())


def overwritten(x: Tensor, module: nn.Module) -> float:
    weights = torch.zeros(len(x), 2)
    weights[1:, 0] += torch.tensor([2.0])
    return weights.sum().item()


def overwritten_in_part(x: Tensor, module: nn.Module) -> float:
    zeros = torch.zeros(3)
    first = zeros[0]
    zeros.copy_(x[0])
    return first.item()


def joined(x: Tensor, module: nn.Module) -> float:
    parts = torch.linspace(0, len(x), 3, dtype=torch.float64).split(2)
    return float(torch.cat(parts[::-1])[0])


def branch(x: Tensor, module: nn.Module) -> float:
    return 2.0 if (torch.ones_like(torch.arange(x.shape[1])).cumsum(0) == 3).any() else 1.0


@pytest.mark.parametrize("number", [overwritten, joined, branch])
def test_numbers_that_follow_from_sizes_are_known(number: Callable[[Tensor, nn.Module], float]) -> None:
    read = example(number)
    program = graphir.capture(read.model, read.inputs, loss=read.loss)
    assert program.covers.fixed == ""
    forward = [op.type for op in program.step.ops if op.phase == "forward"]
    assert forward == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.pow.Tensor_Scalar", "aten.sum.default"]
    matches_eager(program, read, batches=(6,))


@pytest.mark.parametrize(
    "number",
    [
        lambda x, module: x.sum().item(),
        lambda x, module: module.kept.item(),
        lambda x, module: module.scale.sum().item(),
        lambda x, module: torch.rand(()).item(),
        lambda x, module: torch.arange(len(x)).float().uniform_().sum().item(),
        lambda x, module: torch.empty(()).item(),
        lambda x, module: torch.zeros(3).add_(x[0]).sum().item(),
        overwritten_in_part,
    ],
    ids=[
        "input",
        "buffer",
        "parameter",
        "random",
        "random in place",
        "uninitialised",
        "overwritten",
        "overwritten in part",
    ],
)
def test_other_numbers_are_refused(number: Callable[[Tensor, nn.Module], float]) -> None:
    read = example(number)
    with pytest.raises(CaptureError, match=r"reads a number out of a tensor.*\n(.*\n)*.*fix +compute with the tensor"):
        graphir.capture(read.model, read.inputs, loss=read.loss)


def test_only_tensors_of_known_values_pass_for_real_ones() -> None:
    kind = torch._subclasses.FakeTensor
    seen = []

    def ask(x: Tensor, module: nn.Module) -> float:
        ones = torch.ones(3)
        seen.append([isinstance(t, torch._subclasses.FakeTensor) for t in (x, module.scale, ones, ones * x, ones + 1)])
        return 1.0

    read = example(ask)
    graphir.capture(read.model, read.inputs, loss=read.loss)
    assert seen == [[True, True, False, True, False]] * 4
    assert torch._subclasses.FakeTensor is kind


def test_modules_imported_meanwhile_have_the_class_of_fake_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_by_a_step.py").write_text("from torch._subclasses import FakeTensor\nheld = [FakeTensor]\n")
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]

    def late(x: Tensor, module: nn.Module) -> float:
        importlib.import_module("imported_by_a_step")
        return 1.0

    read = example(late)
    try:
        graphir.capture(read.model, read.inputs, loss=read.loss)
        module = sys.modules["imported_by_a_step"]
        assert module.FakeTensor is torch._subclasses.FakeTensor
        assert not isinstance(read.inputs[0], module.held[0])
    finally:
        sys.modules.pop("imported_by_a_step", None)
