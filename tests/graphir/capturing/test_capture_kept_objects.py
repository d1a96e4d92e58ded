"""What modules keep in slots, buffers, methods, iterators and generators, where no capture looks.

It is refused where it makes the next recording another step. Docs/trust.md says that nothing else shows it.
"""

from __future__ import annotations

import array
import dataclasses
import functools
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError


@dataclasses.dataclass(slots=True)
class Slots:
    n: int = 0


class Frozen:
    """Slots in a class and in its base, one of which is private; nobody sets or reads them as usual."""

    __slots__ = ("__hidden",)

    def tick(self) -> int:
        slot = Frozen.__dict__["_Frozen__hidden"]
        slot.__set__(self, self.count() + 1)
        return self.count()

    def count(self) -> int:
        try:
            return int(Frozen.__dict__["_Frozen__hidden"].__get__(self))
        except AttributeError:
            return 0

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError("code of the user's")

    def __getattribute__(self, name: str) -> Any:
        if name in ("_Frozen__hidden", "_hidden"):
            raise AssertionError("code of the user's")
        return object.__getattribute__(self, name)


class Derived(Frozen):
    __slots__ = ()


class Tick:
    def __init__(self) -> None:
        self.n = 0

    def tick(self) -> int:
        self.n += 1
        return self.n


def local() -> threading.local:
    kept = threading.local()
    kept.n = 0
    return kept


def counted(kept: Any) -> int:
    kept.n += 1
    return int(kept.n)


def first_counted(kept: Any) -> int:
    kept[0] += 1
    return int(kept[0])


def called(kept: Any) -> int:
    return int(kept())


def drawn(kept: Any) -> int:
    return int(kept.random() * 2**20)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], int], Callable[[Any], object] | None]] = {
    "slots": (Slots, counted, lambda kept: kept.n),
    "a slot of a base": (Derived, lambda kept: int(kept.tick()), lambda kept: kept.count()),
    "bytearray": (lambda: bytearray(4), first_counted, bytes),
    "array.array": (lambda: array.array("l", [0, 7]), first_counted, lambda kept: kept.tolist()),
    "bound method": (lambda: Tick().tick, called, lambda kept: kept.__self__.n),
    "partial of a method": (lambda: functools.partial(Tick().tick), called, lambda kept: kept.func.__self__.n),
    "argument of a partial": (lambda: functools.partial(counted, Tick()), called, lambda kept: kept.args[0].n),
    "keyword of a partial": (
        lambda: functools.partial(counted, kept=Tick()), called, lambda kept: kept.keywords["kept"].n,
    ),
    "itertools.count": (itertools.count, next, None),
    "method of an iterator": (lambda: itertools.count().__next__, called, None),
    "RandomState": (lambda: numpy.random.RandomState(0), drawn, lambda kept: str(kept.get_state())),
    "Generator": (lambda: numpy.random.default_rng(0), drawn, lambda kept: str(kept.bit_generator.state)),
    "Generator whose state is one array": (
        lambda: numpy.random.Generator(numpy.random.SFC64(0)), drawn, lambda kept: str(kept.bit_generator.state),
    ),
    "bit generator": (
        lambda: numpy.random.PCG64(0), lambda kept: int(kept.random_raw() % 2**20), lambda kept: str(kept.state),
    ),
    "method of a generator": (
        lambda: numpy.random.default_rng(0).random, lambda kept: int(kept() * 2**20),
        lambda kept: str(kept.__self__.bit_generator.state),
    ),
}  # fmt: skip
"""How each is made, what a step does with it, and what that changes of it."""


class Late(nn.Module):
    """Its step is another one from the twentieth on."""

    def __init__(self, kept: Any, use: Callable[[Any], int]) -> None:
        super().__init__()
        self.kept, self.use = kept, use

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        n = self.use(self.kept)
        return y * (1 if n < 20 else 2)


X = torch.ones(4, 3)


class Scaled(Late):
    """Its step is another one each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.use(self.kept)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_makes_each_step_another_one_is_refused(kind: str) -> None:
    made, use, _ = KINDS[kind]
    with pytest.raises(CaptureError, match="the step differs when it is run again") as error:
        capture(nn.Sequential(Scaled(made(), use)), (X,))
    assert error.value.where.startswith(f"module '0', at {Path(__file__).name}:")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] in (counted, first_counted, called)])
def test_a_counter_that_matters_late_is_not_seen_and_stays_where_recordings_left_it(kind: str) -> None:
    made, use, state = KINDS[kind]
    kept = made()
    before = None if state is None else state(kept)
    program = capture(Late(kept, use), (X,))
    assert [op.args["other"] for op in program.step.ops if op.type == "aten.mul.Tensor"] == [1]
    assert state is None or state(kept) != before


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_nobody_changes_is_no_obstacle(kind: str) -> None:
    capture(Late(KINDS[kind][0](), lambda kept: 1), (X,))


def test_a_counter_in_a_table_of_attributes_is_refused_however_late_it_matters_and_put_back() -> None:
    kept = local()
    with pytest.raises(CaptureError, match="the step changes the contents of the attribute 'kept'") as error:
        capture(nn.Sequential(Late(kept, counted)), (X,))
    assert error.value.where == "module '0'" and "allow_changes=('0.kept',)" in error.value.fix
    assert kept.n == 0
    capture(Late(kept, counted), (X,), allow_changes=("kept",))
    assert kept.n == 0


def test_a_method_of_the_generator_that_all_threads_share_is_watched_as_that() -> None:
    capture(Late(random.random, lambda kept: 1), (X,))
    for draw in (random.random, numpy.random.rand):
        with pytest.raises(CaptureError, match="the step draws from"):
            capture(Late(draw, lambda kept: 1 if kept() >= 0 else 2), (X,))


def test_what_a_distribution_computes_once_is_put_back() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.distributions.Bernoulli(logits=torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.kept.probs

    model, x = Masked(), torch.randn(3, 4)
    with pytest.raises(CaptureError, match="the step changes the contents of the attribute 'kept'") as refused:
        capture(model, (x,))
    assert "if only the first step changes the attribute, run one step before the capture" in refused.value.fix
    expected = model(x)
    program = capture(model, (x,))
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x), expected)
