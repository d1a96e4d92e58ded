"""Plans as a person writes them: as passes over the program, as text, and as a choice of the groups of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from graphir.ir.device import Device
from graphir.ir.module_patterns import lineage
from graphir.ir.program import Program

from ..base import build
from ..recompute import Recompute
from ..shift_modules import ShiftModules
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
        to: where it is parked; None: it is computed again.
        what: ``saved`` activations; ``state``; or state with its ``updates``, which run where it is parked.
    """

    units: tuple[Unit, ...] = ()
    to: Device | None = None
    what: Literal["saved", "state", "updates"] = "saved"

    @property
    def turn(self) -> tuple[bool, bool]:
        """What tells the order of the passes: what is computed again comes before what is parked, and state last."""
        return self.to is not None, self.what != "saved"


class Draft(NamedTuple):
    """A placement as a person writes it.

    Attributes:
        moves: modules that move, each with its device.
        ways: what is stored otherwise.
    """

    moves: tuple[tuple[str, Device], ...] = ()
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
        moved = {pattern: str(device) for device, named in _by_device(draft.moves) for pattern in named}
        if going := {**moved, **self.pin}:
            found = build(ShiftModules, modules=going).recorded(found)
        for way in sorted(draft.ways, key=lambda way: way.turn):
            units, to, kind = way
            if to is None:
                found = build(Recompute, what=self.named(found, units)).recorded(found)
                continue
            if kind != "saved":
                states = [name for unit in units for path in unit for name in self.levels.states[path]]
                away = [name for name in states if found.step.blobs[name].device != to]
                if away:
                    named, there = states_named(found, away), kind == "updates"
                    found = build(ParkedQuietly, what=named, to=str(to), update_there=there).recorded(found)
                continue
            paths, taken = [path for unit in units for path in unit], found.step.blobs
            what = patterns(paths, taken) + [path for path in paths if not patterns([path], taken)]
            found = build(ParkedQuietly, what=what, to=str(to)).recorded(found)
        return found

    def named(self, program: Program, units: Sequence[Unit]) -> list[str]:
        """How units that are recomputed are named: modules by patterns, neighbours that are one unit by what they
        save."""
        single = [unit[0] for unit in units if len(unit) == 1 and not self.levels.hands_out(unit)]
        found = patterns(single, program.step.blobs)
        unnamed = [path for path in single if not patterns([path], program.step.blobs)]
        named = {(path,) for path in single if path not in unnamed}
        storages = [storage for unit in units if unit not in named for storage in self.levels.storages(unit)]
        return [*found, *(storages_named(program, storages, "recompute") if storages else ())]


def says(draft: Draft) -> str:
    """Which plan a draft is."""
    said = [f"{', '.join(named)} on {device}" for device, named in _by_device(draft.moves)]
    for units, to, kind in draft.ways:
        if kind != "saved":
            named = ", ".join(patterns([path for unit in units for path in unit if path])) or "the model"
            updated = ", updated there" if kind == "updates" else ""
            said.append(f"optimizer state of {named} on {to}{updated}")
            continue
        named = ", ".join(patterns([path for unit in units for path in unit]))
        several = max(map(len, units))
        each = f", {several} at a time" if several > 1 else ", each" if len(units) > 1 else ""
        said.append(f"recompute of {named}{each}" if to is None else f"{named} parked on {to}")
    return "; ".join(said) or "as it is"


def choice_of(draft: Draft, grouped: Grouped) -> Choice:
    """What is nearest to a draft among the choices of some groups."""
    problem, going = grouped.problem, dict(draft.moves)
    number = {name: i for i, name in enumerate(problem.devices)}
    stored = {
        path: AGAIN if to is None else number.get(str(to), problem.host)
        for units, to, what in draft.ways
        if what == "saved"
        for unit in units
        for path in unit
    }
    states = {
        path: number.get(str(to), problem.host)
        for units, to, what in draft.ways
        if what == "state"
        for unit in units
        for path in unit
    }
    devices, kept, state = [], [], []
    for units, group in zip(grouped.units, problem.groups, strict=True):
        lineages = [lineage(unit.module) for unit in units]
        at = next((going[path] for line in lineages for path in reversed(line) if path in going), None)
        devices.append(group.now if at is None else number[str(at)])
        found = {next((stored[path] for path in line if path in stored), KEEP) for line in lineages}
        kept.append(found.pop() if len(found) == 1 else KEEP)
        found = {next((states[path] for path in ("", *line) if path in states), KEEP) for line in lineages}
        state.append(found.pop() if len(found) == 1 else KEEP)
    return Choice(tuple(devices), tuple(kept), tuple(state) if states else ())


def _by_device(moves: Sequence[tuple[str, Device]]) -> list[tuple[Device, list[str]]]:
    """By device, patterns of the modules that move there."""
    found: dict[Device, list[str]] = defaultdict(list)
    for path, device in moves:
        found[device].append(path)
    return [(device, patterns(paths)) for device, paths in found.items()]
