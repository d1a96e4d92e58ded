"""Seed ids: every random operator of a step has one, in the order of the calls.

Before it runs, the generator is seeded with :func:`graphir.ir.seeds.mix` of the step, the replica and the seed id, so
that what it draws depends on neither device, lane nor order. :func:`seeded` does the same to eager PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from ..errors import CaptureError
from ..ir.seeds import mix
from .conditions import Broken, Conditions
from .forms import Form, form_of
from .patches import in_this_thread, replaced
from .refusals import where
from .scopes import Scopes

__all__ = [
    "RandomState",
    "SeedIds",
    "active_ids",
    "refuse_generator",
    "rng_state_followed",
    "seedable",
    "seeded",
    "seeding_refused",
]


class SeedIds:
    """Hands out seed ids 0, 1, 2, ….

    Activation checkpointing saves the random state before a forward and restores it before it computes that forward
    again; the ids follow, so that the recomputation draws the same numbers.
    """

    def __init__(self) -> None:
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


_lock = threading.RLock()
if hasattr(os, "register_at_fork"):  # in a forked process nobody releases what another thread held
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_followers: list[contextlib.ExitStack] = []


@contextlib.contextmanager
def rng_state_followed() -> Iterator[None]:
    """While this is active, ``torch.get_rng_state`` and ``set_rng_state`` save and restore the next id too.

    They do where a mode with seed ids is active, and are torch's own in all other threads. Contexts within each other,
    or in several threads, share what is in the place of torch's.
    """
    with _lock:
        _followers.append(_followers[0] if _followers else _following())
    try:
        yield
    finally:
        with _lock:
            replacement = _followers.pop()
            if not _followers:
                replacement.close()


def _following() -> contextlib.ExitStack:
    get, restore = torch.random.get_rng_state, torch.random.set_rng_state

    def get_rng_state() -> torch.Tensor:
        ids = active_ids()
        with _disable_current_modes():
            state = get()
        if ids is not None:
            ids.save(state)
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        ids = active_ids()
        if ids is not None:
            ids.restore(new_state)
        with _disable_current_modes():
            restore(new_state)

    functions = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
    stack = contextlib.ExitStack()
    for owner in (torch, torch.random):
        stack.enter_context(replaced(owner, functions))
    return stack


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
    functions = {name: in_this_thread(refused(name), getattr(torch.random, name)) for name in names}
    with replaced(torch, functions), replaced(torch.random, functions):
        yield


def _own_generator(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
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
    if _own_generator(form, args, kwargs) is not None:
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
    """The global random states, as they are when it is made."""

    def __init__(self) -> None:
        self._python, self._torch, self._numpy = random.getstate(), torch.get_rng_state(), _numpy_state()

    @contextlib.contextmanager
    def kept(self, conditions: Conditions) -> Iterator[None]:
        """Leave the random states as they were.

        Args:
            conditions: is given the condition that a step draws from none that programs don't have.

        Raises:
            Broken: it does not hold.
        """
        conditions["random"] = self._check
        try:
            yield
            self._check()
        except BaseException:
            random.setstate(self._python)
            if self._numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)
            raise
        finally:
            torch.set_rng_state(self._torch)

    def _check(self) -> None:
        for module, unchanged in (
            ("Python's random", random.getstate() == self._python),
            ("numpy.random", _same_numpy_state(_numpy_state(), self._numpy)),
        ):
            if not unchanged:
                raise Broken(
                    "random",
                    f"the step draws from {module}, whose numbers a program would repeat for ever",
                    fix="draw with torch (torch.rand), and choose with torch.where",
                )


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


class _Seeded(TorchDispatchMode):
    def __init__(self, step: int, replica: int, ids: SeedIds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._replica, self.seeds = step, replica, ids
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            form = form_of(func)
            if form.draws(form.bind(args, kwargs).args) and _own_generator(form, args, kwargs) is None:
                func = seedable(form, "graphir.seeded")
                args = args[: form.generator]
                kwargs["generator"] = self._generator(args, kwargs)
        return func(*args, **kwargs)

    def _generator(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
        device = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
        device = torch.device(device)
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(mix(self._step, self._replica, self.seeds.take()))


@contextlib.contextmanager
def seeded(step: int, replica: int = 0) -> Iterator[None]:
    """Let eager PyTorch draw the random numbers that the captured step draws.

    Run the forward, the loss and the backward of one step inside it. The global random state stays as it is. Generators
    that a call is given are used as they are.

    Args:
        step: steps done before this one, from 0.
        replica: the position of the replica in ``devices``, from 0.

    Raises:
        CaptureError: an operator draws random numbers but takes no generator; *step* or *replica* is no whole number.
    """
    for word, number in (("step", step), ("replica", replica)):
        if type(number) is not int or number < 0:
            raise CaptureError(f"seeded: {word} is {number!r}", fix="give a whole number, counted from 0")
    with rng_state_followed(), _Seeded(step, replica, SeedIds()):
        yield
