"""Whether a module is still what a plan was captured from: asked before each call, so it has to be quick."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.modules.module import _has_any_global_hook

from .calls import Unfit

__all__ = ["ModuleGuard"]

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES: Final = ("_parameters", "_buffers", "_modules")
_INTERNAL: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; of these only the tables, the hooks and ``training`` matter to a call."""
_CONTAINERS: Final = (list, dict, set, deque)
_SCALARS: Final = (bool, int, float, complex, str, bytes, type(None))


class ModuleGuard:
    """Remembers the modules, parameters, buffers and plain attributes that a module has now.

    Attributes are compared by identity; numbers and text that were set anew, by value; lists, dicts and sets, by what
    is in them; tensors that are plain attributes, by their versions. What is neither (a global, a closure, an object's
    own attributes) is not seen, as by a capture.

    Args:
        model: the module.

    Raises:
        Unfit: nobody can tell whether the module has changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        tables = [vars(m) for m in modules]
        tables += [table for m in modules for name in _TABLES if (table := vars(m)[name])]
        self._modules, self._types = modules, list(map(type, modules))
        self._tables = tables
        self._values = [list(table.values()) for table in tables]
        self._ids = [list(map(id, values)) for values in self._values]
        self._hooks = [vars(m)[name] for m in modules for name in _HOOKS]
        self._params = list(dict.fromkeys(p for m in modules for p in (*_own(m, "_parameters"), *_own(m, "_buffers"))))
        self._aliases = [p.detach() for p in self._params]
        self._requires_grad = [p.requires_grad for p in self._params]
        self._containers: list[tuple[Any, Any]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._own = frozenset(map(id, self._params))  # which steps may write, also where a list has them, as in an LSTM
        for m in modules:
            for name, value in vars(m).items():
                if name not in _INTERNAL:
                    self._remember(value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) in self._own:
                return
            if value.is_inference():
                raise Unfit("a module keeps an inference tensor, whose changes nothing counts")
            self._versions.append((value, value._version))
            return
        if isinstance(value, _CONTAINERS):
            self._containers.append((value, _copied(value)))
        if isinstance(value, (*_CONTAINERS, tuple)):
            for item in value.values() if isinstance(value, dict) else value:
                self._remember(item)

    def hooked(self) -> bool:
        """Whether a module has hooks, or all have."""
        return any(self._hooks) or _has_any_global_hook()

    def holds(self) -> bool:
        """Whether nothing has changed that was remembered."""
        if list(map(type, self._modules)) != self._types:
            return False
        for i, (table, ids) in enumerate(zip(self._tables, self._ids, strict=True)):
            if list(map(id, table.values())) != ids and not self._equal(i):
                return False
        return (
            all(map(torch.Tensor.is_set_to, self._params, self._aliases))
            and [p.requires_grad for p in self._params] == self._requires_grad
            and all(tensor._version == version for tensor, version in self._versions)
            and all(_same(value, before) for value, before in self._containers)
        )

    def _equal(self, i: int) -> bool:
        """Whether attributes that were set anew have the values that they had; they are remembered, then."""
        values, before = list(self._tables[i].values()), self._values[i]
        if len(values) != len(before):
            return False
        if not all(a is b or (isinstance(a, _SCALARS) and _same(a, b)) for a, b in zip(values, before, strict=True)):
            return False
        self._values[i], self._ids[i] = values, list(map(id, values))
        return True


def _own(module: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    return (tensor for tensor in vars(module)[name].values() if tensor is not None)


def _copied(value: Any) -> Any:
    """A copy of containers within containers; what they hold is the same."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple, deque):
        return type(value)(map(_copied, value))
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _same(value: Any, before: Any) -> bool:
    """Whether a value is the one before, or has equal numbers, text and containers."""
    if value is before:
        return True
    if type(value) is not type(before):
        return False
    if isinstance(value, dict):
        return value.keys() == before.keys() and all(_same(value[key], before[key]) for key in value)
    if isinstance(value, (list, tuple, deque)):
        return len(value) == len(before) and all(map(_same, value, before))
    return isinstance(value, (*_SCALARS, set)) and bool(value == before)
