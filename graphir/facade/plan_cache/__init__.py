"""Plans of one module, kept as long as they may come back: one cache for ``compile`` and for ``DataParallel``.

::

    a call ──▶ guard: is the module what plans were captured from? ──no──▶ a new guard, which says what has changed ─┐
                  │ yes                                                                                             │
                  ▼                                                                                                 │
               plans of that guard and of this kind of call, the last used first                                    │
                  │      a plan covers the sizes, and its witness agrees ──▶ it runs                                │
                  ▼ none                                                                                            │
               captured anew ◀──────────────────────────────────────────────────────────────────────────────────────┘
                  │ put first, with the guard
                  ▼
               the plan that was not used for longest makes room

**The guard** compares what a step's Python may read of the module (:mod:`.inventory`):

* each module by class, attributes, children, parameters and buffers, and which of the latter need a gradient;
* what attributes hold, as far as it goes: lists, tuples, dicts, sets, arrays, unregistered modules, and the attributes
  of objects of users' and libraries' classes;
* the classes of all these, and classes that are attributes, along their order of resolution, each class once; functions
  by identity, code and defaults.

Numbers and text are compared by value, everything else is itself. A module that is changed back finds its plans.

**Tensors that are plain attributes** are constants of a plan. The plan reads them where they are, so it follows what
is written there, also through ``.data`` and numpy, which no version counts. Only their identity, memory and
``requires_grad`` are guarded. A session on another device has copies, whose versions it checks before each step: there,
what no version counts is not seen.

**Left out** are training modes, which a kind of call or the first capture decides; attributes that ``allow_changes``
names; and those that the step itself changes, which the capture has found to make no difference to the next step.

**Not seen** are globals, closures, attributes of functions, and what C code keeps: ``docs/capture.md``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from ...capturing.isolate.attributes import names_of_attributes
from ...errors import SessionError
from .guard import ModuleGuard
from .inventory import AROUND, ModuleChange

__all__ = ["AROUND", "ModuleChange", "ModuleGuard", "PlanCache", "told"]

_Plan = TypeVar("_Plan")

_CAPTURES: Final = 8
"""How often one attribute's changes are followed by a capture, until that is refused."""


class _Kept(NamedTuple, Generic[_Plan]):
    """A plan that is kept.

    Attributes:
        guard: of the module that the plan was captured from.
        kind: of the calls that the plan is for.
        plan: itself.
    """

    guard: ModuleGuard
    kind: Hashable
    plan: _Plan


class PlanCache(Generic[_Plan]):
    """The plans of one module, the last used first.

    Args:
        roots: the module under the empty name; and what else a step calls, such as its loss, by name.
        most: how many plans are kept.
        allowed: names of attributes whose changes are ignored.
        in_place: whether plans run on the module's own parameters and buffers.
    """

    def __init__(
        self, roots: Mapping[str, Any], most: int, allowed: Iterable[str] = (), in_place: bool = False
    ) -> None:
        self._most = most
        self._left_out: dict[Hashable, object] = dict.fromkeys(allowed)
        self._model: torch.nn.Module = roots[""]
        self._new = partial(ModuleGuard, roots, self._left_out, in_place)
        self._last: ModuleGuard = self._new()
        self._kept: list[_Kept[_Plan]] = []
        self._captures: Counter[str] = Counter()

    @property
    def plans(self) -> list[_Plan]:
        """All that are kept, the last used first."""
        return [kept.plan for kept in self._kept]

    def look(self) -> ModuleGuard:
        """The guard that holds; a new one where no plan is kept of the module as it is now."""
        if self._last.unchanged():
            return self._last
        guards = list(dict.fromkeys([self._last, *(kept.guard for kept in self._kept)]))
        found = next((guard for guard in guards[1:] if guard.unchanged()), None)
        if found is None:
            made = self._new()
            found = next((guard for guard in guards if guard.accepts(made)), made)
            if found is made:
                made.changes = tuple(self._last.changes_to(made))
        self._last = found
        return found

    def found(self, guard: ModuleGuard, kind: Hashable = None) -> list[_Plan]:
        """The plans of a module that *guard* holds of, for calls of one kind, the last used first."""
        return [kept.plan for kept in self._kept if kept.guard is guard and kept.kind == kind]

    def holds_plans_of(self, guard: ModuleGuard) -> bool:
        """Whether a plan is kept of the module that *guard* holds of."""
        return any(kept.guard is guard for kept in self._kept)

    def drop(self, plans: Sequence[_Plan]) -> None:
        """Keep these plans no longer."""
        self._kept = [kept for kept in self._kept if not any(kept.plan is plan for plan in plans)]

    def drop_other_tensors(self, guard: ModuleGuard) -> None:
        """Drop plans that run on memory which the module's parameters and buffers have left, so that it is freed."""
        self._kept = [kept for kept in self._kept if kept.guard.has_tensors_of(guard)]

    def used(self, plan: _Plan) -> None:
        """Note that a plan has run."""
        if self._kept[0].plan is not plan:
            self._kept.sort(key=lambda kept: kept.plan is not plan)

    def keep(self, guard: ModuleGuard, plan: _Plan, kind: Hashable = None) -> list[_Plan]:
        """Put a plan first.

        Args:
            guard: of the module that the plan was captured from.
            plan: itself.
            kind: of the calls that the plan is for.

        Returns:
            The plans that made room.
        """
        if not self.holds_plans_of(guard):
            self._captures.update([change.attribute for change in guard.changes])
        self._kept.insert(0, _Kept(guard, kind, plan))
        dropped = self._kept[self._most :]
        del self._kept[self._most :]
        return [kept.plan for kept in dropped]

    def replace(self, plan: _Plan, by: _Plan) -> None:
        """Keep another plan for the calls of a plan."""
        self._kept = [kept._replace(plan=by) if kept.plan is plan else kept for kept in self._kept]

    def leave_out(self, guard: ModuleGuard, changed: Mapping[Hashable, object]) -> None:
        """Ignore from now on what a capture has shown that the step changes itself.

        Args:
            guard: of the module that was captured.
            changed: what the capture has put back. Attributes of classes, which it has not, are found here.
        """
        of_classes = [change.attribute for change in guard.changes_to(self._new()) if change.of_class]
        own: dict[Hashable, object] = {**changed, **dict.fromkeys(of_classes, None)}
        if not own.keys() <= self._left_out.keys():
            self._left_out.update(own)
            guard.take(self._new())

    def refuse_another(self, guard: ModuleGuard) -> None:
        """Raise where captures have followed the changes of one attribute too often."""
        change = max(guard.changes, key=lambda change: self._captures[change.attribute])
        if self._captures[change.attribute] < _CAPTURES:
            return
        owner = self._attribute_of_module(change.attribute)
        ignored = f"; if nothing depends on {owner!r}, pass allow_changes=({owner!r},)" if owner else ""
        raise SessionError(
            f"{change}, and was captured anew {_CAPTURES} times already",
            where="the module that was compiled",
            fix="make it a 0-dim tensor argument of the step, or a 0-dim tensor on the module that is written in place"
            + ignored,
        )

    def _attribute_of_module(self, changed: str) -> str:
        """The attribute of a module that has changed, or holds what has; empty if there is none."""
        names = names_of_attributes(self._model)
        return max([name for name in names if f"{changed}.".startswith((f"{name}.", f"{name}["))], key=len, default="")


def told(changes: Sequence[ModuleChange]) -> str:
    """What has changed, in one line."""
    others = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
    return f"{changes[0]}{others}"
