"""The figures of a report: a step before and after, of a choice or of a plan that a person would have tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.program import Program

from ..base import Pipeline
from .asked import Asked, require_pins
from .attempts import Attempt, Attempts
from .drafts import Hand, choice_of
from .groups import Grouped
from .outcome import Outcomes
from .places import Reasons, device_map
from .plans import Emitted, Plans
from .problem import Problem
from .report import Balanced, DeviceUse, LinkBytes

__all__ = ["Before", "Figures"]


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


class Before(NamedTuple):
    """What a report says of the step as it was.

    Attributes:
        peaks: by device, what it holds.
        seconds: of a step.
        busy: by device, the seconds for which it computes.
        crossing: by source and destination, the bytes that are copied.
    """

    peaks: Mapping[str, int]
    seconds: float
    busy: Mapping[str, float]
    crossing: Mapping[tuple[str, str], int]


class Figures:
    """Makes the report of a placement.

    Args:
        asked: what the caller asked.
        pins: by module or by name of state, the device where it has to be.
        searches: that were made.
        plans: of the program.
        since: the step as it was, where that is not the program as it is.
    """

    def __init__(
        self, asked: Asked, pins: Mapping[str, Device], searches: Attempts, plans: Plans, since: Before | None
    ) -> None:
        self.asked, self.pins, self.searches, self.plans, self.since = asked, pins, searches, plans, since

    def before(self, grouped: Grouped, outcomes: Outcomes, *, exact: bool) -> Before:
        """The step as it was, of a plan if that is to be *exact*."""
        if self.since is not None:
            return self.since
        problem = grouped.problem
        now = outcomes(problem.now())
        peaks: Mapping[str, int] = problem.named(now.peaks)
        seconds = now.seconds
        if exact:
            plan = self.plans.of(grouped, problem.now())
            peaks, seconds = plan.peaks, plan.seconds
        return Before(peaks, seconds, problem.named(now.busy), _named(problem, now.crossing))

    def report(self, attempt: Attempt, best: Emitted, attempts: Sequence[Attempt]) -> Balanced:
        """The placement before and after."""
        problem, then = attempt.problem, attempt.outcomes(best.choice)
        exact = bool(best.peaks)
        peaks, seconds = (best.peaks, best.seconds) if exact else (problem.named(then.peaks), then.seconds)
        crossing, busy = _named(problem, then.crossing), problem.named(then.busy)
        after = _After(best.program, best.then, peaks, seconds, busy, crossing, exact)
        reasons = Reasons(problem, best.choice, [one.grouped.problem for one in attempts], then.peaks)
        return self.reported(attempt, after, reasons)

    def report_by_hand(self, hand: Hand, attempts: Sequence[Attempt]) -> Balanced:
        """The same of a plan that a person would have tried, in its fastest order."""
        attempt, judged = attempts[0], hand.judged
        problem = attempt.problem
        after = _After(hand.program, judged.then, judged.peaks, judged.seconds, judged.busy, judged.crossing)
        held = [judged.peaks.get(name, 0) for name in problem.devices]
        problems = [one.grouped.problem for one in attempts]
        reasons = Reasons(problem, choice_of(hand.draft, attempt.grouped), problems, held, hand.says)
        return self.reported(attempt, after, reasons)

    def reported(self, attempt: Attempt, after: _After, reasons: Reasons) -> Balanced:
        """A report of the step as it was and *after*."""
        require_pins(after.program, self.pins)
        problem, before = attempt.problem, self.before(attempt.grouped, attempt.outcomes, exact=after.exact)
        limits = problem.named(problem.limits)
        uses = [
            DeviceUse(
                name,
                limits[name],
                before.peaks.get(name, 0),
                after.peaks.get(name, 0),
                before.busy.get(name, 0),
                after.busy.get(name, 0),
            )
            for name in problem.devices
            if name in self.asked.limits or before.peaks.get(name) or after.peaks.get(name)
        ]
        pairs = dict.fromkeys([*before.crossing, *after.crossing])
        links = [LinkBytes(*pair, before.crossing.get(pair, 0), after.crossing.get(pair, 0)) for pair in pairs]
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
            before=before.seconds,
            after=after.seconds,
            exact=after.exact,
            evaluated=self.searches.evaluated,
            device_map=device_map(after.program, attempt.grouped),
            reasons=reasons,
        )


def _named(problem: Problem, crossing: Mapping[tuple[int, int], int]) -> dict[tuple[str, str], int]:
    """Bytes that are copied, by the names of devices."""
    return {(problem.devices[a], problem.devices[b]): nbytes for (a, b), nbytes in crossing.items()}
