"""How much of each group is where."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ..facts import Reader, Readers, interchangeable, readers_of
from ..linear import Linear
from ..problem import AGAIN, Problem, Value

__all__ = ["KINDS", "Class", "Kind", "Parts", "Terms", "plus", "times"]

Kind: TypeAlias = Literal["keep", "again", "park"]
"""What becomes of what a group saves."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

Terms: TypeAlias = "dict[int, float]"
"""A sum: the weights of variables."""


class Class(NamedTuple):
    """Devices that are alike.

    Attributes:
        devices: which.
        size: how many.
        limit: what each may hold.
    """

    devices: tuple[int, ...]
    size: int
    limit: int | None

    @property
    def one(self) -> int:
        """The first of them."""
        return self.devices[0]


def plus(*sums: Mapping[int, float]) -> Terms:
    """A sum of sums."""
    found: Terms = {}
    for terms in sums:
        for variable, weight in terms.items():
            found[variable] = found.get(variable, 0.0) + weight
    return found


def times(weight: float, terms: Mapping[int, float]) -> Terms:
    """A multiple of a sum."""
    return {variable: weight * each for variable, each in terms.items()}


class Parts:
    """The variables that say how much of each group is where.

    Args:
        lp: where they are added.
        problem: what is placed.

    Attributes:
        classes: of devices.
        readers: by value, who reads it.
        parts: by group, by class and what becomes of what it saves, how much of it.
        away: by group and class, how much of what it saves is parked there.
        same: by pair of groups and class, how much of both is on one device.
    """

    def __init__(self, lp: Linear, problem: Problem) -> None:
        self.lp, self.problem = lp, problem
        self.classes = [Class(tuple(row), len(row), problem.limits[row[0]]) for row in interchangeable(problem)]
        self.readers = [readers_of(problem, value) for value in problem.values]
        self.parts: list[dict[tuple[int, Kind], int]] = []
        self.away: list[dict[int, int]] = []
        self.same: dict[tuple[int, int], dict[int, int]] = {}
        for number in range(len(problem.groups)):
            self._add_group(number)
        for value, readers in zip(problem.values, self.readers, strict=True):
            for reader in readers.others:
                self._add_pair(value.group, reader.group)

    def _add_group(self, number: int) -> None:
        """A group is somewhere, and something becomes of what it saves."""
        lp, group = self.lp, self.problem.groups[number]
        parts: dict[tuple[int, Kind], int] = {}
        for k, alike in enumerate(self.classes):
            if alike.one in group.devices:
                parts[k, "keep"] = lp.variable()
                if AGAIN in group.stored:
                    parts[k, "again"] = lp.variable()
                if any(self._linked(d, stored) for d in alike.devices for stored in group.stored):
                    parts[k, "park"] = lp.variable()
        lp.equal(dict.fromkeys(parts.values(), 1.0), 1.0)
        self.parts.append(parts)
        self.away.append({})
        parked = {part: 1.0 for (_, kind), part in parts.items() if kind == "park"}
        if not parked:
            return
        for k, alike in enumerate(self.classes):
            if alike.one in group.stored:
                self.away[number][k] = away = lp.variable()
                if alike.size == 1:
                    lp.at_most(plus(self.on(number, k), {away: 1.0}), 1.0)
        lp.equal(plus(parked, dict.fromkeys(self.away[number].values(), -1.0)), 0.0)

    def _linked(self, device: int, away: int) -> bool:
        """Whether what is saved on one device can be parked on another one."""
        latency = self.problem.latency
        return away >= 0 and away != device and isfinite(latency[device][away] + latency[away][device])

    def _add_pair(self, a: int, b: int) -> None:
        """Two groups are together on a device at most as far as each of them is there."""
        if (a, b) in self.same:
            return
        found = self.same[a, b] = self.same[b, a] = {}
        for k, alike in enumerate(self.classes):
            here, there = self.on(a, k), self.on(b, k)
            if here and there:
                found[k] = same = self.lp.variable()
                self.lp.at_most(plus({same: 1.0}, times(-1.0, here)), 0.0)
                self.lp.at_most(plus({same: 1.0}, times(-1.0, there)), 0.0)
                if alike.size == 1:
                    self.lp.at_most(plus(here, there, {same: -1.0}), 1.0)

    def on(self, number: int, k: int) -> Terms:
        """How much of a group is on a class."""
        return {part: 1.0 for (at, _), part in self.parts[number].items() if at == k}

    def of(self, number: int, k: int, kind: Kind) -> Terms:
        """How much of a group is on a class with that becoming of what it saves."""
        return {self.parts[number][k, kind]: 1.0} if (k, kind) in self.parts[number] else {}

    def together(self, a: int, b: int, k: int) -> Terms:
        """How much of two groups is on one device of a class."""
        return {self.same[a, b][k]: 1.0} if k in self.same[a, b] else {}

    def apart(self, home: int, reader: int, k: int) -> Terms:
        """How much of a reader is on a class, on a device where what it reads is not."""
        return plus(self.on(reader, k), times(-1.0, self.together(home, reader, k)))

    def is_again(self, value: Value) -> bool:
        """Whether a value may be computed again."""
        return value.again and AGAIN in self.problem.groups[value.group].stored

    @staticmethod
    def is_late(reader: Reader, readers: Readers) -> bool:
        """Whether a group reads what may be parked, but not before it is."""
        return readers.parks and len(reader.late) == len(reader.reads)

    def copied_to(self, value: Value, readers: Readers) -> list[Reader]:
        """The groups to which a value is copied where they are elsewhere, whatever becomes of it."""
        return (
            []
            if self.is_again(value)
            else [one for one in readers.others if one.reads and not self.is_late(one, readers)]
        )

    def crossing(self, sources: Iterable[int], destinations: Iterable[int], nbytes: int) -> float:
        """The seconds that a copy takes at least; 0 where no link is, since no copy can be there."""
        to = list(destinations)
        found = [self.problem.crossing(a, b, nbytes) for a in sources for b in to if a != b]
        return min([seconds for seconds in found if isfinite(seconds)], default=0.0)

    def from_home(self, number: int, k: int, nbytes: int) -> float:
        """The seconds that a copy takes at least, from where a group may be to a class."""
        return self.crossing(self.problem.groups[number].devices, self.classes[k].devices, nbytes)

    def to_home(self, number: int, k: int, nbytes: int) -> float:
        """The seconds that a copy takes at least, from a class to where a group may be."""
        return self.crossing(self.classes[k].devices, self.problem.groups[number].devices, nbytes)
