"""What devices hold in a linear program: at each of some tasks no more than their limits.

Of what is parked elsewhere it is not known when it comes home. Meanwhile it is in one of two places, so that it counts
for all devices with a limit together where it is parked on one of these.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Final, Literal, TypeAlias

from ..facts import Readers
from ..problem import AGAIN, Problem, Value
from .parts import KINDS, Kind, Parts, Terms, plus, times

__all__ = ["Bytes", "Goal", "fewest_devices", "turns"]

Goal: TypeAlias = Literal["limits", "factor"]
"""Whether limits are kept, or multiplied by one factor."""

_TURNS: Final = 24
"""At how many tasks it is looked at what devices hold: those at which most may be held."""

_LARGEST: Final = 1e3
"""How many times all bytes of a step buffers take at most: bounds need bounds of variables."""

_MOST_FACTOR: Final = 1e9
"""By what limits are multiplied at most."""


class Bytes:
    """The rows of a linear program that say what devices hold, in parts of all bytes of the step.

    Args:
        parts: how much of each group is where.
        goal: what becomes of limits.

    Attributes:
        factor: by what limits are multiplied, where they are.
        unit: all bytes of the step.
    """

    def __init__(self, parts: Parts, goal: Goal) -> None:
        self.parts, self.lp, self.problem = parts, parts.lp, parts.problem
        state = sum(self.problem.held) + sum(group.stays for group in self.problem.groups)
        self.unit = float(max(state + sum(value.nbytes for value in self.problem.values), 1))
        self.factor = self.lp.variable(0.0, _MOST_FACTOR) if goal == "factor" else -1
        self.longer: dict[tuple[int, int, int], Terms] = {}
        self.limited = [k for k, alike in enumerate(parts.classes) if alike.limit is not None]
        if not self.limited:
            return
        self.buffers = {k: self.lp.variable(0.0, _LARGEST) for k in self.limited}
        for position in turns(self.problem, max(_TURNS // 2, 2 * _TURNS // len(parts.classes))):
            self._add_turn(position)

    def _add_turn(self, position: int) -> None:
        """What devices hold at a task."""
        held, received = self._held(position), self._received(position)
        for k in self.limited:
            self.lp.at_most(plus(received[k], {self.buffers[k]: -1.0}), 0.0)
        rows = {k: self._row(k, position, held[k]) for k in self.limited}
        for k, row in rows.items():
            self.lp.at_most(row, self._most([k]))
        parked = self._parked(position)
        if parked:
            self.lp.at_most(plus(*rows.values(), parked), self._most(self.limited))

    def _row(self, k: int, position: int, held: Terms) -> Terms:
        """What a class holds at a task beyond what it holds whatever is chosen, less what its limits may grow by."""
        parts, task, groups = self.parts, self.problem.tasks[position], self.problem.groups
        state = {number: group.stays / self.unit for number, group in enumerate(groups)}
        terms = [times(nbytes, parts.on(number, k)) for number, nbytes in state.items()]
        terms.append(times(task.room / self.unit, parts.on(task.group, k)))
        alike = parts.classes[k]
        grows: Terms = {}
        if self.factor >= 0:
            grows[self.factor] = -alike.size * (alike.limit or 0) / self.unit
        return plus(*terms, held, {self.buffers[k]: 1.0}, grows)

    def _most(self, classes: list[int]) -> float:
        """What some classes may hold beyond what they hold whatever is chosen."""
        most = 0.0
        for k in classes:
            alike = self.parts.classes[k]
            limit = 0 if self.factor >= 0 else alike.limit or 0
            most += sum(limit - self.problem.held[device] for device in alike.devices) / self.unit
        return most

    def _held(self, position: int) -> dict[int, Terms]:
        """By class, what lives there at a task."""
        parts = self.parts
        found: dict[int, list[Terms]] = {k: [] for k in self.limited}
        nbytes: dict[tuple[int, Kind], float] = defaultdict(float)
        for value, readers in zip(self.problem.values, parts.readers, strict=True):
            size = value.nbytes / self.unit
            for kind in KINDS:
                if _lives(self.problem, value, readers, kind, position):
                    nbytes[value.group, kind] += size
            other = _longest_reader(self.problem, value, readers, position)
            if other >= 0:
                for k in self.limited:
                    found[k].append(times(size, self._kept_together(value, readers, other, k)))
        for (number, kind), size in nbytes.items():
            for k in self.limited:
                found[k].append(times(size, parts.of(number, k, kind)))
        return {k: plus(*terms) for k, terms in found.items()}

    def _kept_together(self, value: Value, readers: Readers, other: int, k: int) -> Terms:
        """How much of a value is kept on the device of a class where another group reads it."""
        parts, number = self.parts, value.group
        together = parts.together(number, other, k)
        parked = parts.of(number, k, "park") if readers.parks else {}
        if not together or not parked:
            return together
        if (number, other, k) not in self.longer:
            found = self.lp.variable()
            self.lp.at_most(plus(together, times(-1.0, parked), {found: -1.0}), 0.0)
            self.longer[number, other, k] = {found: 1.0}
        return self.longer[number, other, k]

    def _received(self, position: int) -> dict[int, Terms]:
        """By class, what is received there by a task and still read after it."""
        found: dict[int, list[Terms]] = {k: [] for k in self.limited}
        for value, readers in zip(self.problem.values, self.parts.readers, strict=True):
            others = [one for one in self.parts.copied_to(value, readers) if one.reads[0] <= position <= one.reads[-1]]
            if others:
                for k in self.limited:
                    apart = self.parts.apart(value.group, others[0].group, k)
                    found[k].append(times(value.nbytes / self.unit, apart))
        return {k: plus(*terms) for k, terms in found.items()}

    def _parked(self, position: int) -> Terms:
        """What is parked on devices with limits, and is either there or home again."""
        found: Terms = {}
        for value, readers in zip(self.problem.values, self.parts.readers, strict=True):
            if readers.parks and readers.own.late and readers.leaves < position < readers.own.late[0]:
                for k, part in self.parts.away[value.group].items():
                    if k in self.limited and self._stays(value, k):
                        found[part] = found.get(part, 0.0) + value.nbytes / self.unit
        return found

    def _stays(self, value: Value, k: int) -> bool:
        """Whether what is parked on a class comes home to a device with a limit."""
        return all(self.problem.limits[device] is not None for device in self.problem.groups[value.group].devices)


def _lives(problem: Problem, value: Value, readers: Readers, kind: Kind, position: int) -> bool:
    """Whether a value is at home at a task, wherever other groups are."""
    made, group = max(value.made, 0), problem.groups[value.group]
    last = len(problem.tasks) - 1 if value.lasts else -1
    if position < made:
        return False
    if kind == "again" and value.again:
        before = max([made, *[read for read in value.reads if read < group.again_at]])
        return position <= before or group.again_at <= position <= max([last, *value.reads])
    if kind == "park" and readers.parks:
        late = readers.own.late
        return position <= readers.leaves or bool(late and late[0] <= position <= late[-1])
    if not value.counted:
        return False
    again = group.again_at if kind == "again" and readers.own.rebuilds else -1
    first = min([one.reads[0] for one in readers.others if one.reads], default=-1)
    return position <= max([made, last, again, first, *readers.own.reads])


def _longest_reader(problem: Problem, value: Value, readers: Readers, position: int) -> int:
    """A group for which a value is still at home at a task if it is there too and the value is kept; -1: there is none,
    or the value is at home anyway."""
    if not value.counted or position < value.made or (value.again and AGAIN in problem.groups[value.group].stored):
        return -1
    if any(_lives(problem, value, readers, kind, position) for kind in KINDS):
        return -1
    later = [one for one in readers.others if one.reads and one.reads[-1] >= position]
    return max(later, key=lambda one: one.reads[-1]).group if later else -1


def turns(problem: Problem, count: int = _TURNS) -> list[int]:
    """Some tasks at which most may be held: where it is more than at the tasks before and after, then others."""
    change = [0] * (len(problem.tasks) + 1)
    for value in problem.values:
        end = len(problem.tasks) - 1 if value.lasts else max([value.made, *value.reads])
        change[max(value.made, 0)] += value.nbytes
        change[end + 1] -= value.nbytes
    live = [now + task.room for now, task in zip(accumulate(change), problem.tasks, strict=False)]
    around = zip(live, [0, *live], [*live[1:], 0], strict=False)
    edges = [now >= before and now >= after for now, before, after in around]
    return sorted(sorted(range(len(live)), key=lambda i: (not edges[i], -live[i]))[:count])


def fewest_devices(parts: Parts) -> int:
    """How many devices are used at least: so many that their limits hold what has to be somewhere."""
    problem = parts.problem
    most = max([_somewhere(parts, position) for position in turns(problem)], default=0)
    most += sum(group.stays for group in problem.groups)
    limited = list(zip(problem.limits, problem.held, strict=True))[: problem.host]
    rooms = sorted([float("inf") if limit is None else float(limit - held) for limit, held in limited], reverse=True)
    enough = [used for used, holds in enumerate(accumulate(rooms), 1) if holds >= most]
    return enough[0] if enough else max(len(rooms), 1)


def _somewhere(parts: Parts, position: int) -> int:
    """Bytes that groups hold at a task where they are, whatever becomes of what they save."""
    problem = parts.problem
    nbytes: dict[tuple[int, Kind], int] = defaultdict(int)
    for value, readers in zip(problem.values, parts.readers, strict=True):
        for kind in KINDS:
            if _lives(problem, value, readers, kind, position):
                nbytes[value.group, kind] += value.nbytes
    least = [min(nbytes[number, kind] for _, kind in row) for number, row in enumerate(parts.parts)]
    return sum(least) + problem.tasks[position].room
