"""What modules keep besides parameters and buffers: a step that changes it is noticed, and all of it put back."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from operator import is_
from types import BuiltinMethodType, MemberDescriptorType, MethodType, MethodWrapperType, SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError, nearest
from ...ir.geometry import geometry_of
from ..words.libraries import Outside
from ..words.places import Broken, where

__all__ = [
    "TABLES",
    "AllowedChanges",
    "Attributes",
    "Change",
    "attributes_of",
    "fields",
    "has_fields",
    "is_pythons",
    "is_users",
    "is_written_in_python",
    "names_of_attributes",
    "settled",
]

_CONTAINERS: Final = (list, dict, set, deque)
TABLES: Final = ("_parameters", "_buffers")
"""Attributes of every module that hold its tensors, not attributes of its author's."""
_BUFFERS: Final = (bytearray, array)
_METHODS: Final = (MethodType, BuiltinMethodType, MethodWrapperType)
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_HOLDERS: Final = (SimpleNamespace, Namespace, UserDict, UserList, ChainMap, threading.local)
"""Classes of Python's own whose objects hold what a user puts there."""
_TORCHS: Final = ("torch.distributions.", "torch.nn.")
"""Where torch's classes are whose objects have attributes like those of users' classes."""
_KNOWN: Final = (*_PLAIN, *_CONTAINERS, tuple, torch.Tensor)
"""Types whose values can be compared. Whether two other objects mean the same can't be seen."""


