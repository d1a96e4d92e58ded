"""Plans as a person writes them: as passes over the program, as text, and as a choice of the groups of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from graphir.ir.device import Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import base_name
from graphir.ir.program import Program

from ..base import build
from ..recompute import Recompute
from ..shift_modules import ShiftModules
from .chains import Target, goes, said
from .groups import Grouped
from .levels import Levels, Unit
from .moves import ParkedQuietly
from .naming import patterns, states_named, storages_named
from .plans import Judged
from .problem import AGAIN, KEEP, Choice

__all__ = ["Draft", "Drafts", "Hand", "Way", "choice_of", "says"]


class Way(NamedTuple):
    """What becomes of what some units save, or of their state that the update alone touches.

    Attributes:
        units: in the order of the forward.
        to: where it is parked, alike in each replica; None: it is computed again.
        what: ``saved`` activations; ``state``; or state with its ``updates``, which run where it is parked.
    """

    units: tuple[Unit, ...] = ()
    to: Target | None = None
    what: Literal["saved", "state", "updates"] = "saved"

    @property
    def turn(self) -> tuple[bool, bool]:
        """What tells the order of the passes: what is computed again comes before what is parked, and state last."""
        return self.to is not None, self.what != "saved"


class Draft(NamedTuple):
    """A placement as a person writes it.

    Attributes:
        moves: modules that move, each with where it goes.
        ways: what is stored otherwise.
    """

    moves: tuple[tuple[str, Target], ...] = ()
    ways: tuple[Way, ...] = ()


class Hand(NamedTuple):
    """A draft as a plan.

    Attributes:
        draft: what was written.
        program: placed.
        judged: what its plan comes to.
        says: which plan it is, for a report.
    """

    draft: Draft
    program: Program
    judged: Judged
    says: str


class Drafts:
    """Places a program as drafts say.

    Args:
        program: to be placed.
        levels: of its modules.
        pin: by pattern, where modules have to be.
    """

    def __init__(self, program: Program, levels: Levels, pin: Mapping[str, str | None]) -> None:
        self.program, self.levels, self.pin = program, levels, pin

    def placed(self, draft: Draft) -> Program:
        """The program with the passes of a draft.

        Raises:
            PassError: one of these refuses it.
        """
        found = self.program
        moved = {pattern: _written(to) for to, named in _by_target(draft.moves) for pattern in named}
        if going := {**moved, **self.pin}:
            found = build(ShiftModules, modules=going).recorded(found)
        for way in sorted(draft.ways, key=lambda way: way.turn):
            units, to, kind = way
            if to is None:
                found = build(Recompute, what=self.named(found, units)).recorded(found)
                continue
            if kind != "saved":
                states = [name for unit in units for path in unit for name in self.levels.states[path]]
                away = [name for name in states if goes(to, found.step.blobs[name].device) is not None]
                if away:
                    named, there = states_named(found, away), kind == "updates"
                    found = build(ParkedQuietly, what=named, to=_written(to), update_there=there).recorded(found)
                continue
            paths, taken = [path for unit in units for path in unit], _taken(found)
            what = patterns(paths, taken) + [path for path in paths if not patterns([path], taken)]
            found = build(ParkedQuietly, what=what, to=_written(to)).recorded(found)
        return found

    def named(self, program: Program, units: Sequence[Unit]) -> list[str]:
        """How units that are recomputed are named: modules by patterns, neighbours that are one unit by what they
        save."""
        single, taken = [u[0] for u in units if len(u) == 1 and not self.levels.hands_out(u)], _taken(program)
        found = patterns(single, taken)
        unnamed = [path for path in single if not patterns([path], taken)]
        named = {(path,) for path in single if path not in unnamed}
        storages = [storage for unit in units if unit not in named for storage in self.levels.storages(unit)]
        return [*found, *(storages_named(program, storages, "recompute") if storages else ())]


def says(draft: Draft) -> str:
    """Which plan a draft is."""
    found = [f"{', '.join(named)} on {said(to)}" for to, named in _by_target(draft.moves)]
    for units, to, kind in draft.ways:
        where = "" if to is None else said(to)
        if kind != "saved":
            named = ", ".join(patterns([path for unit in units for path in unit if path])) or "the model"
            updated = ", updated there" if kind == "updates" else ""
            found.append(f"optimizer state of {named} on {where}{updated}")
            continue
        named = ", ".join(patterns([path for unit in units for path in unit]))
        several = max(map(len, units))
        each = f", {several} at a time" if several > 1 else ", each" if len(units) > 1 else ""
        found.append(f"recompute of {named}{each}" if to is None else f"{named} parked on {where}")
    return "; ".join(found) or "as it is"


def choice_of(draft: Draft, grouped: Grouped) -> Choice:
    """What is nearest to a draft among the choices of some groups."""
    problem, going = grouped.problem, dict(draft.moves)
    number = {name: i for i, name in enumerate(problem.devices)}
    stored = {path: to for units, to, what in draft.ways if what == "saved" for unit in units for path in unit}
    states = {path: to for units, to, what in draft.ways if what == "state" for unit in units for path in unit}
    devices, kept, state = [], [], []

    def there(to: Target | None, device: int, otherwise: int) -> int:
        """The number of the device where what a group has on a device goes."""
        if to is None:
            return otherwise
        found = goes(to, Device.parse(problem.devices[device]))
        return KEEP if found is None and not isinstance(to, Device) else number.get(str(found or to), problem.host)

    for units, group in zip(grouped.units, problem.groups, strict=True):
        lineages = [lineage(unit.module) for unit in units]
        at = next((going[path] for line in lineages for path in reversed(line) if path in going), None)
        moved = None if at is None else goes(at, Device.parse(problem.devices[group.now]))
        device = group.now if moved is None else number[str(moved)]
        devices.append(device)
        found = {next((there(stored[p], device, AGAIN) for p in line if p in stored), KEEP) for line in lineages}
        kept.append(found.pop() if len(found) == 1 else KEEP)
        found = {next((there(states[p], device, KEEP) for p in ("", *line) if p in states), KEEP) for line in lineages}
        state.append(found.pop() if len(found) == 1 else KEEP)
    return Choice(tuple(devices), tuple(kept), tuple(state) if states else ())


def _by_target(moves: Sequence[tuple[str, Target]]) -> list[tuple[Target, list[str]]]:
    """By where they go, patterns of the modules that move there."""
    found: dict[Target, list[str]] = defaultdict(list)
    for path, to in moves:
        found[to].append(path)
    return [(to, patterns(paths)) for to, paths in found.items()]


def _written(to: Target) -> str | dict[str, str]:
    """A target as a pass takes it."""
    return str(to) if isinstance(to, Device) else {str(source): str(device) for source, device in to}


def _taken(program: Program) -> set[str]:
    """What passes read as the names of blobs, and not of modules: an activation's without a replica's prefix stands for
    that of every replica."""
    return {base_name(name) for name in program.step.blobs} | program.step.blobs.keys()
