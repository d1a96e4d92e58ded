"""What a step keeps past its end: tensors in a ``functools.cache`` or ``lru_cache``, such as positions by length.

What such a cache holds from before would be a constant of the program, where the step that fills it computes it by
operators; and what a recording leaves there is a fake tensor, which the next eager step would find. So a step is
recorded with caches that hold no tensors, and they hold none afterwards: they are filled again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..errors import CaptureError
from .values import Alias

__all__ = ["Caches"]

_CACHE: Final = type(functools.cache(int))
_DEPTH: Final = 3
"""Of containers: a cache's own table, and a tuple of dicts that a function returns."""


class _Made(NamedTuple):
    """A tensor of a step, what made it at which line, and whether that follows from sizes and literals alone."""

    tensor: weakref.ref[torch.Tensor]
    type: str
    line: str
    known: bool


class Caches:
    """The caches that a step may read and fill.

    To find them takes longer than to record a small step, so it is done where a tensor may well be in one only.
    """

    def __init__(self) -> None:
        self._held: frozenset[int] | None = None
        self._read = False
        self._made: list[_Made] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the step reads from elsewhere is in one of them."""
        if self._held is None:
            self._held = frozenset([id(t) for _, tensors in _caches() for t in tensors])
        found = id(tensor) in self._held
        self._read = self._read or found
        return found

    def cleared_if_read(self) -> bool:
        """Clear them if :meth:`holds` has said yes since the last call; whether it has."""
        read, self._read = self._read, False
        if read:
            self._clear()
        return read

    @contextlib.contextmanager
    def watch(self, tensors: Iterable[Alias]) -> Iterator[None]:
        """Take note of the *tensors* that a step has seen by the end; where it fails, the error keeps them alive."""
        try:
            yield
        except BaseException:
            if any(alias.value.known for alias in tensors):
                self._clear()
            raise
        made = ((alias.tensor, alias.value, alias.value.call) for alias in tensors)
        self._made += [_Made(weakref.ref(t), c.type, c.line, v.known) for t, v, c in made if c is not None]

    def leave(self) -> None:
        """Clear them if they were filled, once nothing of the capture refers to a tensor of the step any more."""
        if self._remaining():
            self._clear()

    def check(self) -> None:
        """Raise where the step has kept elsewhere what it would find again; forget what it made.

        Raises:
            CaptureError: names the line.
        """
        if any(made.known for made in self._remaining()):
            gc.collect()
        for made in self._remaining():
            if made.known:
                raise CaptureError(
                    f"the step keeps what {made.type} makes outside of the model, where the next eager step would find "
                    "a tensor without data",
                    where=made.line,
                    fix="make it in each step, keep it in a buffer or use functools.cache; and delete it now",
                )
        self._made.clear()

    def _remaining(self) -> list[_Made]:
        return [made for made in self._made if made.tensor() is not None]

    def _clear(self) -> None:
        for cache, tensors in _caches():
            if tensors:
                cache.cache_clear()
        self._held = None


def _caches() -> Iterator[tuple[Any, Sequence[torch.Tensor]]]:
    """Every cache, with the tensors in it."""
    for cache in gc.get_objects():
        if type(cache) is _CACHE:
            yield cache, list(_tensors(gc.get_referents(cache), _DEPTH))


def _tensors(items: Iterable[Any], depth: int) -> Iterator[torch.Tensor]:
    """The tensors among *items* and in tuples, lists and dicts of them."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif depth and type(item) in (tuple, list, dict):
            yield from _tensors(item.values() if type(item) is dict else item, depth - 1)
