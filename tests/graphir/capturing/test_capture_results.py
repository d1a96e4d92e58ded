"""What capture remembers of operators' results: a program does not depend on what was captured before."""

import gc
import warnings
from collections.abc import Callable

import models
import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir.errors import CaptureError
from graphir.ir.infer import forget


def _text(example: models.Example) -> str:
    return str(graphir.capture(example.model, example.inputs, targets=example.targets, loss=example.loss))


@pytest.mark.parametrize("make", [models.gpt, models.resnet, models.mlp])
def test_a_program_is_the_same_when_all_results_are_known(make: Callable[[], models.Example]) -> None:
    example = make()
    forget()
    assert _text(example) == _text(example)


class Arithmetic(nn.Module):
    """Calls that differ in the type of an argument only."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x * self.factor, x.sum(0, keepdim=bool(self.factor)), x.view(2, 3), x.view([3, 2])


@pytest.mark.parametrize(("factor", "dtype"), [(2, "i64"), (2.0, "f32"), (True, "i64"), (2, "i64")])
def test_results_follow_the_types_of_arguments(factor: float, dtype: str) -> None:
    program = graphir.capture(Arithmetic(factor), (torch.arange(6),), batch_dims=None)
    assert program.step.blobs["mul"].dtype == dtype


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = x.relu().chunk(2, 1)
        return left, right, right.t()


def test_known_views_are_views_of_what_they_were() -> None:
    for _ in range(2):
        blobs = graphir.capture(Halves(), (torch.randn(3, 4),)).step.blobs
        views = [b for b in blobs.values() if b.is_view]
        assert [(b.storage, b.strides, b.offset) for b in views[:2]] == [("relu", (4, 1), 0), ("relu", (4, 1), 2)]
        assert views[2].storage == "relu"


class Strided(nn.Module):
    """A parameter whose gradient has to be laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.shift.sum()


def test_what_is_put_in_after_the_backward_is_there_once() -> None:
    program = graphir.capture(Strided(), (torch.randn(4),), loss=lambda out: out)
    types = [op.type for op in program.step.ops if op.phase == "backward"]
    assert types.count("aten.clone.default") == 1
    assert types.count("aten.permute.default") == 2


class Collects(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.enabled: list[bool] = []
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn(str(gc.isenabled()), stacklevel=1)
        if self.inner is not None:
            self.inner(x)
        return x.relu()


def test_the_collector_rests_and_is_as_it_was_afterwards() -> None:
    assert gc.isenabled()
    with pytest.warns(UserWarning, match="False"):
        graphir.capture(Collects(), (torch.randn(3),))
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.warns(UserWarning, match="False"):
            graphir.capture(Collects(), (torch.randn(3),))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_as_it_was_after_a_failed_capture() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(CaptureError):
        graphir.capture(Reads(), (torch.randn(3),))
    assert gc.isenabled()


def test_recordings_are_not_left_to_the_garbage_collector() -> None:
    example = models.gpt()
    _text(example)
    gc.collect()
    gc.disable()
    try:
        _text(example)
        assert gc.collect() < 1000  # torch's modes alone leave some hundreds, a recording thousands
    finally:
        gc.enable()
