"""Modules whose state compiled steps have moved on, while the modules have what they had: their forward warns once."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import TrainingWarning, warn

__all__ = ["Behind"]


class Behind:
    """Whether some modules are behind the steps of one compiled model; a hook on each asks.

    Args:
        modules: the outermost ones.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._modules = tuple([weakref.ref(module) for module in modules])
        self._steps, self._told = False, False
        for module in self._alive():
            users = _users.setdefault(module, weakref.WeakSet())
            if not users:
                _handles[module] = module.register_forward_pre_hook(_ask)
            users.add(self)

    def moved_on(self) -> None:
        """Note a step."""
        self._steps = True

    def caught_up(self) -> None:
        """Note that the modules have the state that steps have made."""
        self._steps = False

    def end(self) -> None:
        """Ask no longer."""
        for module in self._alive():
            users = _users.get(module, weakref.WeakSet())
            users.discard(self)
            if not users and module in _handles:
                _handles.pop(module).remove()

    def tell(self, module: torch.nn.Module) -> None:
        """Warn, once, that *module* runs; not of a capture, which runs it on fakes."""
        if self._steps and not self._told and not isinstance(next(module.parameters(), None), FakeTensor):
            self._told = True
            warn(
                "the module runs with the parameters that it had before the compiled steps, which have state of their "
                "own: call write_back() of what graphir.compile returned, or use its lent()",
                TrainingWarning,
            )

    def _alive(self) -> list[torch.nn.Module]:
        return [module for module in (reference() for reference in self._modules) if module is not None]


_users: Final[weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[Behind]]] = weakref.WeakKeyDictionary()
_handles: Final[weakref.WeakKeyDictionary[torch.nn.Module, Any]] = weakref.WeakKeyDictionary()


class _Ask:
    """The hook: of a copy of a module nobody is told. What is pickled needs no graphir: it hands on the inputs."""

    def __call__(self, module: torch.nn.Module, inputs: object) -> None:
        for user in tuple(_users.get(module, ())):
            user.tell(module)

    def __deepcopy__(self, memo: object) -> _Ask:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ({}, "get")


_ask: Final = _Ask()
