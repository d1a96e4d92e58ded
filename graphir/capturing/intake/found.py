"""Modules, optimizers and a scaler that a step function uses, in its cells, globals, defaults and the objects there."""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, TypeVar

import torch

from ...errors import CaptureError
from ...ir.program import GRADIENT, Program
from ..isolate.around import Around, globals_of
from ..isolate.containers import HOLDERS, is_pythons, is_written_in_python

__all__ = ["StepFunction", "Together", "around_of", "read_function"]

_T = TypeVar("_T")

_DEPTH: Final = 3
"""How many objects deep: the function's own cells, what these hold, and what is in that."""

_STATEFUL: Final = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
"""Types of objects whose state lasts from step to step."""


class Between(NamedTuple):
    """Which gradients last between the steps of a function, as far as recordings tell, by the blobs of parameters.

    Attributes:
        wanted: those that programs beside keep.
        lost: those that programs beside leave, and do not keep.
        assumed: those that programs beside begin without.
        cleared: those that the function's own steps begin without.
        left: those that these steps leave, and do not keep.
        touched: those that these steps read, change or leave, and do not keep.
        lasting: those that these steps keep.
    """

    wanted: Set[str]
    lost: Set[str]
    assumed: Set[str]
    cleared: set[str]
    left: set[str]
    touched: set[str]
    lasting: set[str]

    @classmethod
    def none_of(cls, params: Iterable[str]) -> Between:
        """The knowledge of a step that begins without the gradients of these parameters."""
        return cls(frozenset(), frozenset(), frozenset(), set(params), set(), set(), set())

    @classmethod
    def beside(cls, program: object) -> Between:
        """The knowledge with which a function begins that is captured beside a program; None: there is no program.

        Raises:
            CaptureError: it is no program.
        """
        if program is None:
            return cls(frozenset(), frozenset(), frozenset(), set(), set(), set(), set())
        if not isinstance(program, Program):
            raise CaptureError(f"beside is a {type(program).__name__}, not a program", fix="give what capture returned")
        interface = program.interface
        known: Between | None = getattr(program.witness, "between", None)
        wanted = {param for param, own in interface.optimizer_state.items() if GRADIENT in own}
        wanted |= set() if known is None else known.wanted
        lost = {*interface.gradients, *(() if known is None else known.lost | known.left)} - wanted
        assumed = (set() if known is None else known.assumed | known.cleared) - wanted
        return cls(wanted, lost, assumed, set(), set(), set(), set())


class StepFunction(NamedTuple):
    """A function that is a step.

    Attributes:
        call: itself.
        model: the module that it uses; of several, a module that has them by their names.
        optimizers: that it uses, by name.
        scaler: the gradient scaler that it uses; None without one.
        around: what else it finds around itself.
        between: what is known of the gradients between its steps.
        signature: its own; None where it has none.
    """

    call: Callable[..., Any]
    model: torch.nn.Module
    optimizers: Mapping[str, torch.optim.Optimizer]
    scaler: torch.amp.GradScaler | None
    around: Around
    between: Between
    signature: inspect.Signature | None

    @property
    def name(self) -> str:
        """The function's own name."""
        return _name_of(self.call)

    def bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with as many of them by position as can be, numbers and text that are defaults
        included: one call has one form. Arguments that do not fit the function stay as they are."""
        known = {} if self.signature is None else self.signature.parameters
        if self.signature is None or (not kwargs and len(args) == len(known)):
            return tuple(args), dict(kwargs)
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError:
            return tuple(args), dict(kwargs)
        found: dict[str, Any] = {}
        for name, param in known.items():
            simple = isinstance(param.default, (bool, int, float, str, type(None)))
            if param.kind not in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD) or not (name in given or simple):
                break
            found[name] = given.get(name, param.default)
        others = {name: value for name, value in kwargs.items() if name not in found}
        return (*found.values(), *args[len(found) :]), others


class Together(torch.nn.Module):
    """Several modules, by name."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def read_function(function: Callable[..., Any], stateful: object = (), beside: object = None) -> StepFunction:
    """A step function, and the modules and optimizers that it uses.

    Args:
        function: a function, a bound method, a ``functools.partial``, or an object with ``__call__``.
        stateful: modules and optimizers, or these by name; where empty, they are found.
        beside: the program of another step of the same modules, which are the function's where it names none; None:
            there is none.

    Raises:
        CaptureError: there is no module, or *stateful* has something else.
    """
    search = _Search(function)
    known = dict(search.found())
    found = _given(stateful, known) if stateful else known
    modules = _outermost({n: value for n, value in found.items() if isinstance(value, torch.nn.Module)})
    if not modules and isinstance(beside, Program) and beside.module is not None:
        modules = {"": beside.module}
    optimizers = _each({n: value for n, value in found.items() if isinstance(value, torch.optim.Optimizer)})
    if not modules:
        raise CaptureError(
            f"{_name_of(function)} uses no module: none is in its cells, globals, defaults or its self",
            fix="name the module where the function finds it, or pass stateful=(model, optimizer)",
        )
    model = next(iter(modules.values())) if len(modules) == 1 else Together(modules)
    scalers = {id(value): value for value in found.values() if isinstance(value, torch.amp.GradScaler)}
    if len(scalers) > 1:
        raise CaptureError(f"{_name_of(function)} uses {len(scalers)} gradient scalers", fix="use one")
    scaler = next((scaler for scaler in scalers.values() if scaler.is_enabled()), None)
    return StepFunction(
        function, model, optimizers, scaler, search.around, Between.beside(beside), _signature(function)
    )


