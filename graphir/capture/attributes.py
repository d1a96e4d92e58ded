"""What modules keep besides parameters and buffers: a step that changes it is noticed, and all of it put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ..errors import CaptureError
from .refusals import where

__all__ = ["Attributes"]

_Container: TypeAlias = "list[Any] | dict[Any, Any] | set[Any] | deque[Any]"

_CONTAINERS: Final = (list, dict, set, deque)
_HOLDERS: Final = (*_CONTAINERS, tuple)
_TABLES: Final = frozenset({"_parameters", "_buffers"})
"""Attributes of every module that hold its tensors, not attributes of its author's."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_KNOWN: Final = (*_PLAIN, *_CONTAINERS, tuple, torch.Tensor)
"""Values that can be told apart; of other objects one can't see whether they mean the same."""


class _Held(NamedTuple):
    """A container that an attribute holds, itself or through other containers, and what was in it."""

    attribute: str
    container: _Container
    contents: list[Any]


class Attributes:
    """The attributes of a module as they are now, with the contents of lists, dicts, sets and deques among them.

    Args:
        path: of the module in the model.
        module: the module.
    """

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        self._path, self._table = path, module.__dict__
        self._before = dict(module.__dict__)
        seen: set[int] = set()
        self._held = [
            held
            for name, value in self._before.items()
            if isinstance(value, _HOLDERS) and name not in _TABLES
            for held in _inside(name, value, seen)
        ]

    def changed(self, fakes: Mapping[int, torch.Tensor]) -> CaptureError | None:
        """The complaint about a private attribute that is, or holds, another value than before; None where none does.

        Those may be a part of the module's setting itself up, as hooks are.

        Args:
            fakes: what stood for a tensor in the step, by the tensor's ``id``; the same as that tensor.

        Raises:
            CaptureError: the complaint, where the attribute is public, or its new value has tensors of the step.
        """
        for name in dict.fromkeys([*self._before, *self._table]):
            old, new = self._before.get(name), self._table.get(name)
            if not _same(old, new, fakes):
                return _complaint(f"the attribute {name!r}", name, new, self._path)
        for held in self._held:
            contents = _contents(held.container)
            if not _same(held.contents, contents, fakes):
                return _complaint(f"what the attribute {held.attribute!r} holds", held.attribute, contents, self._path)
        return None

    def restore(self) -> None:
        """Put everything back."""
        self._table.clear()
        self._table.update(self._before)
        for held in self._held:
            _fill(held.container, held.contents)


def _complaint(what: str, name: str, value: Any, path: str) -> CaptureError:
    error = CaptureError(
        f"the step changes {what}, which a program would not do",
        where=where(path),
        fix="keep it in a buffer and update that in place, or don't store it on the module",
    )
    if not name.startswith("_") or _has_tensor(value):
        raise error
    return error


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _inside(attribute: str, value: Any, seen: set[int]) -> Iterator[_Held]:
    if not isinstance(value, _HOLDERS) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, _CONTAINERS):
        yield _Held(attribute, value, _contents(value))
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, _HOLDERS):
            yield from _inside(attribute, item, seen)


def _contents(container: _Container) -> list[Any]:
    """A dict's pairs, another container's items; a set's in the order in which the set gives them."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def _fill(container: _Container, contents: list[Any]) -> None:
    if len(contents) == len(container) and all(map(is_, _contents(container), contents)):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def _same(old: Any, new: Any, fakes: Mapping[int, torch.Tensor]) -> bool:
    if old is new or not (isinstance(old, _KNOWN) and isinstance(new, _KNOWN)):
        return True
    if isinstance(old, torch.Tensor):
        return fakes.get(id(old)) is new
    if type(old) is not type(new):
        return False
    if isinstance(old, dict) and isinstance(new, dict):
        return _same(list(old.items()), list(new.items()), fakes)
    if isinstance(old, (list, tuple, deque)) and isinstance(new, (list, tuple, deque)):
        return len(old) == len(new) and all(_same(a, b, fakes) for a, b in zip(old, new, strict=True))
    return bool(old == new)
