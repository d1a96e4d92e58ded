"""Python"s and numpy"s random states: a step that draws from one is refused."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from ..words.places import Broken, Conditions

__all__ = ["RandomState", "changed_from", "drawn_from", "random_states"]


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
