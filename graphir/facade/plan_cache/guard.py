"""Whether a module is still what a plan was captured from: asked before each call, so it has to be quick."""

from __future__ import annotations

import random
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, Final

import numpy
import torch
from torch.nn.modules.module import _has_any_global_hook

from .inventory import VALUES, Inventory, ModuleChange, is_dense, is_same

__all__ = ["ModuleGuard"]

_CODE: Final = attrgetter("__code__")
_DEFAULTS: Final = attrgetter("__defaults__")
_KEYWORD_DEFAULTS: Final = attrgetter("__kwdefaults__")
_NEEDS_GRADIENT: Final = attrgetter("requires_grad")
_HOOKS: Final = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_NO_HOOKS: Final = (None, None)
_MOVING: Final = (Iterator, random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)


class ModuleGuard:
    """Remembers all parts of a module as they are now.

    A call asks :meth:`unchanged`, which compares objects by identity and lets numbers and text be set anew. Where it
    says no, :meth:`holds` makes a new inventory and compares that part by part. Functions of torch's own classes may be
    others, but what is in them is not looked at in each call: of most modules these are the most.

    Args:
        roots, left_out, in_place: as of :class:`.inventory.Inventory`.

    Attributes:
        changes: why the guard was made, where another one of the module did not hold any more.
        modules: every module once.
    """

    def __init__(self, roots: Mapping[str, Any], left_out: Container[Hashable] = (), in_place: bool = False) -> None:
        self._roots, self._left_out, self._in_place = roots, left_out, in_place
        self.changes: Sequence[ModuleChange] = ()
        self._take(Inventory(roots, left_out, in_place))

    def _take(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self.modules = inventory.modules
        self._sized = [*(table for table, _ in inventory.instances), *inventory.mappings, *inventory.sequences]
        self._tensors = [*inventory.own.values(), *inventory.plain]
        self._types = list(map(type, inventory.typed))
        self._sizes = list(map(len, self._sized))
        self._functions = [function for function in inventory.functions if not _is_torchs(function)]
        self._values, self._names = self._compared()
        self._copies = [read() for read in inventory.copied]
        self._dense = list(filter(is_dense, self._tensors))
        self._aliases = [tensor.detach() for tensor in self._dense]
        self._requires_grad = list(map(_NEEDS_GRADIENT, self._tensors))
        root = vars(self._roots[""])
        own = {id(table) for table in root.values() if isinstance(table, dict)}
        self._inner_hooks = [table for table in inventory.hooks if id(table) not in own]

    def _compared(self) -> tuple[list[Any], list[Any]]:
        """What is compared by identity now, and the names of entries of dicts."""
        inventory = self._inventory
        values: list[Any] = []
        names: list[Any] = []
        for table, read in inventory.instances:
            values += read(table)
        for mapping in inventory.mappings:
            values += mapping.values()
            names += mapping
        for sequence in inventory.sequences:
            values += sequence
        for part in (_CODE, _DEFAULTS, _KEYWORD_DEFAULTS):
            values += map(part, self._functions)
        return values, names

    def unchanged(self) -> bool:
        """Whether every part is the same object as before, or a value equal to that. If not, :meth:`holds` may yet."""
        inventory = self._inventory
        try:
            if list(map(len, self._sized)) != self._sizes or list(map(type, inventory.typed)) != self._types:
                return False
            values, names = self._compared()
        except (KeyError, RuntimeError):  # an attribute has gone, or goes or comes in another thread right now
            return False
        return (
            (all(map(is_, values, self._values)) or self._set_anew(values))
            and names == self._names
            and not any(inventory.empty)
            and all(map(torch.Tensor.is_set_to, self._dense, self._aliases))
            and list(map(_NEEDS_GRADIENT, self._tensors)) == self._requires_grad
            and (self._in_place or not any(map(_is_hooked, inventory.own.values())))
            and [read() for read in inventory.copied] == self._copies
        )

    def _set_anew(self, values: list[Any]) -> bool:
        """Whether parts that are other objects are equal numbers and text; they are remembered, then."""
        if len(values) != len(self._values) or not all(
            before is now or (isinstance(now, VALUES) and is_same(before, now))
            for before, now in zip(self._values, values, strict=True)
        ):
            return False
        self._values = values
        return True

    def holds(self) -> bool:
        """Whether no part has changed."""
        return self.unchanged() or self.accepts(ModuleGuard(self._roots, self._left_out, self._in_place))

    def accepts(self, other: ModuleGuard) -> bool:
        """Whether no part is another one in another guard of the module; if so, its objects are remembered."""
        if next(self.changes_to(other), None) is not None:
            return False
        self.take(other)
        return True

    def take(self, other: ModuleGuard) -> None:
        """Remember the parts that another guard of the module has."""
        self._take(other._inventory)

    def changes_to(self, other: ModuleGuard) -> Iterator[ModuleChange]:
        """The parts that are others in another guard of the module."""
        return self._inventory.changes_to(other._inventory)

    def has_tensors_of(self, other: ModuleGuard) -> bool:
        """Whether the parameters and buffers that plans run on are those of another guard of the module."""
        ours, theirs = (guard._own_memory() for guard in (self, other))
        return ours.keys() == theirs.keys() and all(ours[key].is_set_to(theirs[key]) for key in ours)

    def _own_memory(self) -> dict[int, torch.Tensor]:
        own = self._inventory.own
        pairs = zip(self._dense, self._aliases, strict=True)
        return {id(tensor): alias for tensor, alias in pairs if id(tensor) in own}

    @property
    def plain(self) -> list[torch.Tensor]:
        """Tensors that are attributes, and neither parameters nor buffers."""
        return self._inventory.plain

    def moving(self) -> list[str]:
        """The names of generators and iterators that are attributes: what reads one moves it on, and it is the same."""
        return [name for name, part in self._inventory.parts.items() if isinstance(part, _MOVING)]

    def hooks_inside(self) -> list[Any]:
        """The hooks of the modules inside of the module, and what says how to call them, where plans run in place."""
        return [hook for table in self._inner_hooks if table for hook in table.values()]

    def hooked(self) -> bool:
        """Whether a module has hooks, or all have, where plans run in place."""
        return any(self._inventory.hooks) or _has_any_global_hook()


def _is_torchs(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def _is_hooked(tensor: torch.Tensor) -> bool:
    return _HOOKS(tensor) != _NO_HOOKS
