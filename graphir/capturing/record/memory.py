"""The memory of a step under record: which tensors look at it, and what each of them shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch

from ...errors import CaptureError
from ..isolate.functions import Handlers
from ..words.places import where
from .values import Alias, Replay, Store, Value

__all__ = ["RecordedMemory"]

_aten: Final = torch.ops.aten


class RecordedMemory:
    """Every tensor that was seen, by identity, and every store, by its storage."""

    def __init__(self) -> None:
        self._aliases: dict[int, Alias] = {}
        self._stores: dict[int, Store] = {}

    def __iter__(self) -> Iterator[Alias]:
        """The aliases, in the order in which they were seen."""
        return iter(list(self._aliases.values()))

    def find(self, tensor: torch.Tensor) -> Alias | None:
        """The alias of a tensor that was seen before."""
        return self._aliases.get(id(tensor))

    def store(self, tensor: torch.Tensor) -> Store | None:
        """The store that a tensor looks at, if it is known."""
        return self._stores.get(tensor.untyped_storage()._cdata)

    def release(self) -> None:
        """Forget everything; aliases and stores refer to each other, so that the collector would have to find them."""
        for store in self._stores.values():
            del store.base
        self._stores.clear()
        self._aliases.clear()

    def exchanges(self) -> Handlers:
        """Of ``x.data = …``, which raises if that gives a tensor that was seen other memory.

        Raises:
            CaptureError: it does.
        """

        def exchange(set_data: Callable[..., None], tensor: torch.Tensor, other: torch.Tensor) -> None:
            set_data(tensor, other)
            alias = self.find(tensor)
            if alias is not None and alias.is_exchanged:
                raise _exchanged(alias)

        return {torch.Tensor.data.__set__: exchange}  # type: ignore[attr-defined]

    def check_unexchanged(self) -> None:
        """Raise where a tensor that was seen looks at other memory now.

        Raises:
            CaptureError: it was exchanged by other means than ``x.data = …``, or where nobody heard of it.
        """
        for alias in self:
            if alias.is_exchanged:
                raise _exchanged(alias)

    def add_base(self, tensor: torch.Tensor, value: Value, persistent: bool, shared: str = "") -> Store:
        """A tensor with memory of its own."""
        store = Store(tensor.untyped_storage(), persistent, shared)
        store.base = self._aliases[id(tensor)] = Alias(tensor, value, store)
        self._stores[store.key] = store
        return store

    def add_alias(
        self, tensor: torch.Tensor, value: Value, parent: Alias, replay: Replay | None, position: int = 0
    ) -> Alias:
        """A tensor that looks at the memory of *parent*."""
        alias = self._aliases[id(tensor)] = Alias(tensor, value, parent.store)
        alias.parent, alias.replay, alias.position = parent, replay, position
        return alias

    def set_aside(self, alias: Alias) -> Alias:
        """Put a new tensor in the place of one that is about to become a view of it::

        tensor ──▶ store             before ──▶ store
        view ────▶ tensor     ──▶    view ────▶ before
                                     tensor
        """
        tensor = alias.tensor
        before = _aten.detach.default(tensor)
        found = self.add_alias(before, alias.value, alias.parent or alias, alias.replay, alias.position)
        found.parent = alias.parent
        for other in self:
            if other.parent is alias:
                other.parent = found
                if other.replay is not None:
                    func, args, kwargs = other.replay
                    other.replay = func, tuple([before if arg is tensor else arg for arg in args]), kwargs
        alias.value.tensor = before
        if alias.store.base is alias:
            alias.store.base = found
        return found

    def alias(self, tensor: torch.Tensor, scope: str) -> Alias:
        """The alias of a tensor, which need not have been seen before if its memory was.

        Raises:
            CaptureError: its memory is unknown.
        """
        alias = self._aliases.get(id(tensor))
        if alias is not None:
            return alias
        store = self.store(tensor)
        if store is None:
            raise CaptureError(
                f"a tensor of shape {list(tensor.shape)} comes from nowhere that capture has seen",
                where=where(scope),
                fix="make it inside the step, pass it as an input, or register it as a buffer; write a loop for scan",
            )
        base = store.base
        alias = self.add_alias(tensor, base.value, base, None)
        if not alias.is_base:
            shape, strides, offset, *_ = alias.geometry
            alias.replay = (_aten.as_strided.default, (base.tensor, shape, strides, offset), {})
            alias.generation = -1
        return alias


def _exchanged(alias: Alias) -> CaptureError:
    value = alias.value
    what = f"{value.kind} {value.label!r}" if value.kind else f"what {value.label!r} made"
    return CaptureError(
        f"the step gives {what} other memory (.data = …), which no operator tells",
        fix="overwrite the values (x.copy_(value), under torch.no_grad() for a parameter), or make a new tensor",
    )
