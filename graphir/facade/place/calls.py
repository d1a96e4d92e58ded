"""The calls of a placed model: by plans, or by the model's own code where no plan can stand for a call."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from graphir.runtime.machine.surroundings import follow_forks

from ...capturing.isolate.alone import BusyError
from ...errors import CoverageError, EagerWarning, GraphirError, RecaptureWarning, SessionError, warn
from ...parallel.calls import watched
from ..plan_cache import ModuleGuard, PlanCache, told
from ..plan_cache.captures import Captures, Unfit
from .across import across
from .call import PlacedCall, read_call
from .eager import LIBRARIES, EagerParts
from .homes import Homes
from .plans import Failed, PlacedPlans

__all__ = ["PlacedCalls"]

_MOST_PLANS: Final = 8
"""How many pairs of plans are kept; those not used for longest make room."""

_MOST_KINDS: Final = 64
"""How many kinds of calls are told apart."""

_MARKS: Final = ("_is_accelerate_prepared", "forward")
"""Attributes of a model that no plan depends on: what libraries note, and what they put around its ``forward``."""

_OTHER_KINDS: Final = "calls are of other kinds again and again, by shapes, numbers among the arguments, or modes"
_OTHER_OUTPUTS: Final = "gradients come for other outputs again and again"


class _Kind:
    """A kind of calls.

    Args:
        described: what is equal for calls of it.

    Attributes:
        wanted: the positions of the outputs for which gradients came last; None: those that were expected at first.
        default: the latter.
    """

    def __init__(self, described: object) -> None:
        self.described = described
        self.wanted: tuple[int, ...] | None = None
        self.default: tuple[int, ...] = ()

    def came(self, positions: tuple[int, ...]) -> None:
        """Note for which outputs gradients came."""
        self.wanted = None if positions == self.default else positions


class PlacedCalls:
    """Calls of one model.

    Args:
        twin: the model as its own class has it.
        homes: places its programs.
        options: of a capture.
    """

    def __init__(self, twin: torch.nn.Module, homes: Homes, options: Mapping[str, Any]) -> None:
        self._twin, self._homes, self.options = twin, homes, dict(options)
        self.eager = EagerParts(twin)
        ignored = (*options.get("allow_changes", ()), *_MARKS)
        self._cache: PlanCache[PlacedPlans | str] = PlanCache({"": twin}, _MOST_PLANS, ignored, in_place=True)
        self._kinds: list[_Kind] = []
        self._captures, self._said = Captures(), set[str]()
        self._lock = threading.RLock()
        follow_forks()

    @property
    def plans(self) -> list[PlacedPlans]:
        """The plans that are kept: the last used comes first."""
        return [plans for plans in self._cache.plans if isinstance(plans, PlacedPlans)]

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns.

        Warns:
            EagerWarning: the model's own code runs; says why, once for each reason.
            RecaptureWarning: the model has changed, and was captured anew.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) if torch.is_grad_enabled() else None
        if hooks is not None:  # those of a checkpoint count what is saved, and end its second run in the middle
            self._tell("saved tensors have hooks, as in a checkpoint around the model, or save_on_cpu")
            return self.own(args, kwargs)
        if why := watched():  # even a look at the module would be seen
            if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, dict(kwargs)))):
                self._tell(why)
            return self.own(args, kwargs)
        try:
            with self._lock:
                guard = self._cache.look()
                call = read_call(args, kwargs, self._modes(guard))
                found = self._run(guard, call)
                self._captures.calls += 1
                return found
        except Failed as e:  # what has failed is to fail in the model's own code, whose error says where
            found = e.plans.go_on(e, args, kwargs)
            why = f"a plan has failed where this has not: {e.error.what}"
            with self._lock:
                self._cache.replace(e.plans, why)
            self._tell(why)
            return found
        except (Unfit, SessionError) as e:
            self._tell(str(e).partition("\n")[0])
        return self.own(args, kwargs)

    def own(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model's own code returns."""
        with across(self._twin):
            return self._twin(*args, **kwargs)

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlacedPlans:
        """The plans for such a call.

        Raises:
            GraphirError: there are none.
            Unfit: likewise.
        """
        guard = self._cache.look()
        call = read_call(args, kwargs, self._modes(guard))
        return self._made(guard, call)

    def close(self) -> None:
        """Let go of the model's tensors, and of plans."""
        object.__setattr__(self._twin, "__dict__", {})
        self._cache = PlanCache({"": torch.nn.Module()}, 1)

    def _modes(self, guard: ModuleGuard) -> tuple[Hashable, ...]:
        """The modes of modules, and the hooks of those inside, which a plan computes if they are a library's.

        Raises:
            Unfit: others may do anything.
        """
        if _has_any_global_hook():
            raise Unfit("hooks are set for all modules")
        hooks = [hook for hook in guard.hooks_inside() if not isinstance(hook, bool)]
        hooks = [hook for hook in hooks if _library_of(hook) != "graphir"]  # it warns of a model behind compiled steps
        for hook in hooks:
            if _library_of(hook) not in LIBRARIES:  # weight norm, gradients of inputs for checkpoints
                raise Unfit("a module inside of it has hooks")
        return (*[module.training for module in guard.modules], *map(id, hooks))

    def _run(self, guard: ModuleGuard, call: PlacedCall) -> Any:
        """Run the plans for a call, and return the model's output; capture the model first where no plans fit.

        Raises:
            Unfit: there are none.
            Failed: one has failed.
        """
        kind = self._kind(call)
        wanted = kind.wanted
        for plans in self._cache.found(guard, (kind, wanted)):
            if isinstance(plans, str):
                raise Unfit(plans)
            try:
                found = plans(call)
            except CoverageError:
                continue
            self._cache.used(plans)
            return found
        changes = () if self._cache.holds_plans_of(guard) else guard.changes
        why = f"{changes[0].attribute!r} of the model has changed again and again" if changes else _OTHER_KINDS
        self._captures.require(_OTHER_OUTPUTS if wanted is not None else why)
        try:
            plans = self._made(guard, call)
        except GraphirError as e:
            plans = f"it cannot be captured: {e.what}"
            if isinstance(e, BusyError):  # which has passed when the next call comes
                raise Unfit(plans) from None
            self._cache.keep(guard, plans, (kind, wanted))
            raise Unfit(plans) from None
        if changes:
            self._cache.drop_other_tensors(guard)
            warn(f"{self._name()} was captured anew: {told(changes)}", RecaptureWarning)
        return plans(call)

    def _made(self, guard: ModuleGuard, call: PlacedCall) -> PlacedPlans:
        self._captures.made += 1
        kind = self._kind(call)
        wanted = kind.wanted
        plans = PlacedPlans(self.eager, self._homes, self.options, call, wanted, guard, self._lock, kind.came)
        if wanted is None:
            kind.default = plans.wanted
        self._cache.leave_out(guard, plans.changed)
        self._cache.keep(guard, plans, (kind, wanted))
        return plans

    def _kind(self, call: PlacedCall) -> _Kind:
        """The kind of a call: the one that was used last is found first."""
        for i, kind in enumerate(self._kinds):
            if kind.described == call.kind:
                if i:
                    self._kinds.insert(0, self._kinds.pop(i))
                return kind
        self._kinds.insert(0, _Kind(call.kind))
        del self._kinds[_MOST_KINDS:]
        return self._kinds[0]

    def _tell(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            warn(f"{self._name()} runs its own code: {why}", EagerWarning)

    def _name(self) -> str:
        return type(self._twin).__name__


def _library_of(hook: object) -> str:
    """The package that a hook comes from."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0]
