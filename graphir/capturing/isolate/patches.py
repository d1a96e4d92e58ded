"""Attributes of torch's classes and modules, replaced for some who ask for them, and unchanged for everybody else.

A class or module belongs to the whole process. So a descriptor takes the place of an attribute, and looks at each
access who asks: another thread gets the very object that was there before. ::

    x.to ──▶ _Choice.__get__ ──┬─ in a thread that records a step: what that put there
                               └─ in every other thread: torch's own
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple

from ...process import fork_waits_for

__all__ = ["LOCK", "here", "replaced", "unpatched"]


class _Replacement(NamedTuple):
    """The value of an attribute where *applies* is true of the object that is asked for it (None: the class itself)."""

    applies: Callable[[object], bool]
    value: object


class _Choice:
    """A descriptor in the place of a class's attribute *name*: a replacement that applies, or the original.

    Attributes:
        replacements: the last one that applies counts.
        before: the original, as the class that defines it holds it.
        inherited: whether another class than the owner defines the original.
    """

    def __init__(self, owner: type, name: str) -> None:
        self.replacements: list[_Replacement] = []
        self.before: Any = next(vars(base)[name] for base in owner.__mro__ if name in vars(base))
        self.inherited = name not in vars(owner)

    def _now(self, instance: object) -> Any:
        for replacement in reversed(self.replacements):
            if replacement.applies(instance):
                return replacement.value
        return self.before

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        found = self._now(instance)
        bind = getattr(type(found), "__get__", None)
        return found if bind is None else bind(found, instance, owner)


class _DataChoice(_Choice):
    """A choice for an attribute that can be set, or hides an entry of the instance's own table: a property."""

    def __set__(self, instance: object, value: object) -> None:
        found = self._now(instance)
        type(found).__set__(found, instance, value)

    def __delete__(self, instance: object) -> None:
        found = self._now(instance)
        type(found).__delete__(found, instance)


class _ModuleChoice:
    """A choice for an attribute of a module: a property of the class that the module has meanwhile."""

    def __init__(self, owner: ModuleType, name: str) -> None:
        self.replacements: list[_Replacement] = []
        self._table, self._name = vars(owner), name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        for replacement in reversed(self.replacements):
            if replacement.applies(None):
                return replacement.value
        if self._name not in self._table:
            raise AttributeError(self._name)  # Python then asks the module's class, as it did before
        return self._table[self._name]

    def __set__(self, instance: object, value: object) -> None:
        self._table[self._name] = value

    def __delete__(self, instance: object) -> None:
        del self._table[self._name]


def unpatched(value: object) -> object:
    """An attribute of a class as everybody else sees it: the original, if the attribute is replaced."""
    return value.before if isinstance(value, _Choice) else value


LOCK: Final = threading.RLock()
"""Held while attributes change."""
_choices: Final[dict[tuple[int, str], _Choice | _ModuleChoice]] = {}
"""The choices in place, by the ``id`` of the owner and the name."""
_classes: Final[dict[int, type[ModuleType]]] = {}
"""The original classes of modules that have another class now, by the module's ``id``."""


def here() -> Callable[[object], bool]:
    """A function that says whether this thread, which calls ``here``, asks for an attribute."""
    ident, current = threading.get_ident(), threading.get_ident

    def applies(instance: object) -> bool:
        return current() == ident

    return applies


@contextlib.contextmanager
def replaced(
    owner: type | ModuleType, attributes: Mapping[str, object], applies: Callable[[object], bool] | None = None
) -> Iterator[None]:
    """While this is active, the class or module *owner* has these attributes wherever *applies* is true.

    Contexts of several threads may overlap in any order; of the contexts that apply, the one entered last counts.

    Args:
        owner: has the attributes; a class may inherit them.
        attributes: the new ones, by name.
        applies: is given the instance, None for the class or module itself; by default true in this thread alone.
    """
    made = [(name, _Replacement(applies or here(), value)) for name, value in attributes.items()]
    fork_waits_for(LOCK)
    with LOCK:
        for name, replacement in made:
            _choice(owner, name).replacements.append(replacement)
    try:
        yield
    finally:
        with LOCK:
            for name, replacement in made:
                choice = _choices[id(owner), name]
                choice.replacements = [other for other in choice.replacements if other is not replacement]
                if not choice.replacements:
                    _remove(owner, name)


def _choice(owner: type | ModuleType, name: str) -> _Choice | _ModuleChoice:
    """The choice in the place of an attribute, put there if there is none."""
    found = _choices.get((id(owner), name))
    if found is not None:
        return found
    if isinstance(owner, ModuleType):
        if id(owner) not in _classes:
            _classes[id(owner)] = type(owner)
            owner.__class__ = type(type(owner).__name__, (type(owner),), {})
        made: _Choice | _ModuleChoice = _ModuleChoice(owner, name)
        setattr(type(owner), name, made)
    else:
        made = _Choice(owner, name)
        if hasattr(type(made.before), "__set__"):
            made = _DataChoice(owner, name)
        setattr(owner, name, made)
    _choices[id(owner), name] = made
    return made


def _remove(owner: type | ModuleType, name: str) -> None:
    """Put the original of an attribute back in its place."""
    choice = _choices.pop((id(owner), name))
    if isinstance(choice, _ModuleChoice):
        delattr(type(owner), name)
        if not any(key == id(owner) for key, _ in _choices):
            owner.__class__ = _classes.pop(id(owner))
    elif choice.inherited:
        delattr(owner, name)
    else:
        setattr(owner, name, choice.before)
