"""Seed ids: every random operator of a step has one, in the order of the calls.

Before a random operator runs, the generator is seeded with :func:`graphir.ir.seeds.mix` of the step, the replica and
the seed id. So the numbers that the operator draws depend on neither device, lane nor order. :func:`seeded` seeds eager
PyTorch in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ...errors import CaptureError
from ..isolate.patches import replaced
from ..words.places import where
from .forms import Form
from .scopes import Scopes

__all__ = [
    "SeedIds",
    "active_ids",
    "own_generator",
    "refuse_generator",
    "rng_state_followed",
    "seedable",
    "seeding_refused",
]


class SeedIds:
    """Hands out seed ids 0, 1, 2, ….

    Activation checkpointing saves the random state before a forward, and restores it before it runs that forward
    again. The ids are saved and restored too, so that the second run draws the same numbers.

    Attributes:
        draws: whether random operators draw numbers; false while a step is only recorded.
    """

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self._next = 0
        self._saved: dict[int, tuple[torch.Tensor, int]] = {}

    def take(self) -> int:
        """The next id."""
        self._next += 1
        return self._next - 1

    def save(self, state: torch.Tensor) -> None:
        """Save the next id under a random state."""
        self._saved[id(state)] = state, self._next

    def restore(self, state: torch.Tensor) -> None:
        """Go back to the id that was saved under a random state."""
        if id(state) not in self._saved:
            raise CaptureError(
                "the step restores a random state that it did not save",
                fix="seed before the step; within it, each random operator has a seed of its own",
            )
        _, self._next = self._saved[id(state)]


@contextlib.contextmanager
def rng_state_followed() -> Iterator[None]:
    """While this is active, ``torch.get_rng_state`` and ``set_rng_state`` save and restore the next id too.

    Both do so only under a dispatch mode with seed ids. While a step is recorded, torch's random state is not restored.
    """
    get, restore = torch.random.get_rng_state, torch.random.set_rng_state

    def get_rng_state() -> torch.Tensor:
        with _disable_current_modes():
            state = get()
        ids = active_ids()
        if ids is not None:
            ids.save(state)
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        ids = active_ids()
        if ids is not None:
            ids.restore(new_state)
            if not ids.draws:
                return
        with _disable_current_modes():
            restore(new_state)

    def applies(instance: object) -> bool:
        return active_ids() is not None

    functions = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    with replaced(torch, functions, applies), replaced(torch.random, functions, applies):
        yield


def active_ids() -> SeedIds | None:
    """The seed ids of the innermost mode that has some; autograd's threads have the modes of their callers."""
    found = (getattr(mode, "seeds", None) for mode in reversed(_get_current_dispatch_mode_stack()))
    return next((ids for ids in found if isinstance(ids, SeedIds)), None)


@contextlib.contextmanager
def seeding_refused(scopes: Scopes) -> Iterator[None]:
    """While this is active, seeding torch raises: a program's random numbers follow the step, not a fixed seed.

    Raises:
        CaptureError: the step calls ``torch.manual_seed``, ``torch.seed`` or ``torch.initial_seed``.
    """

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            raise CaptureError(
                f"the step calls torch.{name}",
                where=where(scopes.current),
                fix="seed before the step; for the same numbers in each step, draw them once and register them as a "
                "buffer",
            )

        return call

    names = ("manual_seed", "seed", "initial_seed")
    functions = {name: refused(name) for name in names}
    with replaced(torch, functions), replaced(torch.random, functions):
        yield


def own_generator(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that a call is given; None for torch's default one."""
    position = form.generator
    if position is None:
        return None
    given = args[position] if position < len(args) else kwargs.get("generator")
    if given is None or given._cdata == torch.default_generator._cdata:  # type: ignore[attr-defined]
        return None
    return given  # type: ignore[no-any-return]


def refuse_generator(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse a call that is given a generator of its own: a program would neither read nor advance its state.

    Raises:
        CaptureError: the call has such a generator.
    """
    if own_generator(form, args, kwargs) is not None:
        raise CaptureError(
            f"{form.type} draws from a generator of its own",
            where=where,
            fix="leave generator= out: each random operator is seeded by the step, the replica and its seed id",
        )


def seedable(form: Form, where: str) -> torch._ops.OpOverload:
    """The overload of a random operator that computes the same and takes a generator.

    Raises:
        CaptureError: there is none, so no seed could decide which numbers the operator draws.
    """
    if form.seedable is None:
        raise CaptureError(
            f"{form.type} draws random numbers but takes no generator",
            where=where,
            fix="draw with torch.rand, torch.randn or torch.bernoulli; dropout is torch.nn.functional.dropout",
        )
    return form.seedable
