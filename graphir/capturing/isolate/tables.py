"""Tables of a module's parameters and buffers that hold fakes for the thread that records, and the tensors for others.

``module._parameters`` is a dict that anybody may read at any time: an optimizer, a thread that saves a checkpoint. ::

    module._parameters ──▶ Table ──┬─ the thread that records ──▶ a dict of its own, with fakes
                                   └─ every other thread ───────▶ the module's own dict
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch

__all__ = ["Table"]

_Tensors: TypeAlias = dict[str, torch.Tensor | None]


class Table(dict[str, Any]):
    """A stand-in for a dict, which shows that dict to all threads but the one that makes the stand-in.

    Each method is called on the dict that the asking thread sees. Code in C that calls no method reads a copy of the
    module's own dict.

    Args:
        own: the module's own dict.
        mine: the dict that this thread sees instead.
    """

    __hash__ = None

    def __init__(self, own: _Tensors, mine: _Tensors) -> None:
        super().__init__(own)
        self._own, self._mine, self._thread = own, mine, threading.get_ident()

    def release(self) -> None:
        """Show the module's own dict to all threads: some may hold this table longer than it is in place."""
        self._mine = self._own

    def _now(self) -> _Tensors:
        return self._mine if threading.get_ident() == self._thread else self._own

    def __eq__(self, other: object) -> bool:
        return self._now() == (other._now() if isinstance(other, Table) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(self._now()),)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # the other operators are among _METHODS
        self._now().update(other)
        return self


_METHODS: Final = (
    *("__getitem__", "__contains__", "__len__", "__iter__", "__reversed__", "__repr__", "__or__", "__ror__"),
    *("get", "keys", "values", "items", "copy"),
    *("__setitem__", "__delitem__", "pop", "popitem", "clear", "setdefault", "update"),
)


def _asking(name: str) -> Callable[..., Any]:
    def method(table: Table, *args: Any, **kwargs: Any) -> Any:
        return getattr(table._now(), name)(*args, **kwargs)

    return method


for _name in _METHODS:
    setattr(Table, _name, _asking(_name))
