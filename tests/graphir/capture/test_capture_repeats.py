"""A step that is another one each time it is run, by what no program sees, is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphir.capture import capture
from graphir.errors import CaptureError

COUNTS = {"calls": 0}


class Runs(nn.Module):
    """Runs *step*."""

    def __init__(self, step: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor) -> Any:
        return self.step(x)


def by_a_global(x: Tensor) -> Tensor:
    COUNTS["calls"] += 1
    return x * COUNTS["calls"]


def by_an_iterator(x: Tensor, numbers: Any = itertools.count(2)) -> Tensor:  # noqa: B008
    return x / next(numbers)


def by_a_constant(x: Tensor, numbers: Any = itertools.count()) -> Tensor:  # noqa: B008
    return x + torch.tensor(float(next(numbers)))


def by_a_list(x: Tensor, numbers: Any = iter([1, 2, 3])) -> Tensor:  # noqa: B008
    return x * next(numbers)


def by_an_operator(x: Tensor, choices: Any = itertools.cycle([torch.sin, torch.cos])) -> Tensor:  # noqa: B008
    result: Tensor = next(choices)(x)
    return result


@pytest.mark.parametrize("batch_dims", [0, ((None,), {}, ())], ids=["batch", "no batch"])
@pytest.mark.parametrize("step", [by_a_global, by_an_iterator, by_a_constant])
def test_python_outside_of_modules_that_counts(step: Callable[[Tensor], Any], batch_dims: Any) -> None:
    with pytest.raises(CaptureError, match="the step is another one when it is run again") as error:
        capture(Runs(step), (torch.randn(4, 3),), batch_dims=batch_dims)
    assert "no globals" in str(error.value)


def test_a_step_that_fails_when_it_is_run_again() -> None:
    with pytest.raises(CaptureError, match="StopIteration"):
        capture(Runs(by_a_list), (torch.randn(4, 3),))


def test_a_step_that_reads_data_when_it_is_run_again() -> None:
    def step(x: Tensor, runs: Any = itertools.count()) -> Tensor:  # noqa: B008
        return x * x.sum().item() if next(runs) else x * torch.arange(3)

    with pytest.raises(CaptureError, match=r"_local_scalar_dense\.default reads a number out of a tensor"):
        capture(Runs(step), (torch.randn(4, 3),))


def test_what_differs_is_named_and_where() -> None:
    with pytest.raises(CaptureError, match=r"other of aten.mul.Tensor was \d+, then \d+\n  in   the model, at test_"):
        capture(Runs(by_a_global), (torch.randn(4, 3),))
    with pytest.raises(CaptureError, match=r": aten.sin.default the first time, aten.cos.default the second"):
        capture(Runs(by_an_operator), (torch.randn(4, 3),), batch_dims=((None,), {}, ()))


def test_a_step_whose_sizes_are_fixed_and_that_repeats() -> None:
    program = capture(Runs(torch.pdist), (torch.randn(4, 3),))
    assert "is not affine" in program.fixed
