"""Seed ids: every random operator of a step has one, in the order of the calls.

Before it runs, the generator is seeded with :func:`graphir.ir.seeds.mix` of the step, the replica and the seed id, so
that what it draws depends on neither device, lane nor order. :func:`seeded` does the same to eager PyTorch.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ..errors import CaptureError
from .conditions import Broken, Conditions
from .forms import Form
from .patches import replaced
from .refusals import where
from .scopes import Scopes

__all__ = [
    "RandomState",
    "SeedIds",
    "active_ids",
    "changed_from",
    "drawn_from",
    "random_states",
    "refuse_generator",
    "rng_state_followed",
    "seedable",
    "seeding_refused",
]


class SeedIds:
    """Hands out seed ids 0, 1, 2, ….

    Activation checkpointing saves the random state before a forward and restores it before it computes that forward
    again; the ids follow, so that the recomputation draws the same numbers.

    Attributes:
        draws: whether numbers are drawn, and not only recorded.
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
        """Save the next id with a random state."""
        self._saved[id(state)] = state, self._next

    def restore(self, state: torch.Tensor) -> None:
        """Go back to the id that was saved with a random state."""
        if id(state) not in self._saved:
            raise CaptureError(
                "the step restores a random state that it did not save",
                fix="seed before the step; within it, each random operator has a seed of its own",
            )
        _, self._next = self._saved[id(state)]


@contextlib.contextmanager
def rng_state_followed() -> Iterator[None]:
    """While this is active, ``torch.get_rng_state`` and ``set_rng_state`` save and restore the next id too.

    They do where a mode with seed ids is active. While a step is recorded, they leave torch's random state alone.
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
    """Those of the innermost dispatch mode that has any; autograd's threads have the modes of whom they work for."""
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
                fix="seed before the step; for the same numbers in each, draw them once and register a buffer",
            )

        return call

    names = ("manual_seed", "seed", "initial_seed")
    functions = {name: refused(name) for name in names}
    with replaced(torch, functions), replaced(torch.random, functions):
        yield


def own_generator(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that a call is given, unless it is torch's default one."""
    position = form.generator
    if position is None:
        return None
    given = args[position] if position < len(args) else kwargs.get("generator")
    if given is None or given._cdata == torch.default_generator._cdata:  # type: ignore[attr-defined]
        return None
    return given  # type: ignore[no-any-return]


def refuse_generator(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
    """Raise where a call is given a generator, whose state a program would neither read nor advance.

    Raises:
        CaptureError: it is.
    """
    if own_generator(form, args, kwargs) is not None:
        raise CaptureError(
            f"{form.type} draws from a generator of its own",
            where=where,
            fix="leave generator= out: each random operator is seeded by the step, the replica and its seed id",
        )


def seedable(form: Form, where: str) -> torch._ops.OpOverload:
    """The operator that does the same as a random one and takes a generator.

    Raises:
        CaptureError: there is none, so that nothing can say what it draws.
    """
    if form.seedable is None:
        raise CaptureError(
            f"{form.type} draws random numbers but takes no generator",
            where=where,
            fix="draw with torch.rand, torch.randn or torch.bernoulli; dropout is torch.nn.functional.dropout",
        )
    return form.seedable


class RandomState:
    """The random states that all threads have together, as they are when it is made.

    Attributes:
        suspected: whether one of Python's or numpy's has changed while a step was recorded and other threads ran, any
            of which may have drawn from it.
    """

    def __init__(self) -> None:
        self._python, self._torch, self._numpy = random.getstate(), torch.get_rng_state(), _numpy_state()
        self.suspected = self._cleared = False

    @contextlib.contextmanager
    def kept(self, conditions: Conditions) -> Iterator[None]:
        """Leave the random states as they were; where other threads run, those that torch has are left to these.

        Args:
            conditions: is given the condition that a step draws from none that programs don't have.

        Raises:
            Broken: it does not hold, and no other thread can have drawn.
        """
        conditions["random"] = self._check
        alone = _is_alone()
        try:
            yield
            if alone and _is_alone():
                self._check()
            elif not self._cleared:
                self.suspected = self._changed() is not None
        except BaseException:
            if alone and _is_alone():
                self.restore()
            raise
        finally:
            if alone and _is_alone():
                torch.set_rng_state(self._torch)

    def clear(self) -> None:
        """Note that the step does not draw: other threads do."""
        self._cleared, self.suspected = True, False

    def restore(self) -> None:
        """Bring back Python's and numpy's states."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def _check(self) -> None:
        changed = self._changed()
        if changed is not None:
            raise drawn_from(changed)

    def _changed(self) -> str | None:
        return changed_from((self._python, self._numpy))


def drawn_from(module: str) -> Broken:
    """The error to raise where a step draws from a *module* of which programs know nothing."""
    return Broken(
        "random",
        f"the step draws from {module}, whose numbers a program would repeat for ever",
        fix="draw with torch (torch.rand), and choose with torch.where",
    )


def random_states() -> tuple[Any, Any]:
    """Python's global random state and numpy's."""
    return random.getstate(), _numpy_state()


def changed_from(before: tuple[Any, Any]) -> str | None:
    """Which of :func:`random_states` is another one now."""
    if random.getstate() != before[0]:
        return "Python's random"
    return None if _same_numpy_state(_numpy_state(), before[1]) else "numpy.random"


def _is_alone() -> bool:
    """Whether no other thread runs Python."""
    return len(sys._current_frames()) == 1


def _numpy_state() -> tuple[Any, ...] | None:
    """Numpy's global random state; None where nothing imported numpy."""
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same_numpy_state(now: tuple[Any, ...] | None, before: tuple[Any, ...] | None) -> bool:
    if now is None or before is None:
        return True
    return all(
        a.tobytes() == b.tobytes() if hasattr(a, "tobytes") else a == b for a, b in zip(now, before, strict=True)
    )
