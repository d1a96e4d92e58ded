"""Lists, dicts, sets, deques and the attributes of objects: their contents read, compared and put back."""

from __future__ import annotations

import sys
import threading
from argparse import Namespace
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any, Final

import torch

__all__ = [
    "CONTAINERS",
    "HOLDERS",
    "PLAIN",
    "altered_keys",
    "fields",
    "fill",
    "has_tensor",
    "is_pythons",
    "is_untouched",
    "is_written_in_python",
    "items_of",
    "named",
    "same",
]

CONTAINERS: Final = (list, dict, set, deque)
PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
HOLDERS: Final = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local)
"""Classes of Python's own whose objects hold what a user puts there."""
_TORCHS: Final = ("torch.distributions.", "torch.nn.")
"""Packages of torch with classes whose objects have attributes like those of users' classes."""
_KNOWN: Final = (*PLAIN, *CONTAINERS, tuple, torch.Tensor)
"""Types whose values can be compared. Two objects of other types count as the same."""


def fields(value: Any) -> dict[str, Any] | None:
    """The table of the attributes that a user or a library gave an object; None where the object has no such table."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type)) or not hasattr(value, "__dict__"):
        return None
    return vars(value) if isinstance(value, HOLDERS) or is_written_in_python(type(value)) else None


def is_written_in_python(cls: type) -> bool:
    """Whether a class is a user's or a library's, or one of torch's that is like a user's."""
    if cls.__module__.startswith(_TORCHS):
        return True
    return not (is_pythons(cls) or _package(cls) in ("torch", "numpy"))


def is_pythons(cls: type) -> bool:
    """Whether a class is Python's own or of its standard library."""
    return _package(cls) in sys.stdlib_module_names


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def items_of(container: Any) -> list[Any]:
    """The contents of a container, in its own order; of a dict the keys and then the values."""
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def named(contents: list[Any]) -> dict[Any, Any]:
    """The dict with these contents, as :func:`items_of` gives them."""
    half = len(contents) // 2
    return dict(zip(contents[:half], contents[half:], strict=True))


def altered_keys(container: Any, contents: list[Any], now: list[Any], fakes: Mapping[int, torch.Tensor]) -> list[Any]:
    """The keys of a dict, or the positions in a sequence, at which a container holds something else than before."""
    if isinstance(container, set):
        return []
    as_table = named if isinstance(container, dict) else lambda items: dict(enumerate(items))
    old, new = as_table(contents), as_table(now)
    return [key for key in {**old, **new} if not (key in old and key in new and same(old[key], new[key], fakes))]


def is_untouched(container: Any, contents: list[Any]) -> bool:
    """Whether a container holds the very objects of *contents*, in that order."""
    if not contents:
        return not container
    now = items_of(container)
    return len(contents) == len(now) and all(map(is_, contents, now))


def fill(container: Any, contents: list[Any]) -> None:
    """Give a container back what :func:`items_of` found in it."""
    if is_untouched(container, contents):
        return
    if isinstance(container, list):
        container[:] = contents
    elif isinstance(container, dict):
        _fill_table(container, named(contents))
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(contents)


def _fill_table(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dict its items back. Other threads find unchanged items there all the time, if the order is the same."""
    table.update(before)
    for key in [key for key in table if key not in before]:
        del table[key]
    if list(table) != list(before):
        table.clear()
        table.update(before)


def same(old: Any, new: Any, fakes: Mapping[int, torch.Tensor]) -> bool:
    """Whether two values are equal as far as they can be compared; a fake counts as the tensor that it stands for."""
    if old is new or not (isinstance(old, _KNOWN) or isinstance(new, _KNOWN)):
        return True
    if isinstance(old, torch.Tensor):
        return fakes.get(id(old)) is new
    if type(old) is not type(new):
        return False
    if isinstance(old, dict) and isinstance(new, dict):
        return same(list(old.items()), list(new.items()), fakes)
    if isinstance(old, (list, tuple, deque)) and isinstance(new, (list, tuple, deque)):
        return len(old) == len(new) and all(same(a, b, fakes) for a, b in zip(old, new, strict=True))
    return bool(old == new)


def has_tensor(value: Any) -> bool:
    """Whether a value is a tensor, or holds one."""
    if isinstance(value, dict):
        return any(has_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return any(has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)
