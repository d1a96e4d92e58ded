"""Modules of a placed model that no capture covers: their own code runs inside of the plans, as one operator each.

::

    x ──▶ placed.FlashAttention_0 ──▶ y              forward: the module's own forward
    dx, dw ◀── placed.FlashAttention_0_backward ◀── dy, graph      backward: through the graph that it has left

The operator is the module's code and nothing else: what is in the module stays on one device. The code runs once, in
the forward, and leaves a graph, which the backward goes through.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...capturing.capture import capture
from ...capturing.intake.found import around_of
from ...capturing.words.places import module_of
from ...errors import CaptureError, EagerWarning, counted, warn
from ...ir.program import Program
from .own_code import DRAWN_SEEDS, Done, Graphs, OwnCode, read_own_call, seeded_alone, tried

__all__ = ["LIBRARIES", "EagerParts"]

LIBRARIES: Final = ("timm", "torch", "transformers")
"""Whose code computes, and does nothing else."""

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
        self._graphs = Graphs()

    def _graphs_of(self) -> Graphs:
        return self._graphs

    def lend(self, memory: Container[int]) -> None:
        """Name the memory that is not the own of the plan that is to run, as :attr:`.Graphs.lent` does."""
        self._graphs.lent = memory

    def taken(self) -> Graphs:
        """The graphs that modules' own code has left since the last time; who holds them may go back through them."""
        graphs, self._graphs = self._graphs, Graphs()
        return graphs

    def captured(self, inputs: Sequence[Any], **options: Any) -> Program:
        """The program of a call, as :func:`graphir.capture` takes the arguments, with modules that a capture refuses as
        operators of their own.

        Raises:
            CaptureError: it refuses what is in no module inside of the model, or in most of the model; or a module's
                own code cannot be an operator.

        Warns:
            EagerWarning: says which modules run their own code, and why; or names what a forward changes around the
                model, which no plan does.
        """
        with around_of(self._forwards()).put_back() as changed:
            program = self._captured(inputs, **options)
        if changed:
            name = type(self.model).__name__
            warn(f"a forward in {name} changes {changed[0]!r}, which a plan does not do: return it", EagerWarning)
        return program

    def _forwards(self) -> list[Callable[..., Any]]:
        """The forwards of users' classes that a capture runs."""
        inside = {id(inner) for path in self._parts for inner in self.model.get_submodule(path).modules()}
        kinds = dict.fromkeys([type(module) for module in self.model.modules() if id(module) not in inside])
        written = [
            next(base for base in kind.__mro__ if isinstance(vars(base).get("forward"), FunctionType)) for kind in kinds
        ]
        return [vars(base)["forward"] for base in written if base.__module__.partition(".")[0] not in LIBRARIES]

    def _captured(self, inputs: Sequence[Any], **options: Any) -> Program:
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
                self._parts |= {path: _Part(module, e, self._graphs_of) for path, module in found.items()}
        for error in dict.fromkeys(refused.values()):
            first, *others = [path for path, known in refused.items() if known is error]
            more = f" and {counted(len(others), 'module')} like it" if others else ""
            name = type(self.model).__name__
            warn(
                f"{first!r} of {name}{more} runs its own code inside of the plans: {error.what}",
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

    @contextlib.contextmanager
    def going_on(self, done: Sequence[Done]) -> Iterator[None]:
        """While this is active, modules whose own code has run in a plan hand back what it has returned, and the others
        draw as in :meth:`seeded`."""
        with contextlib.ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.going_on([each for each in done if part.is_of(each.call.module())]))
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
        graphs: gives what takes the graphs of the plan that is running.
    """

    def __init__(self, module: torch.nn.Module, error: CaptureError, graphs: Callable[[], Graphs]) -> None:
        self._module, self.graphs = weakref.ref(module), graphs
        self._what, self._where, self._fix = error.what, error.where, error.fix
        self._operators: dict[Hashable, OwnCode] = {}
        self._loose: dict[Hashable, Hashable] = {}
        self._double: torch.nn.Module | None = None
        self._failed = self._others = ""

    def is_of(self, module: torch.nn.Module | None) -> bool:
        """Whether the module is this one."""
        return module is not None and self._module() is module

    def why_not(self) -> str:
        """Why the code cannot be an operator, where that was found in a capture; else empty."""
        return self._failed or self._others

    def error(self) -> CaptureError:
        """What says why the code cannot be an operator."""
        why = self.why_not()
        changes = any(word in why for word in ("it changes", "it overwrites", "it sets", "keeps its graph"))
        own = "let the module return what it changes" if changes else "place the modules around it, each by itself"
        what = f"{self._what}; and the module's own code cannot be an operator: {why}"
        return CaptureError(what, where=self._where, fix=f"{self._fix}; or {own}")

    def copy(self) -> None:
        """Copy the module: what is being captured no other thread may run, and trials are made in another one.

        Raises:
            CaptureError: the module cannot be copied.
        """
        self._failed = self._others = ""
        try:
            self._double = self.double()
        except Exception as e:
            self._failed = f"it cannot be copied, for trials: {e}".partition("\n")[0]
            raise self.error() from None

    def double(self) -> torch.nn.Module:
        """A copy of the module; one and the same while that is captured.

        Raises:
            RuntimeError: it is gone, or its code is no class's.
            Exception: it cannot be copied.
        """
        if self._double is not None:
            return self._double
        module = self._module()
        if module is None:
            raise RuntimeError("the module is gone")
        if "forward" in vars(module):
            raise RuntimeError("its forward was set on the module itself")
        with torch.inference_mode(False):
            double = copy.deepcopy(module)
        for inner in double.modules():
            if isinstance(inner, torch.nn.RNNBase):  # which looks whether its weights are others, and lists them anew
                inner._init_flat_weights()
        return double

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is active, the module's ``forward`` is the operator; the module was copied."""
        try:
            with self._replaced(self._forward):
                yield
        finally:
            self._double = None

    def seeded(self) -> AbstractContextManager[None]:
        """While this is active, the module's ``forward`` draws as its operator does, where that draws."""
        return self._replaced(self._forward_seeded)

    def going_on(self, done: Sequence[Done]) -> AbstractContextManager[None]:
        """While this is active, the module's ``forward`` hands back what its own code has *done*."""
        return self._replaced(partial(self._forward_done, list(done)))

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

    def _forward(self, module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        try:
            call, operands = read_own_call(module, args, kwargs)
            trial = tried(call, self.double(), operands)
            operator = self._operators.get(call.key)
            if operator is None:
                if self._loose.setdefault(call.loose, call.key) != call.key:
                    self._others = "it is given another object in each call, among arguments that are no tensors"
                name = type(module).__name__
                operator = OwnCode(name, call, trial, len(operands), self)
                self._operators[call.key] = operator
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

    def _forward_done(self, done: list[Done], module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not done:
            return self._forward_seeded(module, *args, **kwargs)
        if len(done) > 1:
            raise RuntimeError(
                f"a plan has failed behind several calls of one {type(module).__name__}, whose own code does not run "
                "again: run the batch once more"
            )
        return done.pop().again(*read_own_call(module, args, kwargs))

    def _refused(self, error: Exception) -> CaptureError:
        self._failed = f"{error}".partition("\n")[0] or type(error).__name__
        return self.error()
