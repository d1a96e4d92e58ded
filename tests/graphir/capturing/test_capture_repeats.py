"""A step that is another one each time it is run, by what no program sees, is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

pytestmark = pytest.mark.usefixtures("few_objects")

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


def by_a_list(x: Tensor, numbers: Any = iter([1])) -> Tensor:  # noqa: B008
    return x * next(numbers)


def by_an_operator(x: Tensor, choices: Any = itertools.cycle([torch.sin, torch.cos])) -> Tensor:  # noqa: B008
    result: Tensor = next(choices)(x)
    return result


@pytest.mark.parametrize("batch_dims", [0, ((None,), {}, ())], ids=["batch", "no batch"])
@pytest.mark.parametrize("step", [by_a_global, by_an_iterator, by_a_constant])
def test_python_outside_of_modules_that_counts(step: Callable[[Tensor], Any], batch_dims: Any) -> None:
    with pytest.raises(CaptureError, match="the step differs when it is run again") as error:
        capture(Runs(step), (torch.randn(4, 3),), batch_dims=batch_dims)
    assert "no globals" in str(error.value)


class Turns:
    """Counts up in places that no capture looks into, from *first* on."""

    count = 0

    def __init__(self, first: int) -> None:
        table, flag, closed = {"count": first}, numpy.array([first]), first
        type(self).count = COUNTS["turns"] = first

        def in_a_closure() -> int:
            nonlocal closed
            closed += 1
            return closed

        def in_a_dictionary() -> int:
            table["count"] += 1
            return table["count"]

        def in_numpy() -> int:
            flag[0] += 1
            return int(flag[0])

        self.next = {
            "a global": self.in_a_global,
            "a class": self.in_a_class,
            "a closure": in_a_closure,
            "a dictionary": in_a_dictionary,
            "numpy": in_numpy,
        }

    @staticmethod
    def in_a_global() -> int:
        COUNTS["turns"] += 1
        return COUNTS["turns"]

    @classmethod
    def in_a_class(cls) -> int:
        cls.count += 1
        return cls.count


ALTERNATIVES: dict[str, Callable[[Tensor, bool], Any]] = {
    "operators": lambda x, one: x.sin() if one else x.cos(),
    "numbers": lambda x, one: x * (2 if one else 3),
    "results": lambda x, one: (x.sin(), x.cos())[:: 1 if one else -1],
    "names of results": lambda x, one: {"one" if one else "other": x.sin()},
    "numbers among the results": lambda x, one: (x.sin(), one),
}


@pytest.mark.parametrize("place", list(Turns(0).next))
def test_steps_that_take_turns(place: str) -> None:
    turn = Turns(0).next[place]
    with pytest.raises(CaptureError, match="the step differs when it is run again"):
        capture(Runs(lambda x: x.sin() if turn() % 2 else x.cos()), (torch.randn(4, 3),))


@pytest.mark.parametrize(
    ("batch", "batch_dims"), [(1, 0), (4, 0), (4, ((None,), {}, ()))], ids=["batch of one", "batch", "no batch"]
)
@pytest.mark.parametrize(("period", "first"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_whichever_turn_it_is(period: int, first: int, batch: int, batch_dims: Any) -> None:
    turn = Turns(first).in_a_global
    with pytest.raises(CaptureError, match="the step differs when it is run again"):
        capture(
            Runs(lambda x: x.sin() if turn() % period else x.cos()), (torch.randn(batch, 3),), batch_dims=batch_dims
        )


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", list(ALTERNATIVES))
def test_what_takes_turns(name: str, first: int) -> None:
    turn = Turns(first).in_a_global
    with pytest.raises(CaptureError, match="the step differs when it is run again"):
        capture(Runs(lambda x: ALTERNATIVES[name](x, turn() % 2 == 0)), (torch.randn(4, 3),))


def test_a_training_step_that_takes_turns() -> None:
    model, turn = nn.Linear(3, 3), Turns(0).in_a_global
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        CaptureError, match=r"other of aten.mul.Tensor was 2, then 1\n  in   the loss function, at test_"
    ):
        capture(model, (torch.randn(4, 3),), loss=lambda out: (out * (turn() % 2 + 1)).sum(), optimizer=optimizer)


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
    assert "is not affine" in program.covers.fixed
