"""What of a module a step may read: every part under the name by which a message calls it."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial, partialmethod
from itertools import chain
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple
from weakref import ProxyTypes

import numpy
import torch
from torch.nn.modules import module as torchs
from torch.nn.parameter import is_lazy

from ...capturing.isolate.containers import is_pythons, is_written_in_python
from ...capturing.isolate.patches import unpatched
from ...ir.tensor import PLAIN
from .objects import fields, has_fields

__all__ = ["VALUES", "Inventory", "ModuleChange", "is_dense", "is_same"]

_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES: Final = ("_parameters", "_buffers", "_modules")
_INTERNAL: Final = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; of these a step reads the tables, the hooks and ``training`` only."""
_GLOBAL_HOOKS: Final = tuple([f"_global{name}" for name in _HOOKS])
VALUES: Final = (
    *(bool, int, float, complex, str, bytes, type(None), range, slice, numpy.generic),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values are compared. Everything else is itself and nothing else."""
_LONGEST: Final = 40
"""Characters of a value that a message shows."""
_BUFFERS: Final = (bytearray, array, numpy.ndarray)
_WRAPPERS: Final = {
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    cached_property: ("func",),
    partialmethod: ("func", "args", "keywords"),
}
"""What a class holds around a function, and where the function is."""


AROUND: Final = "(around)"
"""The root that holds what a step function names: its cells, globals and defaults."""


class ModuleChange(NamedTuple):
    """One difference between a module now and earlier.

    Attributes:
        attribute: what is another one, such as ``layers.0.scale`` or ``Attention.forward``.
        now: its value where that is a number or text, as text; else empty.
        of_class: whether it is an attribute of a class.
        of_module: whether it is found in the module, not in what else a step calls.
    """

    attribute: str
    now: str
    of_class: bool
    of_module: bool

    def __str__(self) -> str:
        name, of = self.attribute.removeprefix(f"{AROUND}."), " of the module" if self.of_module else ""
        return f"{name!r}{of} {f'is {self.now} now' if self.now else 'has changed'}"


class _Memory:
    """The memory that a tensor shows: its storage, and where and how."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias, self.dtype = tensor.detach(), tensor.dtype

    def same(self, other: _Memory) -> bool:
        return self.dtype == other.dtype and self.alias.is_set_to(other.alias)


class Inventory:
    """The parts of a module, of the objects that it holds, and of the classes of both.

    A module's attributes are followed into lists, tuples, dicts, sets, arrays, modules that nobody registered, and
    objects of users' and libraries' classes, as far as they go. Functions are themselves, their code and their
    defaults. Classes that are attributes are followed like those of objects.

    Args:
        roots: the module under the empty name; and what else a step calls, such as its loss, by name.
        left_out: what is no part: attributes by name; those of objects, entries of dicts and items of lists by the
            holder's ``id`` and their name, key or position; other containers by ``id``.
        in_place: whether plans run on the module's own parameters and buffers. Then the memory of these is a part, and
            hooks are none. Otherwise it is the other way round, with the shapes and element types of these tensors.

    Attributes:
        parts: by name, in order: values, objects, and the kinds of containers.
        modules: every module once.
        typed: the modules, and objects whose attributes are parts: what has a class that is a part.
        instances: the tables of their attributes, and what reads of each the attributes that are parts.
        mappings: dicts, the attributes of objects and those of classes.
        sequences: lists and deques.
        empty: tables and containers in which nothing is.
        copied: what shows no objects that could be compared, and reads its contents.
        functions: every function once.
        plain: all other tensors.
        own: the module's parameters and buffers, by ``id``; to the plans, those of a loss are plain tensors.
        hooks: tables of hooks, where they are no parts.
    """

    def __init__(self, roots: Mapping[str, Any], left_out: Container[Hashable], in_place: bool) -> None:
        self.parts: dict[str, Any] = {}
        self.modules: list[torch.nn.Module] = []
        self.typed: list[Any] = []
        self.instances: list[tuple[dict[str, Any], Callable[[Any], tuple[Any, ...]]]] = []
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Sequence[Any]] = []
        self.empty: list[Any] = []
        self.copied: list[Callable[[], Any]] = []
        self.functions: list[FunctionType] = []
        self.plain: list[torch.Tensor] = []
        self.hooks: list[Mapping[Any, Any]] = []
        self._left_out, self._in_place = left_out, in_place
        self._seen: set[int] = set()
        self._classes: list[type] = []
        self._beside = tuple([f"{name}{mark}" for name in roots if name for mark in (".", "[")])
        model = roots[""]
        self.own = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
        for name, root in roots.items():
            self._visit(name, root)
        for cls in self._classes:  # which grows: a class may hold objects, which have classes
            self._class(cls)
        if not in_place:
            for name in _GLOBAL_HOOKS:
                self._visit(f"torch's {name}", getattr(torchs, name))

    def changes_to(self, later: Inventory) -> Iterator[ModuleChange]:
        """The parts that are others in a *later* inventory of the same module, in the order of that.

        Of a part that is another one, what is in it is not told, too.
        """
        within: tuple[str, ...] = ()
        for name in dict.fromkeys([*later.parts, *self.parts]):
            before, now = self.parts.get(name, _ABSENT), later.parts.get(name, _ABSENT)
            if not is_same(before, now) and not name.startswith(within):
                within = f"{name}.", f"{name}["
                shown = repr(now) if isinstance(now, VALUES) else ""
                of_module = not name.startswith(later._beside)
                yield ModuleChange(name, shown if len(shown) <= _LONGEST else "", later._is_of_class(name), of_module)

    def _is_of_class(self, name: str) -> bool:
        return any(name.startswith(f"{cls.__qualname__}.") for cls in self._classes)

    def _add(self, name: str, part: Any) -> str:
        while name in self.parts:  # two classes of one name
            name += "'"
        self.parts[name] = part
        return name

    def _visit(self, name: str, value: Any) -> None:
        """Add a value, and what is in it."""
        if name in self._left_out or id(value) in self._left_out:
            return
        if isinstance(value, (*VALUES, *ProxyTypes)):  # a proxy would pass for what it stands for
            self._add(name, value)
            return
        if isinstance(value, (list, tuple, deque, dict)):
            self._items(name, value)
            return
        if isinstance(value, (set, frozenset)):
            self._copied(name, value, partial(frozenset, value))
            return
        if isinstance(value, _BUFFERS):
            self._copied(name, value, partial(_bytes_of, value))
            return
        self._add(name, value)
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
        elif isinstance(value, type):
            if is_written_in_python(value):
                self._watch(value)
        elif self._is_new(value):
            self._inside(name, value)

    def _is_new(self, value: Any) -> bool:
        """Whether a value has not been looked into so far."""
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        return True

    def _items(self, name: str, value: Any) -> None:
        items = dict(value if isinstance(value, dict) else enumerate(value))
        parts = [key for key in items if (id(value), key) not in self._left_out]
        if isinstance(value, dict):
            self._add(name, (type(value), *parts))
        else:  # where its own items are left out, as many as there are
            whole = len(parts) == len(items) and (id(value), len(items)) not in self._left_out
            self._add(name, (type(value), len(items) if whole else None))
        if not self._is_new(value):
            return
        if not value:
            if not isinstance(value, tuple):
                self.empty.append(value)
        elif isinstance(value, dict):
            self.mappings.append(value)
        elif not isinstance(value, tuple):
            self.sequences.append(value)
        for key in parts:
            shown = repr(key) if isinstance(key, VALUES) else type(key).__name__
            self._visit(f"{name}[{shown}]", items[key])
        if has_fields(value) and getattr(value, "__dict__", None) is not value:
            self._object(name, value)

    def _inside(self, name: str, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(name, value)
        elif isinstance(value, MethodType):
            self._visit(name + ".__func__", value.__func__)
            self._visit(name + ".__self__", value.__self__)
        elif isinstance(value, partial):
            for part in ("func", "args", "keywords"):
                self._visit(f"{name}.{part}", getattr(value, part))
        elif isinstance(value, torch.nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._module(name, value)
        elif not isinstance(value, (torch.nn.Module, random.Random)) and has_fields(value):
            self._object(name, value)

    def _copied(self, name: str, value: Any, read: Callable[[], Any]) -> None:
        self._add(name, (type(value), read()))
        if not isinstance(value, frozenset):
            self.copied.append(read)

    def _function(self, name: str, function: FunctionType) -> None:
        self.functions.append(function)
        self._add(f"{name}.__code__", function.__code__)
        for part in ("__defaults__", "__kwdefaults__"):
            self._visit(f"{name}.{part}", getattr(function, part))

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        if not self._is_new(tensor):
            return
        self._add(f"{name}.requires_grad", tensor.requires_grad)
        if id(tensor) in self.own and not self._in_place:
            self._add(f"{name}.shape", None if is_lazy(tensor) else (tuple(tensor.shape), tensor.dtype))
            self._add(f"{name}._backward_hooks", bool(tensor._backward_hooks))
            self._add(f"{name}._post_accumulate_grad_hooks", bool(tensor._post_accumulate_grad_hooks))
        elif is_dense(tensor):
            self._add(f"{name}.data", _Memory(tensor))
        if id(tensor) not in self.own:
            self.plain.append(tensor)

    def _module(self, path: str, module: torch.nn.Module) -> None:
        self.modules.append(module)
        self.typed.append(module)
        table, prefix = vars(module), f"{path}." if path else ""
        self._add(f"{prefix}__class__", type(module))
        self._watch(type(module))
        names = [name for name in table if name not in _INTERNAL and prefix + name not in self._left_out]
        tables = [name for name in (*_TABLES, *_HOOKS) if name in table]
        self.instances.append((table, _reader((*tables, *names))))
        for name in names:
            self._visit(prefix + name, table[name])
        for name in tables:
            if name in _HOOKS and self._in_place:
                self.hooks.append(table[name])
            elif name in _HOOKS:
                self._visit(prefix + name, table[name])
            else:
                (self.mappings if table[name] else self.empty).append(table[name])
                self._add(prefix + name, tuple(table[name]))
                for key, item in list(table[name].items()):
                    self._visit(prefix + key, item)

    def _object(self, name: str, value: Any) -> None:
        self.typed.append(value)
        held = vars(value) if hasattr(value, "__dict__") else {}
        found = fields(value)
        if held:
            self.mappings.append(held)
        elif hasattr(value, "__dict__"):
            self.empty.append(held)
        if len(found) > len(held):
            self.copied.append(partial(_slots_of, value))
        self._add(f"{name}.__class__", type(value))
        self._add(f"{name}.__dict__", tuple([key for key in found if (id(value), key) not in self._left_out]))
        for key, item in found.items():
            if (id(value), key) not in self._left_out:
                self._visit(f"{name}.{key}", item)
        self._watch(type(value))

    def _watch(self, cls: type) -> None:
        for base in cls.__mro__:
            if not is_pythons(base) and self._is_new(base):
                self._classes.append(base)

    def _class(self, cls: type) -> None:
        self.mappings.append(vars(cls))
        for name, value in list(vars(cls).items()):
            if not (name.startswith("__") and name.endswith("__")) or callable(value):
                self._member(f"{cls.__qualname__}.{name}", unpatched(value))

    def _member(self, name: str, value: Any) -> None:
        if type(value) not in _WRAPPERS:
            self._visit(name, value)
        elif name not in self._left_out:
            for part in _WRAPPERS[type(value)]:
                self._visit(f"{name}.{part}", getattr(value, part))


class _Absent:
    """In the place of a part that is not there."""


_ABSENT: Final = _Absent()


def _bytes_of(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return bytes(value)


def _slots_of(value: Any) -> list[int]:
    return list(map(id, fields(value).values()))


def _reader(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """What reads so many entries of a dict."""
    return itemgetter(*names) if len(names) > 1 else lambda table: tuple([table[name] for name in names])


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of no other class than torch's own, with strides."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided


def is_same(before: Any, now: Any) -> bool:
    """Whether two parts are one object, or equal values, or containers of one kind."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, tuple):
        return len(before) == len(now) and all(map(is_same, before, now))
    if isinstance(before, _Memory):
        return before.same(now)
    if isinstance(before, (float, complex, numpy.generic)):  # NaN is NaN, and 0.0 is not -0.0
        return repr(before) == repr(now)
    return isinstance(before, (*VALUES, frozenset)) and bool(before == now)
