"""The figures of a report: a step before and after, of a choice or of a plan that a person would have tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.program import Program

from ..base import Pipeline
from ..emit import instructed
from .asked import Asked, require_pins
from .attempts import Attempt, Attempts
from .drafts import Hand, choice_of
from .places import Reasons, device_map
from .plans import Emitted, Plans
from .report import Balanced, DeviceUse, LinkBytes

__all__ = ["Figures"]


class _After(NamedTuple):
    """What a report says of a placement.

    Attributes:
        program: placed.
        then: the passes that come next.
        peaks: by device, what it holds.
        seconds: of a step.
        busy: by device, the seconds for which it computes.
        crossing: by source and destination, the bytes that are copied.
        exact: whether peaks and seconds are those of an emitted plan.
    """

    program: Program
    then: str
    peaks: Mapping[str, int]
    seconds: float
    busy: Mapping[str, float]
    crossing: Mapping[tuple[str, str], int]
    exact: bool = True


class Figures:
    """Makes the report of a placement.

    Args:
        asked: what the caller asked.
        pins: by module or by name of state, the device where it has to be.
        searches: that were made.
        plans: of the program.
    """

    def __init__(self, asked: Asked, pins: Mapping[str, Device], searches: Attempts, plans: Plans) -> None:
        self.asked, self.pins, self.searches, self.plans = asked, pins, searches, plans

    def report(self, attempt: Attempt, best: Emitted, attempts: Sequence[Attempt]) -> Balanced:
        """The placement before and after."""
        problem, outcomes = attempt.problem, attempt.outcomes
        now, then = outcomes(problem.now()), outcomes(best.choice)
        exact = bool(best.peaks)
        if exact:
            before = self.plans.of(attempt.grouped, problem.now())
            peaks, seconds = (before.peaks, best.peaks), (before.seconds, best.seconds)
        else:
            peaks = problem.named(now.peaks), problem.named(then.peaks)
            seconds = now.seconds, then.seconds
        crossing = {(problem.devices[a], problem.devices[b]): nbytes for (a, b), nbytes in then.crossing.items()}
        busy = problem.named(then.busy)
        after = _After(best.program, best.then, peaks[1], seconds[1], busy, crossing, exact)
        reasons = Reasons(problem, best.choice, [one.grouped.problem for one in attempts], then.peaks)
        return self.reported(attempt, peaks[0], seconds[0], after, reasons)

    def report_by_hand(self, hand: Hand, attempts: Sequence[Attempt]) -> Balanced:
        """The same of a plan that a person would have tried, in its fastest order."""
        attempt, judged = attempts[0], hand.judged
        problem = attempt.problem
        before = self.plans.of(attempt.grouped, problem.now())
        found = self.plans.estimate(instructed(judged.made))
        busy = {use.lane.partition(".")[0]: use.busy for use in found.lanes if use.lane.endswith(".compute")}
        crossing = {(link.source, link.destination): link.nbytes for link in found.links}
        after = _After(hand.program, judged.then, judged.peaks, judged.seconds, busy, crossing)
        held = [judged.peaks.get(name, 0) for name in problem.devices]
        problems = [one.grouped.problem for one in attempts]
        reasons = Reasons(problem, choice_of(hand.draft, attempt.grouped), problems, held, hand.says)
        return self.reported(attempt, before.peaks, before.seconds, after, reasons)

    def reported(
        self, attempt: Attempt, held: Mapping[str, int], seconds: float, after: _After, reasons: Reasons
    ) -> Balanced:
        """A report of what was before, with what it held and its seconds, and *after*."""
        require_pins(after.program, self.pins)
        problem = attempt.problem
        now = attempt.outcomes(problem.now())
        busy = problem.named(now.busy)
        limits = problem.named(problem.limits)
        uses = [
            DeviceUse(
                name, limits[name], held.get(name, 0), after.peaks.get(name, 0), busy[name], after.busy.get(name, 0)
            )
            for name in problem.devices
            if name in self.asked.limits or held.get(name) or after.peaks.get(name)
        ]
        crossing = {(problem.devices[a], problem.devices[b]): nbytes for (a, b), nbytes in now.crossing.items()}
        pairs = dict.fromkeys([*crossing, *after.crossing])
        links = [LinkBytes(*pair, crossing.get(pair, 0), after.crossing.get(pair, 0)) for pair in pairs]
        text = " | ".join(after.program.history[len(self.asked.program.history) :])
        if text:
            Pipeline(text)  # what is printed can be read back
        return Balanced(
            program=after.program,
            machine=self.asked.topology.about,
            measured=self.asked.topology.measured,
            limits=self.asked.limits,
            pipeline=text,
            then=after.then,
            devices=tuple(uses),
            links=tuple(links),
            before=seconds,
            after=after.seconds,
            exact=after.exact,
            evaluated=self.searches.evaluated,
            device_map=device_map(after.program, attempt.grouped),
            reasons=reasons,
        )
