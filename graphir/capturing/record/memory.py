"""The memory of a recorded step: which tensors look at it, and which value each tensor shows."""

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
    """The tensors that a recording has seen, by identity, and their stores, by storage."""

    def __init__(self) -> None:
        self._aliases: dict[int, Alias] = {}
        self._stores: dict[int, Store] = {}

    def __iter__(self) -> Iterator[Alias]:
        """The aliases, in the order in which they were seen."""
        return iter(list(self._aliases.values()))

    def find(self, tensor: torch.Tensor) -> Alias | None:
        """The alias of a tensor; None if the tensor was not seen before."""
        return self._aliases.get(id(tensor))

    def store(self, tensor: torch.Tensor) -> Store | None:
        """The store that a tensor looks at; None if its storage was not seen before."""
        return self._stores.get(tensor.untyped_storage()._cdata)

    def release(self) -> None:
        """Forget all aliases and stores. They refer to each other, so only the garbage collector would free them."""
        for store in self._stores.values():
            del store.base
        self._stores.clear()
        self._aliases.clear()

    def exchanges(self) -> Handlers:
        """The handler of ``x.data = …``, which refuses to give other memory to a tensor that was seen.

        Raises:
            CaptureError: by the handler, after the assignment.
        """

        def exchange(set_data: Callable[..., None], tensor: torch.Tensor, other: torch.Tensor) -> None:
            set_data(tensor, other)
            alias = self.find(tensor)
            if alias is not None and alias.is_exchanged:
                raise _exchanged(alias)

        return {torch.Tensor.data.__set__: exchange}  # type: ignore[attr-defined]

    def check_unexchanged(self) -> None:
        """Refuse a step that has given other memory to a tensor, past the handler of ``x.data = …``.

        Raises:
            CaptureError: a tensor that was seen looks at other memory now.
        """
        for alias in self:
            if alias.is_exchanged:
                raise _exchanged(alias)

    def add_base(self, tensor: torch.Tensor, value: Value, persistent: bool, shared: str = "") -> Store:
        """Add a tensor with memory of its own."""
        store = Store(tensor.untyped_storage(), persistent, shared)
        store.base = self._aliases[id(tensor)] = Alias(tensor, value, store)
        self._stores[store.key] = store
        return store

    def add_alias(
        self, tensor: torch.Tensor, value: Value, parent: Alias, replay: Replay | None, position: int = 0
    ) -> Alias:
        """Add a tensor that looks at the memory of *parent*."""
        alias = self._aliases[id(tensor)] = Alias(tensor, value, parent.store)
        alias.parent, alias.replay, alias.position = parent, replay, position
        return alias

    def set_aside(self, alias: Alias) -> Alias:
        """Let a new tensor take the place of a tensor that is about to become a view of it::

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
        """The alias of a tensor. A new tensor on memory that was seen before gets a new alias.

        Raises:
            CaptureError: the tensor's memory was not seen before.
        """
        alias = self._aliases.get(id(tensor))
        if alias is not None:
            return alias
        store = self.store(tensor)
        if store is None:
            raise CaptureError(
                f"the step reads a tensor of shape {list(tensor.shape)} whose origin capture has not seen",
                where=where(scope),
                fix="make the tensor in the step, pass it as an input, or register it as a buffer; write a loop in "
                "place of scan",
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
    what = f"{value.kind} {value.label!r}" if value.kind else f"the result of {value.label!r}"
    return CaptureError(
        f"the step gives {what} other memory (.data = …), and no operator records the change",
        fix="overwrite the values (x.copy_(value), under torch.no_grad() for a parameter), or make a new tensor",
    )
