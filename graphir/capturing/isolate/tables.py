"""Tables of a module's parameters and buffers that hold fakes for the thread that records, and the tensors for others.

``module._parameters`` is a dict that anybody may read at any time: an optimizer, a thread that saves a checkpoint. ::

    module._parameters ──▶ Table ──┬─ the thread that records ──▶ a dict of its own, with fakes
                                   └─ every other thread ───────▶ the module's own dict
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Table"]

_Tensors: TypeAlias = dict[str, torch.Tensor | None]


class Table(dict[str, Any]):
    """Stands in the place of a dict, and is that for all threads but the one that makes it.

    What code in C reads without asking is a copy of the dict.

    Args:
        own: the dict.
        mine: what this thread finds instead.
    """

    def __init__(self, own: _Tensors, mine: _Tensors) -> None:
        super().__init__(own)
        self._own, self._mine, self._thread = own, mine, threading.get_ident()

    def release(self) -> None:
        """Be the dict for all threads: some may hold this table longer than it stands in its place."""
        self._mine = self._own

    def _now(self) -> _Tensors:
        return self._mine if threading.get_ident() == self._thread else self._own

    def __getitem__(self, key: str) -> Any:
        return self._now()[key]

    def __contains__(self, key: object) -> bool:
        return key in self._now()

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Any:
        return iter(self._now())

    def __reversed__(self) -> Any:
        return reversed(self._now())

    def __eq__(self, other: object) -> bool:
        return self._now() == (other._now() if isinstance(other, Table) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self._now())

    def __reduce_ex__(self, protocol: object) -> Any:
        return dict, (dict(self._now()),)

    def __or__(self, other: Any) -> Any:
        return self._now() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._now()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def get(self, key: str, default: Any = None) -> Any:
        return self._now().get(key, default)

    def keys(self) -> Any:
        return self._now().keys()

    def values(self) -> Any:
        return self._now().values()

    def items(self) -> Any:
        return self._now().items()

    def copy(self) -> Any:
        return self._now().copy()

    # What changes it.

    def __setitem__(self, key: str, value: Any) -> None:
        self._change(lambda table: table.__setitem__(key, value))

    def __delitem__(self, key: str) -> None:
        self._change(lambda table: table.__delitem__(key))

    def pop(self, *args: Any) -> Any:
        return self._change(lambda table: table.pop(*args))

    def popitem(self) -> Any:
        return self._change(lambda table: table.popitem())

    def clear(self) -> None:
        self._change(lambda table: table.clear())

    def setdefault(self, key: str, default: Any = None) -> Any:
        return self._change(lambda table: table.setdefault(key, default))

    def update(self, *others: Any, **named: Any) -> None:
        self._change(lambda table: table.update(*others, **named))

    def _change(self, change: Callable[[_Tensors], Any]) -> Any:
        now = self._now()
        result = change(now)
        if now is self._own:
            super().clear()
            super().update(now)
        return result
