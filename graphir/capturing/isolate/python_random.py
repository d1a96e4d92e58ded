"""Python's and numpy's random states: a step that moves one is refused."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

from ...errors import CaptureError
from ..words.libraries import LAYER_DROP
from ..words.places import where

__all__ = ["RandomStates", "drawn_from"]


class RandomStates:
    """The random states that all threads share, as they are when this is made."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_state()

    def moved(self) -> str:
        """The module whose state has changed since; empty where none has."""
        if random.getstate() != self._python:
            return "Python's random"
        return "" if _same_numpy_state(_numpy_state(), self._numpy) else "numpy.random"

    @contextlib.contextmanager
    def restored_if_it_fails(self) -> Iterator[None]:
        """After an error, set the random states back to these."""
        try:
            yield
        except BaseException:
            if self.moved():
                random.setstate(self._python)
                if self._numpy is not None:
                    sys.modules["numpy"].random.set_state(self._numpy)
            raise


def drawn_from(module: str) -> CaptureError:
    """The error to raise where a step draws from a *module* of which programs know nothing."""
    return CaptureError(
        f"the step draws from {module}: a program would repeat the recorded numbers in every step",
        where=where(""),
        fix="draw with torch (torch.rand), and choose with torch.where; let no other thread draw during a capture; if "
        f"a library draws, {LAYER_DROP}",
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