def around_of(functions: Iterable[Callable[..., Any]]) -> Around:
    """The globals and cells that functions name, and the containers and objects there."""
    search = _Search(None)
    for function in functions:
        for _ in search.within("", function, 1):
            pass
    return search.around


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _given(stateful: object, known: Mapping[str, Any]) -> dict[str, Any]:
    """The stateful objects by name; a sequence's objects have the names that the function has for them."""
    if isinstance(stateful, Mapping):
        found = dict(stateful)
    elif isinstance(stateful, Sequence) and not isinstance(stateful, str):
        names = {id(value): name for name, value in known.items()}
        found = {names.get(id(v), f"{type(v).__name__.lower()}{i or ''}"): v for i, v in enumerate(stateful)}
    else:
        found = {"": stateful}
    for value in found.values():
        if not isinstance(value, _STATEFUL):
            raise CaptureError(
                f"stateful has a {type(value).__name__}, which is no module, optimizer or gradient scaler",
                fix="write stateful=(model, optimizer), or stateful={'G': G, 'D': D}",
            )
    return found


def _outermost(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """The modules that are in no other one of them, each once."""
    inside = {id(inner) for module in modules.values() for inner in module.modules() if inner is not module}
    return _each({name: module for name, module in modules.items() if id(module) not in inside})


def _each(found: Mapping[str, _T]) -> dict[str, _T]:
    """The objects, each once, by the first of its names."""
    names: dict[int, str] = {}
    for name, value in found.items():
        names.setdefault(id(value), name)
    return {name: found[name] for name in names.values()}


class _Search:
    """Looks for what has state.

    Args:
        function: begins there; None: whoever asks says where.

    Attributes:
        around: all that it has looked into.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self.around = Around()
        self._seen: set[int] = set()

    def found(self) -> Iterator[tuple[str, Any]]:
        """Each module and optimizer once, by a name that no other one has."""
        taken: set[str] = set()
        for name, value in self.within("", self._function, _DEPTH):
            base, count = name or type(value).__name__.lower(), 1
            while name in taken or not name:
                name, count = f"{base}_{count}" if name else base, count + 1
            taken.add(name)
            yield name, value

    def within(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
        """The modules and optimizers in a value, so many objects deep, by the names that others have for them."""
        if isinstance(value, (str, bytes, int, float, complex, type(None), torch.Tensor)) or depth < 0:
            return
        if isinstance(value, type):
            if is_written_in_python(value) and not issubclass(value, torch.nn.Module):
                self.around.saw(name, value)
            if issubclass(value, torch.autograd.Function):
                for method in vars(value).values():
                    yield from self.within("", getattr(method, "__func__", None), depth + 1)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, _STATEFUL):
            yield name, value
            return
        # A partial or a bound method does not count as an object on the way.
        depth -= not isinstance(value, (MethodType, partial))
        for key, inner in self._parts(name, value):
            yield from self.within(key or name, inner, depth)

    def _parts(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, MethodType):
            yield "", value.__self__
            yield "", value.__func__
        elif isinstance(value, partial):
            yield "", value.func
            yield from (("", item) for item in value.args)
            yield from value.keywords.items()
        elif isinstance(value, FunctionType):
            if str(value.__module__).partition(".")[0] != "torch":
                self.around.saw(name, value)
                yield from _parts_of_function(value)
        elif isinstance(value, dict):
            self.around.saw(name, value)
            yield from ((key if isinstance(key, str) else "", item) for key, item in list(value.items()))
        elif isinstance(value, (list, tuple, set, deque)):
            if not isinstance(value, tuple):
                self.around.saw(name, value)
            yield from (("", item) for item in value)
        elif hasattr(value, "__dict__") and (isinstance(value, HOLDERS) or not is_pythons(type(value))):
            self.around.saw(name, value)
            yield from list(vars(value).items())
            if value is self._function:
                yield "", type(value).__call__


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield name, cell.cell_contents
    yield from ((name, function.__globals__[name]) for name in globals_of(function))
    yield from (("", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
