"""When the tasks and copies of a step are executed, and what devices hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Final, NamedTuple

from graphir.passes.choice.facts import longest, total_seconds
from graphir.passes.choice.problem import AGAIN, Problem

from .chosen import Chosen

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT

__all__ = ["Sent", "Step"]

_TICKS: Final = 10_000_000
"""In the seconds of all tasks, so that what is lost by rounding is some millionths."""

_UNITS: Final = 1 << 20
"""In the largest limit, and in the bytes that all tasks touch: sums of whole bytes would be near what integers hold."""


class Sent(NamedTuple):
    """A copy that may be on a lane.

    Attributes:
        before: the task before which it is issued.
        order: where it stands among those that are issued before that task.
        present: whether it is there.
        start: when it begins.
        ticks: what it takes at least.
    """

    before: int
    order: tuple[int, int]
    present: IntVar
    start: IntVar
    ticks: int


class Step:
    """Tasks in time, lanes that copies share, and bytes by device and task.

    Args:
        cp: where variables and constraints are added.
        problem: what is placed.
        chosen: which choice it is.

    Attributes:
        tick: in seconds.
        unit: in bytes of what devices hold.
        stroke: in bytes of what tasks touch.
        starts: by task.
        ends: by task.
        repeats: by group, when it begins to compute again.
        makespan: when all is done.
        lanes: by destination, the copies of which the place in the order of issue is known.
        live: by device and task, units of bytes and whether they are there.
        received: the same of what copies bring.
        buffers: by device with a limit, units of bytes of its receive buffers.
    """

    def __init__(self, cp: CpModel, problem: Problem, chosen: Chosen) -> None:
        self.cp, self.problem, self.chosen = cp, problem, chosen
        self.tick = total_seconds(problem) / _TICKS
        self.longest = self.ticks(longest(problem)) + 1
        self.unit = max(max([limit for limit in problem.limits if limit], default=0) // _UNITS, 1)
        self.stroke = max(sum(task.touched for task in problem.tasks) // _UNITS, 1)
        self.lanes: dict[int, list[Sent]] = defaultdict(list)
        self.live: dict[tuple[int, int], list[tuple[int, IntVar]]] = defaultdict(list)
        self.received: dict[tuple[int, int], list[tuple[int, IntVar]]] = defaultdict(list)
        limits = {
            d: (limit - problem.held[d]) // self.unit for d, limit in enumerate(problem.limits) if limit is not None
        }
        self.buffers = {d: cp.new_int_var(0, max(most, 0), "") for d, most in limits.items()}
        self.makespan = self.time()
        self.starts = [self.time() for _ in problem.tasks]
        self.ends = [start + self.spent(task) for task, start in enumerate(self.starts)]
        self.repeats: dict[int, IntVar] = {}
        self._follow()
        self._bear()

    def time(self) -> IntVar:
        """A variable that is a time."""
        return self.cp.new_int_var(0, self.longest, "")

    def ticks(self, seconds: float) -> int:
        """So many whole ticks."""
        return int(seconds / self.tick)

    def spent(self, task: int) -> LinearExprT:
        """The ticks that a task takes."""
        seconds, group = self.problem.tasks[task].seconds, self.problem.tasks[task].group
        return sum(self.ticks(seconds[d]) * on for d, on in self.chosen.on[group].items())

    def crossing(self, source: int, destination: int, nbytes: int) -> int | None:
        """The ticks that a copy takes; None: there is no link."""
        seconds = self.problem.crossing(source, destination, nbytes)
        return self.ticks(seconds) if isfinite(seconds) else None

    def implies(self, reasons: Sequence[IntVar]) -> IntVar:
        """A variable that is true if all of some are."""
        found = self.cp.new_bool_var("")
        self.cp.add_bool_or([*[~reason for reason in reasons], found])
        return found

    def _follow(self) -> None:
        """Let tasks begin when those before them on their device are done, and what these compute again."""
        cp, chosen = self.cp, self.chosen
        repeating = {group.again_at: g for g, group in enumerate(self.problem.groups) if chosen.again(g) is not None}
        latest: dict[int, int] = {}
        for position, task in enumerate(self.problem.tasks):
            begin = self.starts[position]
            if position in repeating:
                begin = self.repeats[repeating[position]] = self.time()
                cp.add(self.starts[position] >= begin + self._again_ticks(repeating[position]))
            for group, last in latest.items():
                if group == task.group:
                    cp.add(begin >= self.ends[last])
                elif (same := chosen.same(group, task.group)) is not None:
                    cp.add(begin >= self.ends[last]).only_enforce_if(same)
            latest[task.group] = position
        for last in latest.values():
            cp.add(self.makespan >= self.ends[last])

    def _again_ticks(self, number: int, device: int | None = None) -> LinearExprT:
        """What a group takes to compute again, on a device or anywhere."""
        again = self.problem.groups[number].again
        states = self.chosen.states[number].items()
        return sum(self.ticks(again[d]) * z for (d, stored), z in states if stored == AGAIN and device in (None, d))

    def _bear(self) -> None:
        """A device computes no longer than the step takes: that follows, but the solver does not see it at once."""
        for d in range(len(self.problem.devices)):
            busy = [
                self.ticks(task.seconds[d]) * self.chosen.on[task.group][d]
                for task in self.problem.tasks
                if d in self.chosen.on[task.group]
            ]
            again = [self._again_ticks(number, d) for number in range(len(self.problem.groups))]
            if busy:
                self.cp.add(self.makespan >= sum(busy) + sum(again))

    def hold(self, device: int, first: int, last: int, nbytes: int, there: IntVar) -> None:
        """Bytes that live on a device while some tasks are executed."""
        for position in range(max(first, 0), last + 1):
            self.live[device, position].append((nbytes // self.unit, there))

    def receive(self, device: int, first: int, last: int, nbytes: int, there: IntVar) -> None:
        """Bytes that are received and read on a device."""
        for position in range(first, last + 1):
            self.received[device, position].append((nbytes // self.unit, there))

    def order_lanes(self) -> None:
        """Let copies to a device follow each other, in the order of issue."""
        for sent in self.lanes.values():
            free: IntVar | None = None
            for copy in sorted(sent, key=lambda copy: (copy.before, copy.order)):
                after = self.time()
                if free is not None:
                    self.cp.add(copy.start >= free).only_enforce_if(copy.present)
                    self.cp.add(after >= free)
                self.cp.add(after >= copy.start + copy.ticks).only_enforce_if(copy.present)
                free = after

    def keep_limits(self) -> None:
        """Let no device hold more than its limit."""
        for d, limit in enumerate(self.problem.limits):
            if limit is not None:
                self._keep_limit(d, limit)

    def _keep_limit(self, d: int, limit: int) -> None:
        cp, problem, on, unit = self.cp, self.problem, self.chosen.on, self.unit
        state = sum(group.state // unit * on[g][d] for g, group in enumerate(problem.groups) if d in on[g])
        most = (limit - problem.held[d]) // unit
        for position, task in enumerate(problem.tasks):
            if (d, position) in self.received:
                cp.add(self.buffers[d] >= sum(units * there for units, there in self.received[d, position]))
            live = sum(units * there for units, there in self.live.get((d, position), ()))
            room = task.room // unit * on[task.group][d] if d in on[task.group] else 0
            cp.add(state + live + room + self.buffers[d] <= most)
