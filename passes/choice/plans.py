"""What a placement comes to as a plan: what each device holds, and how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from math import inf
from typing import Final, NamedTuple, get_args

from graphir.analysis.estimate import Estimate, estimated
from graphir.analysis.execution import ONE_THREAD, THREADS, streams_of
from graphir.analysis.memory import memory
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.errors import PassError
from graphir.ir.device import CPU, Device
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan
from graphir.ir.program import Program

from ..base import build
from ..copies import InjectCopies
from ..emit import instructed
from ..pipeline import PipelineSchedule, Schedules, tried
from ..storage import ShareStorage
from .groups import Grouped
from .moves import back_late, placed
from .problem import Choice

__all__ = ["Emitted", "Judged", "Plans"]

_OWN: Final = tuple(get_args(Schedules))
"""The schedules whose own order may be faster than the one that is found within the limits."""

_FLOWING: Final = 5
"""How many times as long it takes to make a plan whose micro-batches flow."""


class Judged(NamedTuple):
    """What a placed program comes to as a plan.

    Attributes:
        then: the passes that come after the placement, as text.
        peaks: by device, what the plan holds.
        seconds: of a step; infinite where they were not asked for.
        made: the program with these passes.
        busy: by device, the seconds for which it computes, where the seconds of a step are known.
        crossing: likewise, by source and destination the bytes that are copied.
    """

    then: str
    peaks: Mapping[str, int]
    seconds: float
    made: Program
    busy: Mapping[str, float] = {}
    crossing: Mapping[tuple[str, str], int] = {}


class Emitted(NamedTuple):
    """A choice that was made.

    Attributes:
        program: placed.
        then: the passes that come next, as text.
        peaks: by device, what its plan holds; nothing where it was not emitted.
        seconds: of a step.
        made: the program with these passes; None where it was not emitted.
    """

    choice: Choice
    program: Program
    then: str
    peaks: Mapping[str, int] = {}
    seconds: float = 0.0
    made: Program | None = None


class Filled(NamedTuple):
    """What fills a device at its peak.

    Attributes:
        operator: that runs then; None where none does.
        program: whose it is.
        held: bytes by category, the most first.
    """

    operator: Operator | None
    program: Program
    held: Sequence[tuple[str, int]]


class Plans:
    """Plans of one program.

    Args:
        program: that is placed.
        limits: by device, within which its micro-batches flow.
        topology: where it would run.
        named: the topology that was asked for, which the order of micro-batches is to be found for again; None: the
            machine at hand.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.
        flows: whether it has several micro-batches.
        shares: whether operators may overwrite what nobody reads any more, where a plan would exceed the limits.

    Attributes:
        rooms: by device, the most bytes that it may hold: its limit; of a host without limit, its memory if that is
            known.
        emitted: how many plans were.
        now: the program as it is, as a choice, if that is known.
        slowest: seconds that one plan took to be made at most, by whether it has more devices than the program.
        spent: seconds that all took.
    """

    def __init__(
        self,
        program: Program,
        limits: Mapping[Device, int],
        topology: Topology,
        named: Topology | None,
        profile: Profile | None,
        threads: int,
        flows: bool,
        shares: bool = False,
    ) -> None:
        self.program, self.limits, self.topology = program, limits, topology
        self.named, self.profile, self.threads = named, profile, threads
        self.flows, self.shares = flows, shares
        memory = topology.speed(CPU).memory
        host = {} if memory is None else {str(CPU): memory}
        self.rooms = {**host, **{str(device): limit for device, limit in limits.items()}}
        self.emitted = 0
        self.now: Emitted | None = None
        self.slowest: dict[bool, float] = {}
        self.spent = 0.0

    @cached_property
    def as_it_is(self) -> Judged:
        """What the program as it is comes to."""
        return self.judged(self.program)

    def of(self, grouped: Grouped, choice: Choice) -> Emitted:
        """A choice made, and what its plan comes to; that of the program as it is, whatever its groups, once."""
        if choice != grouped.problem.now():
            return self.made(grouped, choice)
        if self.now is None:
            self.now = self.made(grouped, choice)
        return self.now._replace(choice=choice)

    def made(self, grouped: Grouped, choice: Choice) -> Emitted:
        """The same, anew."""
        program = placed(self.program, grouped, choice)
        judged = self.as_it_is if program is self.program else self.judged(program)
        return Emitted(choice, program, *judged[:4])

    def later(self, program: Program, peaks: Mapping[str, int]) -> tuple[Program, Judged] | None:
        """A placed program whose plan holds *peaks*, with what is parked back late, and what that comes to; None where
        it holds no less beyond the limits."""
        excess = self.excess(peaks)
        late = back_late(self.program, program) if excess else None
        if late is None:
            return None
        judged = self.judged(late, timed=False)
        return (late, judged) if self.excess(judged.peaks) < excess else None

    def judged(self, program: Program, *, timed: bool = True) -> Judged:
        """What a placed program comes to: with shared storage where its plan would exceed the limits. What exceeds them
        all the same is *timed* where that is asked for."""
        begun = time.perf_counter()
        copied = InjectCopies().recorded(program)
        limits = {str(device): limit for device, limit in self.limits.items() if device in set(copied.devices)}
        found = self.flowing(copied, build(PipelineSchedule, limits=limits, topology=self.named))
        judged = self.sharing(*next(found, (copied, str(InjectCopies()))), timed=timed)
        crosses = len(copied.devices) > len(self.program.devices)
        took = time.perf_counter() - begun
        self.slowest[crosses] = max(self.slowest.get(crosses, 0.0), took)
        self.spent += took
        return judged

    @property
    def seconds(self) -> float:
        """How long one plan takes to be made, at most. Micro-batches that flow are looked at in many orders."""
        alone = self.slowest.get(False, 0.0)
        return self.slowest.get(True, alone * _FLOWING if self.flows else alone)

    def fastest(self, one: Emitted, late: Callable[[], bool]) -> Emitted:
        """An emitted choice in the fastest order of its micro-batches that keeps within the limits; see
        :meth:`in_any_order`."""
        if not self.flows or one.made is None:
            return one
        judged = Judged(one.then, one.peaks, one.seconds, one.made)
        return Emitted(one.choice, one.program, *self.in_any_order(one.program, judged, late)[:4])

    def in_any_order(self, program: Program, judged: Judged, late: Callable[[], bool]) -> Judged:
        """What a placed program comes to in the fastest order that keeps within the limits: the one that was *judged*,
        or a schedule's own. No more schedules are tried once it is *late*."""
        found = [judged]
        if self.flows and not late():
            orders = [build(PipelineSchedule, schedule=schedule, topology=self.named) for schedule in _OWN]
            for own in self.flowing(InjectCopies().recorded(program), *orders):
                found.append(self.sharing(*own, timed=False))
                if late():
                    break
        return min(found, key=lambda one: (self.excess(one.peaks), one.seconds))

    def over(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """By how many bytes devices exceed their limits, those that do."""
        found = {device: peaks.get(device, 0) - room for device, room in self.rooms.items()}
        return {name: more for name, more in found.items() if more > 0}

    def excess(self, peaks: Mapping[str, int]) -> int:
        """The bytes by which devices exceed their limits, together."""
        return sum(self.over(peaks).values())

    def factor(self, peaks: Mapping[str, int]) -> float:
        """What limits have to be multiplied by so that some peaks are within them; 1 if they are."""
        return max([1.0, *[peaks.get(device, 0) / room for device, room in self.rooms.items()]])

    def sharing(self, copied: Program, then: str, *, timed: bool) -> Judged:
        """A program with its copies as a plan, or with shared storage where that is allowed and holds less beyond the
        limits."""
        found, plan = self.planned(copied, then)
        if self.shares and (excess := self.excess(found.peaks)):
            shared = ShareStorage().recorded(copied)
            if shared.step is not copied.step:
                other, its_plan = self.planned(shared, f"{then} | {ShareStorage()}")
                found, plan = (other, its_plan) if self.excess(other.peaks) < excess else (found, plan)
        return self.timed(found, plan) if timed or not self.excess(found.peaks) else found

    def filled(self, made: Program, device: str) -> Filled:
        """What fills a device where the plan of a program with its copies holds the most there."""
        plan = instructed(made)
        found = memory(plan, threads=self.threads, profile=self.profile)
        position = plan.instructions[found.peak_position(device)].op
        held = sorted(found.at_peak[device].items(), key=lambda pair: -pair[1])
        return Filled(None if position < 0 else plan.step.ops[position], plan.program, held)

    def planned(self, copied: Program, then: str) -> tuple[Judged, Plan]:
        """The plan of a program with its copies, and what it holds."""
        plan = instructed(copied)
        self.emitted += 1
        held = memory(plan, threads=self.threads, profile=self.profile).peak
        return Judged(then, {str(device): nbytes for device, nbytes in held.items()}, inf, copied), plan

    def timed(self, judged: Judged, plan: Plan) -> Judged:
        """The same with the seconds of a step."""
        found = self.estimate(plan)
        busy = {use.lane.partition(".")[0]: use.busy for use in found.lanes if use.lane.endswith(".compute")}
        crossing = {(link.source, link.destination): link.nbytes for link in found.links}
        return judged._replace(seconds=found.seconds, busy=busy, crossing=crossing)

    def estimate(self, plan: Plan) -> Estimate:
        """What a step of a plan would take, in the way to execute it that is the fastest."""
        executions = (streams_of(self.topology),) if self.topology.host is None else (ONE_THREAD, THREADS)
        found = [
            estimated(plan, self.topology, execution, plan.dims, self.profile, self.threads) for execution in executions
        ]
        return min(found, key=lambda estimate: estimate.seconds)

    def flowing(self, copied: Program, *orders: PipelineSchedule) -> Iterator[tuple[Program, str]]:
        """A program with its copies in one order of its micro-batches after the other, and the passes so far; nothing
        where nothing flows, and of each order that does not keep within its limits."""
        if not self.flows:
            return
        with suppress(PassError):
            for order, found in tried(copied, orders, self.topology):
                yield found.with_(history=(*copied.history, str(order))), f"{InjectCopies()} | {order}"
