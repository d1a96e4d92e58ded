"""Python's ``print`` while a step is recorded: a function of this module calls it, and so asks for texts of tensors."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from functools import wraps
from typing import Any, Final

from .patches import LOCK

__all__ = ["prints_followed"]

_own: Final = builtins.print
_recordings: Final[list[object]] = []
"""One object for each recording that is under way."""


@wraps(_own)
def _print(*args: Any, **kwargs: Any) -> None:
    _own(*args, **kwargs)


@contextlib.contextmanager
def prints_followed() -> Iterator[None]:
    """While this is active, this module asks a tensor for its text where the step prints the tensor.

    All threads share Python's ``print``: other threads print through this module's function, which does the same. A
    ``print`` that somebody has put in the place of Python's is left alone.
    """
    recording = object()
    with LOCK:
        _recordings.append(recording)
        if builtins.print is _own:
            builtins.print = _print
    try:
        yield
    finally:
        with LOCK:
            _recordings.remove(recording)
            if builtins.print is _print and not _recordings:
                builtins.print = _own
