"""Tensors that a step keeps past its end in a ``functools.cache`` or ``lru_cache``, such as positions by length.

A tensor that is in a cache before the capture would be a constant of the program, though the step that fills the cache
computes it by operators. A tensor that a recording leaves in a cache is fake, and the next eager step would find it. So
entries that a step reads are set aside while the step is recorded, and entries that the step makes are taken out. All
other entries stay: they may have taken hours. A cache with a limit, which orders entries by use, is cleared if the step
uses it.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from ...errors import CaptureError
from .global_state import open_regions
from .recorded import is_recorded

__all__ = ["Caches", "Seen"]

_CACHE: Final = type(functools.cache(int))
_CAST: Final = "aten._to_copy.default"
"""The operator of casts of weights, which autocast keeps until its outermost region ends, maybe after the capture."""
_YOUNGEST: Final = 0
_SURVIVORS: Final = 1
_OLDEST: Final = 2
"""Generations of objects that the collector looks through for cycles, each with the younger ones. The collector rests
during a capture, so that the youngest generation has all that the step made. A first look puts live objects among the
survivors. The oldest generation has all objects of the process, and takes longest."""
_DEPTH: Final = 3
"""How deep containers are searched: a cache's own table, and a tuple of dicts that a function returns."""


class Seen(NamedTuple):
    """A tensor that a step has seen.

    Attributes:
        tensor: the tensor, or a weak reference to it.
        type: of the operator that made the tensor; empty for a tensor that the step was given.
        line: of the source that called the operator.
        known: whether its values follow from sizes and literals alone.
    """

    tensor: Any
    type: str
    line: str
    known: bool


class _Entry(NamedTuple):
    """One entry of a cache; or all entries of a cache with a limit, from which none can be taken out alone.

    Attributes:
        tensors: in the entry.
        remove: takes the entry out of the cache.
        put_back: puts the entry back, unless the cache has another value under its key by now.
    """

    tensors: Sequence[torch.Tensor]
    remove: Callable[[], object]
    put_back: Callable[[], object]


class Caches:
    """The caches that a step may read and fill.

    Finding the caches takes longer than recording a small step. So they are looked for only if the step reads a tensor
    from elsewhere, or if weak references show that a tensor of the step is still alive at the end.
    """

    def __init__(self) -> None:
        self._held: frozenset[int] | None = None
        self._read: dict[int, torch.Tensor] = {}
        self._aside: list[_Entry] = []
        self._made: list[Seen] = []

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the step reads from elsewhere is in a cache."""
        if self._held is None:
            self._held = frozenset([id(t) for entry in _entries() for t in entry.tensors])
        found = id(tensor) in self._held
        if found:
            self._read[id(tensor)] = tensor
        return found

    def saw(self, tensors: Iterable[Seen]) -> None:
        """Note the tensors of a recording that has ended."""
        self._made += [made._replace(tensor=weakref.ref(made.tensor)) for made in tensors if made.type]

    def set_aside(self) -> bool:
        """Take out the entries of tensors that :meth:`holds` has found since the last call; whether there are any."""
        read, self._read = self._read, {}
        if read:
            self._aside += self._take_out(lambda tensor: id(tensor) in read)
        return bool(read)

    def leave(self) -> None:
        """Take out the entries that the step has left, and put back the entries that were set aside.

        Call this once nothing of the capture refers to a tensor of the step any more.
        """
        if self._survive(_YOUNGEST):
            self._take_out(is_recorded)
        for entry in self._aside:
            entry.put_back()
        self._aside.clear()

    def check(self) -> None:
        """Raise if the step has kept a tensor elsewhere, where the next step would find it; forget the step's tensors.

        Raises:
            CaptureError: names the line.
        """
        for made in self._remaining() if self._survive(_SURVIVORS, _OLDEST) else ():
            if made.known or made.type != _CAST or not open_regions():
                raise CaptureError(
                    f"the step keeps a result of {made.type} outside of the model, where the next eager step would "
                    "find a tensor without data",
                    where=made.line,
                    fix="compute the tensor in each step, keep a constant in a buffer or by functools.cache, keep a "
                    "result in an attribute of the module; and delete the kept tensor now",
                )
        self._made.clear()

    def _survive(self, *generations: int) -> bool:
        """Whether tensors of the step are alive after cycles in these generations are collected, in order."""
        for generation in generations:
            if self._remaining():
                gc.collect(generation)
        return bool(self._remaining())

    def _remaining(self) -> list[Seen]:
        return [made for made in self._made if made.tensor() is not None]

    def _take_out(self, chosen: Callable[[torch.Tensor], bool]) -> list[_Entry]:
        """Remove the entries with a *chosen* tensor or one of a recording; return those with none of a recording."""
        self._held = None
        found = [entry for entry in _entries() if any(chosen(t) or is_recorded(t) for t in entry.tensors)]
        for entry in found:
            entry.remove()
        return [entry for entry in found if not any(map(is_recorded, entry.tensors))]


def _entries() -> Iterator[_Entry]:
    """The entries of all caches that have tensors in them."""
    for cache in [found for found in gc.get_objects() if type(found) is _CACHE]:
        parts = gc.get_referents(cache)
        table = next((part for part in parts if type(part) is dict and part is not vars(cache)), None)
        if table is None or cache.cache_parameters()["maxsize"] is not None:
            if tensors := list(_tensors(parts, _DEPTH)):
                yield _Entry(tensors, cache.cache_clear, lambda: None)
            continue
        for key, value in list(table.items()):
            if tensors := list(_tensors([value], _DEPTH)):
                remove = functools.partial(table.pop, key, None)
                yield _Entry(tensors, remove, functools.partial(table.setdefault, key, value))


def _tensors(items: Iterable[Any], depth: int) -> Iterator[torch.Tensor]:
    """The tensors among *items* and in tuples, lists and dicts of them."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif depth and type(item) in (tuple, list, dict):
            yield from _tensors(item.values() if type(item) is dict else item, depth - 1)
