"""Modules of a placed model that no capture covers: their own code runs inside of the plans, as one operator each.

::

    x ──▶ placed.FlashAttention_0 ──▶ y              forward: the module's own forward
    dx, dw ◀── placed.FlashAttention_0_backward ◀── dy, x, w       backward: once more, with its gradient

The operator is the module's code and nothing else: what is in the module stays on one device. As in a checkpoint, the
backward runs the code once more, so that nothing but operands is saved between the two.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...capturing.capture import capture
from ...capturing.words.places import module_of
from ...errors import CaptureError, EagerWarning, counted, warn
from ...ir.program import Program
from ..plan_cache import ModuleGuard
from .own_code import DRAWN_SEEDS, OwnCode, read_own_call, seeded_alone, tried

__all__ = ["EagerParts"]

_MOST: Final = 0.5
"""The part of a model's parameters that may be in such modules: a model of more is rather not placed."""


class EagerParts:
    """The modules of one model that no capture covers.

    Attributes:
        model: in which they are, as its own class has it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._parts: dict[str, _Part] = {}

    def captured(self, inputs: Sequence[Any], **options: Any) -> Program:
        """The program of a call, as :func:`graphir.capture` takes the arguments, with modules that a capture refuses as
        operators of their own.

        Raises:
            CaptureError: it refuses what is in no module inside of the model, or in most of the model; or a module's
                own code cannot be an operator.

        Warns:
            EagerWarning: says which modules run their own code, and why.
        """
        refused: dict[str, CaptureError] = {}
        modules = dict(self.model.named_modules())
        self._parts = {path: part for path, part in self._parts.items() if part.is_of(modules.get(path))}
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    for part in self._parts.values():  # before any is in place: one may be within another
                        part.copy()
                    for part in self._parts.values():
                        stack.enter_context(part.in_place())
                    program = capture(self.model, inputs, **options)
                break
            except CaptureError as e:
                found = self._uncovered(e)
                if not found:
                    failed = [part.error() for part in self._parts.values() if part.why_not()]
                    for path in refused:
                        del self._parts[path]
                    raise (failed[0] if failed else e) from None
                refused.update(dict.fromkeys(found, e))
                self._parts |= {path: _Part(module, e) for path, module in found.items()}
        for error in dict.fromkeys(refused.values()):
            first, *others = [path for path, known in refused.items() if known is error]
            more = f" and {counted(len(others), 'module')} like it" if others else ""
            name = type(self.model).__name__
            warn(
                f"{first!r} of {name}{more} runs its own code inside of the plans, and once more in the backward: "
                f"{error.what}",
                EagerWarning,
            )
        return program

    @contextlib.contextmanager
    def seeded(self) -> Iterator[None]:
        """While this is active, modules that draw in an operator draw as that operator does."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.seeded())
            yield

    def _uncovered(self, error: CaptureError) -> dict[str, torch.nn.Module]:
        """The module where a capture ended, and all of its class; none where these are too much of the model."""
        modules = dict(self.model.named_modules())
        path = module_of(error)
        if not path or path not in modules or path in self._parts:
            return {}
        kind = type(modules[path])
        found = {p: m for p, m in modules.items() if p and type(m) is kind and p not in self._parts}
        inside = [*found.values(), *[modules[p] for p in self._parts]]
        own = {id(param): param.numel() for module in inside for param in module.parameters()}
        return found if sum(own.values()) <= _MOST * sum([p.numel() for p in self.model.parameters()]) else {}


class _Part:
    """A module whose own code is an operator.

    Args:
        module: itself.
        error: what a capture says of its code.
    """

    def __init__(self, module: torch.nn.Module, error: CaptureError) -> None:
        self._module = weakref.ref(module)
        self._what, self._where, self._fix = error.what, error.where, error.fix
        self._operators: dict[Hashable, OwnCode] = {}
        self._loose: dict[Hashable, Hashable] = {}
        self._double: torch.nn.Module | None = None
        self._guard: ModuleGuard | None = None
        self._failed = self._others = ""

    def is_of(self, module: torch.nn.Module | None) -> bool:
        """Whether the module is this one."""
        return module is not None and self._module() is module

    def why_not(self) -> str:
        """Why the code cannot be an operator, where that was found in a capture; else empty."""
        return self._failed or self._others

    def error(self) -> CaptureError:
        """What says why the code cannot be an operator."""
        what = f"{self._what}; and the module's own code cannot be an operator: {self.why_not()}"
        return CaptureError(what, where=self._where, fix=f"{self._fix}; or let the module return what it changes")

    def copy(self) -> None:
        """Copy the module: what is being captured no other thread may run, and trials are made in another one.

        Raises:
            CaptureError: the module cannot be copied.
        """
        module = self._module()
        self._failed = self._others = ""
        if module is None:
            return
        try:
            if "forward" in vars(module):
                raise RuntimeError("its forward was set on the module itself")
            own = {id(t): t for t in (*module.parameters(), *module.buffers())}
            self._double = copy.deepcopy(module, own)
        except Exception as e:
            raise self._refused(e) from None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is active, the module's ``forward`` is the operator; the module was copied."""
        try:
            with self._replaced(self._forward):
                yield
        finally:
            self._double = None
            for operator in self._operators.values():
                operator.double = None

    def seeded(self) -> AbstractContextManager[None]:
        """While this is active, the module's ``forward`` draws as its operator does, where that draws."""
        return self._replaced(self._forward_seeded)

    @contextlib.contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        module = self._module()
        if module is None:
            yield
            return
        vars(module)["forward"] = partial(forward, module)
        try:
            yield
        finally:
            del vars(module)["forward"]

    def guard(self) -> ModuleGuard:
        """A guard of the module as it is now."""
        if self._guard is None or not self._guard.unchanged():
            module = self._module()
            assert module is not None
            self._guard = ModuleGuard({"": module}, in_place=True)
        return self._guard

    def _forward(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        call, operands = read_own_call(module, args, kwargs)
        double = self._double
        try:
            trial = tried(call._replace(module=lambda: double), operands)
            operator = self._operators.get(call.key)
            if operator is None:
                if self._loose.setdefault(call.loose, call.key) != call.key:
                    self._others = "it is given another object in each call, among arguments that are no tensors"
                name = type(module).__name__
                operator = OwnCode(name, call, trial, len(operands), weakref.WeakMethod(self.guard))
                self._operators[call.key] = operator
            operator.double = double
            operator.admit(operands, trial)
        except Exception as e:
            raise self._refused(e) from None
        return operator(operands)  # a checkpoint around it may end here, which is no failure

    def _forward_seeded(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        call, operands = read_own_call(module, args, kwargs)
        operator = self._operators.get(call.key)
        seed = None
        if operator is not None and operator.draws:
            seed = torch.randint(DRAWN_SEEDS, (), device=operands[0].device)
        with _disable_current_modes() if seed is not None else contextlib.nullcontext(), seeded_alone(seed):
            return type(module).forward(module, *args, **kwargs)

    def _refused(self, error: Exception) -> CaptureError:
        self._failed = f"{error}".partition("\n")[0] or type(error).__name__
        return self.error()
