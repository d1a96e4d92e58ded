"""Which choice a model stands for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING

from graphir.passes.choice.facts import interchangeable
from graphir.passes.choice.problem import AGAIN, KEEP, Choice, Problem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

__all__ = ["Chosen"]


class Chosen:
    """The variables that say which choice it is.

    Args:
        cp: where they are added.
        problem: what is placed.

    Attributes:
        states: by group, by device and what becomes there of what it saves: whether it is so.
        on: by group and device, whether it is there.
    """

    def __init__(self, cp: CpModel, problem: Problem) -> None:
        self.cp, self.problem = cp, problem
        self.states: list[dict[tuple[int, int], IntVar]] = []
        self.on: list[dict[int, IntVar]] = []
        self._same: dict[tuple[int, int], IntVar] = {}
        self._sums: dict[tuple[IntVar, ...], IntVar] = {}
        for number in range(len(problem.groups)):
            self._add(number)
        self._break_symmetry()

    def _add(self, number: int) -> None:
        cp, group, latency = self.cp, self.problem.groups[number], self.problem.latency
        states = {}
        for d in group.devices:
            for stored in dict.fromkeys((KEEP, *group.stored)):
                linked = stored < 0 or isfinite(latency[d][stored] + latency[stored][d])
                if stored != d and linked:
                    states[d, stored] = cp.new_bool_var(f"group {number} on {d}, {stored}")
        cp.add_exactly_one(states.values())
        self.states.append(states)
        self.on.append({})
        for d in group.devices:
            on = self.one_of([z for (at, _), z in states.items() if at == d])
            assert on is not None  # it can be kept there
            self.on[number][d] = on

    def _break_symmetry(self) -> None:
        """Of choices that differ in the names of devices that are alike, leave one: a device is used only by groups
        behind the first one on the device before it."""
        for members in interchangeable(self.problem):
            for a, b in pairwise(members):
                for number, on in enumerate(self.on):
                    if b in on:
                        self.cp.add_bool_or([~on[b], *[self.on[k][a] for k in range(number) if a in self.on[k]]])

    def one_of(self, row: Sequence[IntVar]) -> IntVar | None:
        """Whether one of some holds, of which no two do; None if there are none."""
        if len(row) <= 1:
            return row[0] if row else None
        key = tuple(row)
        if key not in self._sums:
            self._sums[key] = found = self.cp.new_bool_var("")
            self.cp.add(sum(row) == found)
        return self._sums[key]

    def parked_from(self, number: int, device: int) -> IntVar | None:
        """Whether a group is on a device and what it saves is parked elsewhere."""
        return self.one_of([z for (d, stored), z in self.states[number].items() if d == device and stored >= 0])

    def parked_at(self, number: int, device: int) -> IntVar | None:
        """Whether what a group saves is parked on a device."""
        return self.one_of([z for (_, stored), z in self.states[number].items() if stored == device])

    def parked(self, number: int) -> IntVar | None:
        """Whether what a group saves is parked."""
        return self.one_of([z for (_, stored), z in self.states[number].items() if stored >= 0])

    def again(self, number: int) -> IntVar | None:
        """Whether a group computes again."""
        return self.one_of([z for (_, stored), z in self.states[number].items() if stored == AGAIN])

    def same(self, a: int, b: int) -> IntVar | None:
        """Whether two groups are on one device; None: they cannot be."""
        a, b = min(a, b), max(a, b)
        common = [d for d in self.on[a] if d in self.on[b]]
        if not common:
            return None
        if (a, b) not in self._same:
            found = self._same[a, b] = self.cp.new_bool_var(f"groups {a} and {b} together")
            for one, other in ((a, b), (b, a)):
                for d, here in self.on[one].items():
                    if d not in common:
                        self.cp.add_implication(here, ~found)
                        continue
                    self.cp.add_bool_or([~here, self.on[other][d], ~found])
                    self.cp.add_bool_or([~here, ~self.on[other][d], found])
        return self._same[a, b]

    def literals(self, choice: Choice) -> Iterator[IntVar]:
        """What holds of one choice alone."""
        for states, device, stored in zip(self.states, choice.devices, choice.stored, strict=True):
            yield states[device, KEEP if stored == device else stored]

    def forbid(self, choice: Choice) -> None:
        """Exclude one choice."""
        self.cp.add_bool_or([~literal for literal in self.literals(choice)])

    def has(self, choice: Choice) -> bool:
        """Whether the model may stand for a choice."""
        chosen = zip(self.states, choice.devices, choice.stored, strict=True)
        return all((device, KEEP if stored == device else stored) in states for states, device, stored in chosen)

    def choice(self, solver: CpSolver) -> Choice:
        """The choice of a solution."""
        pairs = [next(key for key, z in states.items() if solver.boolean_value(z)) for states in self.states]
        return Choice(tuple([device for device, _ in pairs]), tuple([stored for _, stored in pairs]))