class AllowedChanges:
    """Attributes that a step may change, because they only keep books: ``counter``, ``layers.0.counter``.

    Args:
        model: the module.
        names: of the attributes, after the paths of their modules.

    Attributes:
        changed: all that the step has changed, in these ways or in one that leaves the next step the same: attributes
            of modules by name; those of objects, entries of dicts and items of lists by the holder's ``id`` and their
            name, key or position; other containers by ``id``; with the holder, so that nothing else gets its ``id``.

    Raises:
        CaptureError: a name is of nothing that the step could change.
    """

    def __init__(self, model: torch.nn.Module, names: Iterable[str]) -> None:
        if isinstance(names, str):
            raise CaptureError("allow_changes is a str, not a tuple", fix=f"write allow_changes=({names!r},)")
        self._names = tuple(names)
        modules = dict(model.named_modules())
        self._known = names_of_attributes(model)
        self._unseen = [name for name in self._names if name not in self._known]
        self.changed: dict[Hashable, object] = {}
        for name in self._unseen:
            if name.rpartition(".")[0] not in modules:
                raise self._unknown(name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def saw(self, name: str) -> None:
        """Note that the step made the attribute *name*."""
        self._unseen = [other for other in self._unseen if other != name]

    def check(self) -> None:
        """Raise where a name is of an attribute that neither was there nor was made.

        Raises:
            CaptureError: gives the nearest names.
        """
        for name in self._unseen:
            raise self._unknown(name)

    def _unknown(self, name: object) -> CaptureError:
        return CaptureError(
            f"allow_changes: {name!r} is no attribute that the step could change{nearest(name, self._known)}",
            fix="name plain attributes of modules by their paths, such as layers.0.counter",
        )


def names_of_attributes(model: torch.nn.Module) -> list[str]:
    """The attributes that the authors of a model's modules gave these, after the paths of the modules."""
    plain = torch.nn.Module().__dict__
    modules = model.named_modules()
    return [f"{path}.{key}" if path else key for path, m in modules for key in m.__dict__ if key not in plain]


class Change(NamedTuple):
    """A change of an attribute that may be harmless: running the step once more shows whether it is.

    Attributes:
        attribute: its name, after the path of its module.
        complaint: the error to raise where it is not.
        left: whether the attribute holds tensors of the step now, as weight normalisation leaves its weight there.
        value: what the attribute holds now.
    """

    attribute: str
    complaint: Broken
    left: bool
    value: Any


def settled(first: Iterable[Change], second: Iterable[Change]) -> bool:
    """Whether a second step changed nothing but what it left, as the first had left it."""
    before = {change.attribute: change.value for change in first}
    return all(c.left and c.attribute in before and _alike(before[c.attribute], c.value) for c in second)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are of one structure, their tensors of one geometry, and everything else equal."""
    leaves, spec = pytree.tree_flatten(a)
    others, other_spec = pytree.tree_flatten(b)
    return spec == other_spec and all(
        geometry_of(x) == geometry_of(y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else type(x) is type(y) and (x is y or (isinstance(x, _PLAIN) and x == y))
        for x, y in zip(leaves, others, strict=True)
    )


class _Held(NamedTuple):
    """A container that an attribute holds, itself or through other containers, and what was in it.

    Attributes:
        attribute: of the module.
        private: whether that attribute is private, or one of an object on the way to the container.
        container: itself.
        contents: as :func:`_contents` gives them.
    """

    attribute: str
    private: bool
    container: Any
    contents: list[Any]


class Attributes:
    """The attributes of a module as they are now, with the contents of lists, dicts, sets and deques among them.

    Args:
        path: of the module in the model.
        module: the module.
        allowed: attributes that may change.
    """

    def __init__(self, path: str, module: torch.nn.Module, allowed: AllowedChanges) -> None:
        self._path, self._table, self._allowed = path, module.__dict__, allowed
        self._before = dict(module.__dict__)
        seen: set[int] = set()
        self._held: list[_Held] = []
        for name, value in self._before.items():
            if isinstance(value, _PLAIN) or name in TABLES:
                continue
            if isinstance(value, dict) and not value:  # as most are: the tables of hooks
                self._held.append(_Held(name, name.startswith("_"), value, []))
            else:
                self._held += _inside(name, name.startswith("_"), value, seen)

    def changed(self, fakes: Mapping[int, torch.Tensor]) -> list[Change]:
        """The changes that may be harmless: of private attributes, where modules set themselves up (hooks are there);
        of attributes of objects, if they are private or were None; and of those that hold tensors of the step now.

        Args:
            fakes: the fake that stood for each tensor in the step, by the tensor's ``id``; it counts as that tensor.

        Raises:
            Broken: another attribute is, or holds, another value than before.
        """
        changes: list[Change] = []
        table = self._table
        before = {name: table.get(name) if name in TABLES else old for name, old in self._before.items()}
        names = () if _is_untouched(table, _contents(before)) else dict.fromkeys([*before, *table])
        for name in names:
            old, new = before.get(name), table.get(name)
            if _same(old, new, fakes):
                continue
            self._allowed.changed[self._whole(name)] = None
            if not self._may_change(name):
                private, left = name.startswith("_"), _has_tensor(new)
                changes.append(self._change(f"the attribute {name!r}", name, new, private, left))
        for attribute, private, container, contents in self._held:
            if _is_untouched(container, contents):
                continue
            now = _contents(container)
            if _same(contents, now, fakes):
                continue
            self._allowed.changed |= dict.fromkeys(_altered_in(container, contents, now, fakes), container)
            if not self._may_change(attribute):
                what = f"what the attribute {attribute!r} holds"
                if is_users(container):
                    set_up, now = _altered(contents, now, fakes)
                    private = private or set_up
                changes.append(self._change(what, attribute, now, private, left=False))
        return changes

    def _may_change(self, name: str) -> bool:
        whole = self._whole(name)
        self._allowed.saw(whole)
        return whole in self._allowed

    def _whole(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _change(self, what: str, name: str, value: Any, private: bool, left: bool) -> Change:
        whole = self._whole(name)
        refused = not left and (not private or _has_tensor(value))
        error = Broken(
            f"{'module' if refused else 'private'} {self._path}",
            f"the step changes {what}, which a program would not do",
            where=where(self._path),
            fix=Outside(
                "keep it in a buffer and update that in place, or don't store it on the module; if the first step "
                "alone changes it, run one before the capture; if nothing depends on it, pass "
                f"allow_changes=({whole!r},)"
            ),
        )
        if refused:
            raise error
        return Change(whole, error, left, value)

    def restore(self) -> None:
        """Put everything back."""
        _fill(self._table, _contents(self._before))
        for held in self._held:
            _fill(held.container, held.contents)


def attributes_of(model: torch.nn.Module, allowed: AllowedChanges) -> list[Attributes]:
    """Those of each module, in the order of ``model.named_modules()``."""
    return [Attributes(path, module, allowed) for path, module in model.named_modules()]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return any(_has_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def _inside(attribute: str, private: bool, value: Any, seen: set[int]) -> Iterator[_Held]:
    """The containers among *value* and what it holds, each once."""
    if isinstance(value, _PLAIN) or id(value) in seen or _is_global_generator(value):
        return
    through = isinstance(value, (tuple, partial, *_METHODS))
    holds = _holds(value)
    if not (through or holds):
        return
    seen.add(id(value))
    if holds:
        yield _Held(attribute, private, value, _contents(value))
    if isinstance(value, _METHODS):
        yield from _inside(attribute, private, value.__self__, seen)
    if isinstance(value, partial):
        for item in (value.func, value.args, value.keywords):
            yield from _inside(attribute, private, item, seen)
    if isinstance(value, (*_CONTAINERS, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(attribute, private, item, seen)
    elif is_users(value):
        for key, item in fields(value).items():
            yield from _inside(attribute, private or key.startswith("_"), item, seen)


def _holds(value: Any) -> bool:
    """Whether *value* has contents that may change while it stays the same object."""
    known = (*_CONTAINERS, *_BUFFERS, random.Random, itertools.count)
    return isinstance(value, known) or _is_numpys(value) or is_users(value)


def is_users(value: Any) -> bool:
    """Whether *value* is an object of a class that a user or a library wrote, so that its attributes say what it is."""
    others = (torch.nn.Module, torch.Tensor, type, random.Random, tuple, *_CONTAINERS, *_BUFFERS)
    return not (isinstance(value, others) or _is_numpys(value)) and has_fields(value)


def has_fields(value: Any) -> bool:
    """Whether *value* may have attributes that a user or a library gave it, whatever else it is."""
    if not (hasattr(value, "__dict__") or _slots(value)):
        return False
    return isinstance(value, _HOLDERS) or is_written_in_python(type(value))


def is_written_in_python(cls: type) -> bool:
    """Whether a class is a user's or a library's, or one of torch's that are like these."""
    if cls.__module__.startswith(_TORCHS):
        return True
    return not (is_pythons(cls) or _package(cls) in ("torch", "numpy"))


def is_pythons(cls: type) -> bool:
    """Whether a class is Python's own or of its standard library."""
    return _package(cls) in sys.stdlib_module_names


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _is_numpys(value: Any) -> bool:
    """Whether *value* is a random generator of numpy's."""
    numpys = sys.modules.get("numpy.random")
    return numpys is not None and isinstance(value, (numpys.Generator, numpys.RandomState, numpys.BitGenerator))


def _is_global_generator(value: Any) -> bool:
    """Whether *value* is what ``random.random`` or ``numpy.random.rand`` draws from, which all threads share.

    Whether the step has changed that is asked elsewhere (:class:`.python_random.RandomState`).
    """
    return any(
        value is getattr(getattr(sys.modules.get(module), method, None), "__self__", sys)
        for module, method in (("random", "random"), ("numpy.random", "rand"))
    )


def _slots(value: Any) -> dict[str, MemberDescriptorType]:
    """What reads and writes the attributes that an object keeps in slots, by their names."""
    found: dict[str, MemberDescriptorType] = {}
    for cls in type(value).__mro__:
        if "__slots__" in cls.__dict__:
            found = {key: slot for key, slot in vars(cls).items() if isinstance(slot, MemberDescriptorType)} | found
    return found


def fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, whether in its dict or in slots; no code of its class runs."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for key, slot in _slots(value).items():
        with contextlib.suppress(AttributeError):  # nothing is in it
            found[key] = slot.__get__(value)
    return found


def _contents(container: Any) -> list[Any]:
    """What is in a container.

    Of a dict, and of an object of a user's class, which holds its attributes, the keys and then the values; the items
    of others, a set's in the order it gives; of bytes and arrays all bytes; of a random generator its state.
    """
    if isinstance(container, dict):
        return [*container, *container.values()]
    if isinstance(container, _CONTAINERS):
        return list(container)
    if isinstance(container, random.Random):
        return [container.getstate()]
    if isinstance(container, _BUFFERS):
        with memoryview(container) as view:
            return [view.tobytes()]
    if isinstance(container, itertools.count):
        return [itertools.count.__repr__(container)]
    if _is_numpys(container):
        state = _numpys_state(container)
        return [_in_python(state), state]
    return _contents(fields(container))


def _numpys_state(generator: Any) -> Any:
    if hasattr(generator, "get_state"):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _in_python(state: Any) -> Any:
    """A state of a random generator with its arrays as lists, which can be compared."""
    if isinstance(state, dict):
        return {key: _in_python(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _named(contents: list[Any]) -> dict[str, Any]:
    """An object's attributes from its contents."""
    half = len(contents) // 2
    return dict(zip(contents[:half], contents[half:], strict=True))


def _differing(contents: list[Any], others: list[Any], fakes: Mapping[int, torch.Tensor]) -> list[Any]:
    """The attributes of an object that are others than before."""
    old, new = _named(contents), _named(others)
    return [key for key in {**old, **new} if not (key in old and key in new and _same(old[key], new[key], fakes))]


def _altered_in(
    container: Any, contents: list[Any], others: list[Any], fakes: Mapping[int, torch.Tensor]
) -> list[Hashable]:
    """What of a container has changed, as :class:`AllowedChanges` calls it."""
    if isinstance(container, (list, deque)):
        both, either = sorted([len(contents), len(others)])
        return [(id(container), i) for i in range(either) if i >= both or not _same(contents[i], others[i], fakes)]
    if isinstance(container, dict) or is_users(container):
        return [(id(container), key) for key in _differing(contents, others, fakes)]
    return [id(container)]


def _altered(contents: list[Any], others: list[Any], fakes: Mapping[int, torch.Tensor]) -> tuple[bool, list[Any]]:
    """Whether all attributes of an object that changed are private or were None, and what they are now."""
    old, new = _named(contents), _named(others)
    changed = _differing(contents, others, fakes)
    set_up = all(key.startswith("_") or (key in old and old[key] is None) for key in changed)
    return set_up, [new[key] for key in changed if key in new]


def _is_untouched(container: Any, contents: list[Any]) -> bool:
    """Whether a container holds the very objects of *contents*, in that order."""
    if not contents and isinstance(container, _CONTAINERS):
        return not container
    now = _contents(container)
    if isinstance(container, (*_BUFFERS, itertools.count)):
        return contents == now
    return len(contents) == len(now) and all(map(is_, contents, now))


def _fill(container: Any, contents: list[Any]) -> None:
    """Give a container back what :func:`_contents` found in it."""
    if _is_untouched(container, contents):
        return
    if isinstance(container, random.Random):
        container.setstate(contents[0])
    elif isinstance(container, bytearray):
        container[:] = contents[0]
    elif isinstance(container, array):
        container[:] = array(container.typecode, contents[0])
    elif isinstance(container, itertools.count):
        contents[:] = _contents(container)  # nothing turns it back: what is noticed next is a further change
    elif _is_numpys(container):
        _set_numpys_state(container, contents[1])
    elif isinstance(container, dict):
        _fill_table(container, _named(contents))
    elif isinstance(container, list):
        container[:] = contents
    elif isinstance(container, (set, deque)):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(contents)
    else:
        _fill_fields(container, _named(contents))


def _set_numpys_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _fill_fields(value: Any, before: dict[str, Any]) -> None:
    """Give an object its attributes back; no code of its class runs."""
    slots = _slots(value)
    if hasattr(value, "__dict__"):
        _fill_table(vars(value), {key: item for key, item in before.items() if key not in slots})
    now = fields(value)
    for key, slot in slots.items():
        if key in before:
            slot.__set__(value, before[key])
        elif key in now:
            slot.__delete__(value)


def _fill_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    """Give a dict its items back; another thread finds those that had stayed there all the time."""
    table.update(before)
    for key in [key for key in table if key not in before]:
        del table[key]
    if list(table) != list(before):
        table.clear()
        table.update(before)


def _same(old: Any, new: Any, fakes: Mapping[int, torch.Tensor]) -> bool:
    """Whether two values are equal as far as one can see, a fake counting as the tensor that it stands for."""
    if old is new or not (isinstance(old, _KNOWN) or isinstance(new, _KNOWN)):
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
