"""The search for a placement: plans that a person would try, a search among groups, and the plans of what it finds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from graphir.analysis.execution import streams_of
from graphir.errors import PassError
from graphir.ir.names import micro_batches
from graphir.ir.program import Program

from ..copies import InjectCopies
from .asked import Asked
from .attempts import Attempt, Attempts
from .by_hand import ByHand
from .drafts import Hand, choice_of
from .figures import Before, Figures
from .groups import Grouped, Reading
from .least import least
from .levels import Levels
from .moves import placed
from .outcome import Outcomes
from .plans import Emitted, Plans
from .problem import Choice
from .proven import proven
from .refusals import Refused, missing_of
from .report import Balanced

__all__ = ["Balancing"]

_WORSE: Final = 1.03
"""How many times as long as another's a step may be, as its groups say, so that a plan is worth a look."""

_MOST_EMITTED: Final = 20_000
"""Operators of a program above which peaks and seconds are not those of an emitted plan: it would take longer than the
search."""

_HOPELESS: Final = 0.02
"""By how much the groups may exceed limits so that plans are worth a look."""

_SAID: Final = 1.01
"""How many times as long as its groups say a plan may take so that it is believed to be among the best."""

_BY_HAND: Final = 0.2
_BEFORE_A_REFUSAL: Final = 0.1
_UNTIL_ONE_FITS: Final = 2.5
_UNTIL_SOME_ARE_JUDGED: Final = 5
_FEWEST_BY_HAND: Final = 4
"""The part of the budget for plans that a person would try: before the search, and before a refusal. How many times as
many seconds while none keeps within the limits, and while only so few were judged, where no search comes next or it is
one of micro-batches that flow, which groups do not see. Before another search, what few plans take to be made is not
counted."""

_QUICK: Final = 0.01
"""The part of the seconds of a search that a plan may take so that each is tried in two ways before it."""

_LEAST_BY_HAND: Final = 12
_PLAN: Final = 60
_OPERATORS: Final = 10
"""Where a number of placements is the budget: how many plans of a person are judged at least; and as how many operators
a plan counts beside its own, of which so many take as long as a placement of groups."""

_ON_TOP: Final = 0.3
"""The part of the seconds of a search that plans may take on top of these."""

_ENDS: Final = 1.5
_ENDS_WANTING: Final = 1.3
"""How many times the seconds of a search may be over when the last plan is made, where a plan keeps within the limits
and while none does: a refusal looks for limits that work behind that. The first plan is made all the same, unless a
plan of a person is known and groups exceed the limits by far."""

_BETWEEN: Final = 0.2
"""The part of the seconds so far that plans between rounds may have taken."""

_KINDS: Final = 3
_UNLIKE: Final = 0.1
"""How many of the next best choices are tried where the best ones are not, and what part of the groups is elsewhere."""

_ASIDE: Final = 5
"""How many choices are found with fewer options and within smaller limits, at most."""

_OTHERS: Final = 2
_OTHERS_IN_PARTS: Final = 4
_MANY: Final = 1_500
"""How many of the next best choices are emitted, too: which is the best in the end, plans say. Of programs with so many
operators that this would take as long as a search, the best alone."""


class _Tried(NamedTuple):
    """A choice as a plan.

    Attributes:
        said: seconds of a step as its groups say.
        peaks: by device, what the plan holds.
        seconds: of a step.
        fits: whether it keeps within the limits.
    """

    said: float
    peaks: Mapping[str, int]
    seconds: float
    fits: bool


class Balancing:
    """Some searches, what they need, and what they have found.

    Args:
        asked: what a caller asks.
        since: the step as it was, where that is not the program as it is.

    Attributes:
        wanted: the same for groups.
        read: the program as it was read to be grouped.
        grouped: the program in as many groups as a search can take.
        plans: what choices come to as plans.
        hands: the plans of a person.
        trying: tries those that were not tried so far.
        hand: the fastest of them that keeps within the limits, in its fastest order.
        tried: by outcomes of groups and choice, what it comes to as a plan.
        best: the fastest of these that keeps within the limits, in its fastest order.
        nearest: the one that exceeds the limits least.
        begun: when it began, as :func:`time.perf_counter` has it.
        emitting: seconds that all took so far.
        interrupted: whether Ctrl-C ended the making of plans.
        figures: makes the report.
        emits: whether peaks and seconds are those of an emitted plan.

    Raises:
        PassError: the program or the machine does not have what the caller names.
    """

    def __init__(self, asked: Asked, since: Before | None = None) -> None:
        self.asked, self.program, self.wanted = asked, asked.program, asked.wanted()
        self.parts = micro_batches(self.program.step.blobs)
        self.searches = Attempts(self.reading, self.parts, asked.budget)
        self.grouped = self.searches.grouped
        self.plans = Plans(
            self.program,
            self.wanted.limits,
            asked.topology,
            asked.named,
            asked.profile,
            asked.threads,
            flows=self.parts > 1,
            shares="share_storage" in asked.options,
        )
        self.hands = self.by_hand()
        self.trying = self.hands.tried()
        self.figures = Figures(asked, self.wanted.pins, self.searches, self.plans, since)
        self.tried: dict[tuple[Outcomes, Choice], _Tried] = {}
        self.best: tuple[Attempt, Emitted] | None = None
        self.nearest: tuple[Attempt, Emitted] | None = None
        self.hand: Hand | None = None
        self.last_hand: Hand | None = None
        self.begun, self.emitting = time.perf_counter(), 0.0
        self.interrupted = False
        self.emits = len(self.program.step.ops) <= _MOST_EMITTED

    def reading(self) -> Reading:
        """The program as it is read to be grouped."""
        asked, topology = self.asked, self.asked.topology
        issue = streams_of(topology).issue if topology.host is None else None
        self.read = Reading(self.program, self.wanted, topology, asked.profile, asked.threads, issue)
        return self.read

    def by_hand(self) -> ByHand:
        """Tries the plans of a person."""
        topology = self.asked.topology
        levels = Levels(self.read.units.step, topology, self.wanted.whole.values())
        return ByHand(self.program, self.plans, levels, self.wanted, self.asked.pin, topology, self.read.issue)

    def try_by_hand(self, share: float, *, first: bool = False) -> None:
        """Try plans of a person, in a share of the seconds, or in more of them while none of them fits; or as many as
        take as long as a share of the placements that were looked at, beside those with modules on the host. No more
        behind the *first* one that fits, if that is asked for."""
        begun, spent = time.perf_counter(), self.plans.spent
        plan = (len(self.program.step.ops) + _PLAN) / _OPERATORS
        most = _LEAST_BY_HAND + round(self.searches.looked * share / plan)

        def enough() -> bool:
            if first and self.hands.best is not None:
                return True
            if self.asked.budget.evaluations is not None:
                return len(self.hands.known) - len(self.hands.on_host) >= most
            seconds, few = self.asked.budget.seconds * share, len(self.hands.known) < _FEWEST_BY_HAND
            if self.hands.best is None and (self.parts > 1 or self.searches.ended):
                seconds *= _UNTIL_SOME_ARE_JUDGED if few else _UNTIL_ONE_FITS
            elif self.hands.best is None and few:
                seconds += self.plans.spent - spent
            late = self.searches.ended and bool(self.tried) and self.is_late()  # a refusal comes next
            return late or time.perf_counter() - begun >= seconds

        try:
            while not enough():
                self.hands.late = self.searches.ended or self.plans_are_quick()
                if next(self.trying, self) is self:
                    break
        except KeyboardInterrupt:  # as in a search: the best so far
            if not self.fits:
                raise
            self.interrupted = True
        self.order_hand()

    def order_hand(self) -> None:
        """Know the best plan of a person in its fastest order."""
        best = self.hands.best
        if best is not None and best is not self.last_hand:
            self.last_hand = best
            ordered = best._replace(judged=self.plans.in_any_order(best.program, best.judged, self.is_late))
            if self.hand is None or ordered.judged.seconds < self.hand.judged.seconds:
                self.hand = ordered

    def run(self) -> Balanced:
        """The best placement that is found.

        Raises:
            Refused: none is within the limits.
        """
        if self.asked.only:
            return self.repeated()
        attempts = self.searched()
        found = self.found(attempts)
        if found is not None:
            return found
        if self.nearest is not None:
            raise self.refused(self.nearest[0], self.nearest[1].choice)
        best = min(attempts, key=lambda attempt: attempt.rank)
        raise self.refused(best, best.found.choice)

    def found(self, attempts: Sequence[Attempt]) -> Balanced | None:
        """The best placement that searches and plans of a person have found; None where none is within the limits."""
        if not self.emits:
            best = min(attempts, key=lambda attempt: attempt.rank)
            if best.found.outcome.over:
                return None
            choice = best.found.choice
            made = Emitted(choice, placed(self.program, best.grouped, choice), str(InjectCopies()))
            return self.figures.report(best, made, attempts)
        if self.best is not None and (self.hand is None or self.best[1].seconds <= self.hand.judged.seconds):
            return self.figures.report(*self.best, attempts)
        return None if self.hand is None else self.figures.report_by_hand(self.hand, attempts)

    def repeated(self) -> Balanced:
        """The placement that is known.

        Raises:
            Refused: it exceeds the limits.
            PassError: it is none of this program.
        """
        hand = self.hands.know(self.asked.known)
        if self.hands.best is None:
            peaks, given = hand.judged.peaks, self.within({})
            missing, at = missing_of(self.plans, peaks, hand.judged.made)
            nearest = self.within(peaks)
            raise Refused(self.program, missing, at, given, [nearest], [hand.program], 1.0, 1.0, False, 1)
        self.order_hand()
        assert self.hand is not None  # one is the best
        return self.figures.report_by_hand(self.hand, self.searches.begun())

    def keeps(self) -> bool:
        """Whether any placement within the limits is found, as :meth:`run` would."""
        if self.asked.only:
            self.hands.know(self.asked.known)
            return self.fits
        attempts = self.searched(any_will_do=True)
        return self.fits if self.emits else not all(attempt.found.outcome.over for attempt in attempts)

    def before(self) -> Before:
        """The step as it is."""
        return self.figures.before(self.grouped, Outcomes(self.grouped.problem), exact=self.emits)

    @property
    def stopped(self) -> bool:
        """Whether Ctrl-C ended a search, or the making of plans."""
        return self.interrupted or self.searches.interrupted

    @property
    def fits(self) -> bool:
        """Whether a plan is known that keeps within the limits."""
        return self.best is not None or self.hands.best is not None

    def searched(self, *, any_will_do: bool = False) -> list[Attempt]:
        """What searches find, round after round, with the plans of a person before, and between them. What is emitted
        after a round does not depend on the rounds that follow."""
        begun = self.begun = time.perf_counter()
        if self.emits:
            with suppress(PassError):  # the passes of a balance of another batch
                if self.asked.known:
                    self.hands.know(self.asked.known)
            self.try_by_hand(_BY_HAND, first=any_will_do)
            if any_will_do and self.fits:
                return []
            if self.fits and self.is_late():  # nothing that a search finds could become a plan
                return self.searches.begun()
            self.leave_to_plans()
            self.searches.leave(time.perf_counter() - begun)
        regroups = self.emits and "recompute" in self.asked.options
        attempts: list[Attempt] = []
        for attempts in self.searches.rounds(regroups=regroups, starts=self.starts):
            if self.interrupted:
                break
            if not self.emits:
                continue
            if self.searches.ended or self.is_quick(begun):
                self.try_plans(attempts)
            if self.asked.budget.evaluations is not None:
                self.try_by_hand(_BY_HAND if self.fits else _BY_HAND + _BEFORE_A_REFUSAL)
            elif self.searches.ended and not self.fits and not self.is_late():
                self.try_by_hand(_BEFORE_A_REFUSAL)
            if self.interrupted or (self.fits and any_will_do):
                break
            near = any(attempt.found.outcome.over <= _HOPELESS for attempt in attempts)
            self.searches.wanting = near and not self.fits and not self.is_late()
        if not self.fits and self.nearest is not None and not self.interrupted and not self.is_late():
            self.emit_later(*self.nearest)
        return attempts

    def plans_are_quick(self) -> bool:
        """Whether there is time for a second plan of each that exceeds the limits."""
        return self.asked.budget.evaluations is not None or self.plans.seconds <= _QUICK * self.asked.budget.seconds

    def is_quick(self, begun: float) -> bool:
        """Whether there is time for plans between rounds."""
        if self.asked.budget.evaluations is not None:
            return True
        return self.emitting + self.plans.seconds * self.most_candidates() <= _BETWEEN * (time.perf_counter() - begun)

    def starts(self, grouped: Grouped) -> list[Choice]:
        """What a search among some groups begins with beside plain choices."""
        found = (self.hands.best, self.hands.nearest)
        return [choice_of(hand.draft, grouped) for hand in found if hand is not None]

    def leave_to_plans(self) -> None:
        """Let the search end early enough for the plans of what it finds."""
        self.plans.of(self.grouped, self.grouped.problem.now())
        plans = self.most_candidates() * self.plans.seconds
        self.searches.leave(max(plans - _ON_TOP * self.asked.budget.seconds, 0.0))

    def most_candidates(self) -> int:
        """How many choices become plans after one round, at most."""
        return 1 + _ASIDE + self.others()

    def others(self) -> int:
        """How many of the next best choices are worth a plan."""
        if self.parts > 1:
            return _OTHERS_IN_PARTS
        return _OTHERS if len(self.program.step.ops) <= _MANY else 0

    def try_plans(self, attempts: Sequence[Attempt]) -> None:
        """Know the candidates as plans. Where some are within the limits, but none takes as short as its groups say,
        some of the next best ones and the plain one, too: these may be of another kind."""
        begun = time.perf_counter()
        try:
            best = min(attempts, key=lambda attempt: attempt.rank)
            for attempt, choice in self.candidates(attempts):
                hopeless = self.hands.nearest is not None and best.found.outcome.over > _HOPELESS
                if (self.tried or self.fits or hopeless) and self.is_late():
                    break
                self.emit(attempt, choice)
            tried = [choice for outcomes, choice in self.tried if outcomes is best.outcomes]
            for choice in (*self.unlike(best, tried), *best.found.others[-1:]):
                if self.slow() and not self.is_late():
                    self.emit(best, choice)
        except KeyboardInterrupt:  # as in a search: the best so far
            if not self.fits:
                raise
            self.interrupted = True
        for attempt in attempts:
            self.hold_more(attempt)
        self.emitting += time.perf_counter() - begun

    def is_late(self) -> bool:
        """Whether one more plan would end too late."""
        if self.asked.budget.evaluations is not None:
            return False
        most = (_ENDS if self.fits else _ENDS_WANTING) * self.asked.budget.seconds
        return time.perf_counter() + self.plans.seconds > self.begun + most

    def emit(self, attempt: Attempt, choice: Choice) -> None:
        """Know a choice as a plan; the fastest that keeps within the limits is kept, in its fastest order."""
        key = attempt.outcomes, choice
        if key in self.tried:
            return
        one = self.plans.of(attempt.grouped, choice)
        fits = not self.plans.excess(one.peaks)
        self.tried[key] = _Tried(attempt.outcomes(choice).seconds, one.peaks, one.seconds, fits)
        if not fits:
            if self.nearest is None or self.plans.excess(one.peaks) < self.plans.excess(self.nearest[1].peaks):
                self.nearest = attempt, one
            return
        known = self.best
        now = one.program is self.program
        if known is None or one.seconds < known[1].seconds or (now and one.seconds == known[1].seconds):
            self.best = attempt, self.plans.fastest(one, self.is_late)

    def emit_later(self, attempt: Attempt, one: Emitted) -> None:
        """Know a plan that exceeds the limits with what is parked back late; see :meth:`.Plans.later`."""
        found = self.plans.later(one.program, one.peaks)
        if found is None:
            return
        program, judged = found
        late = Emitted(one.choice, program, *judged[:4])
        if self.plans.excess(late.peaks):
            self.nearest = attempt, late
        else:
            self.best = attempt, self.plans.fastest(late, self.is_late)

    def slow(self) -> bool:
        """Whether some plans are within the limits, and all of these take longer than their groups say."""
        fitting = [one for one in self.tried.values() if one.fits]
        return bool(fitting) and all(one.seconds > _SAID * one.said for one in fitting)

    def unlike(self, attempt: Attempt, tried: Sequence[Choice]) -> list[Choice]:
        """Some of the next best choices that have a good part of the groups elsewhere than those that were tried."""
        found = list(tried)
        for choice in attempt.found.others:
            if all(_elsewhere(choice, other) >= _UNLIKE * len(choice.devices) for other in found):
                found.append(choice)
        return found[len(tried) : len(tried) + _KINDS]

    def candidates(self, attempts: Sequence[Attempt]) -> list[tuple[Attempt, Choice]]:
        """The choices that are worth a plan: the best ones of the best attempt, also with fewer options and within
        smaller limits, and the best one of each other attempt that is about as good."""
        best, *others = sorted(attempts, key=lambda attempt: attempt.rank)
        over, seconds = best.rank
        near = [other for other in others if over or (not other.rank[0] and other.rank[1] <= _WORSE * seconds)]
        choices = (best.found.choice, *best.found.aside, *best.found.others[: self.others()])
        found = [(best, choice) for choice in choices]
        found += [(other, other.found.choice) for other in near]
        now = best.problem.now()
        pinned = any(group.now not in group.devices for group in best.problem.groups)
        return found if pinned or any(choice == now for _, choice in found) else [*found, (best, now)]

    def hold_more(self, attempt: Attempt) -> None:
        """Let the search go on with devices that hold more than its groups say, where the plan of its best choice
        exceeds the limits."""
        tried = self.tried.get((attempt.outcomes, attempt.found.choice))
        if tried is None or tried.fits or attempt.found.outcome.over > _HOPELESS:
            return
        excess = self.plans.over(tried.peaks)
        more = [
            max(tried.peaks.get(name, 0) - expected, 0) if name in excess else 0
            for name, expected in zip(attempt.problem.devices, attempt.found.outcome.peaks, strict=True)
        ]
        if any(more):
            plans = [(one.peaks, choice) for (of, choice), one in self.tried.items() if of is attempt.outcomes]
            self.searches.hold(attempt, more, min(plans, key=lambda pair: self.plans.excess(pair[0]))[1])

    def refused(self, attempt: Attempt, choice: Choice) -> Refused:
        """What is missing where the nearest placement is, and limits under which there is one."""
        found = least(self.searches, attempt, choice, late=self.is_late())
        nearest: list[tuple[Mapping[str, int], Program | None]] = []
        ample, placings = [], []
        problem = attempt.grouped.problem
        judged = self.hands.nearest is not None or self.nearest is not None
        for one in dict.fromkeys((found.choice, choice)):
            if self.emits and judged and self.is_late() and not self.is_nearest(attempt, one):
                continue
            reckoned = problem.named(Outcomes(problem)(one).peaks)
            made = self.as_plan(attempt, one) if self.emits else None
            nearest.append((reckoned, None) if made is None else (made.peaks, made.made))
            placings += [] if made is None else [made.program]
            ample.append(
                self.within({name: max(nbytes, nearest[-1][0].get(name, 0)) for name, nbytes in reckoned.items()})
            )
        if (hand := self.hands.nearest) is not None:
            nearest.append((hand.judged.peaks, hand.judged.made))
            placings.append(hand.program)
        missing, at = missing_of(self.plans, *min(nearest, key=lambda one: self.plans.factor(one[0])))
        certain = proven(self.program, self.wanted.limits, self.wanted.devices, self.asked.options)
        known = [*[self.within(held) for held, _ in nearest], *ample]
        interrupted = attempt.found.interrupted or found.interrupted
        given, emitted = self.within({}), self.plans.emitted
        return Refused(self.program, missing, at, given, known, placings, certain, found.proven, interrupted, emitted)

    def as_plan(self, attempt: Attempt, choice: Choice) -> Emitted:
        """A choice as a plan; the nearest one is known."""
        if self.nearest is not None and self.is_nearest(attempt, choice):
            return self.nearest[1]
        return self.plans.of(attempt.grouped, choice)

    def is_nearest(self, attempt: Attempt, choice: Choice) -> bool:
        """Whether a choice is the one whose plan exceeds the limits least."""
        near = self.nearest
        return near is not None and near[0].grouped is attempt.grouped and near[1].choice == choice

    def within(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """The limits, raised so far that some peaks are within them."""
        return {str(device): max(limit, peaks.get(str(device), 0)) for device, limit in self.plans.limits.items()}


def _elsewhere(choice: Choice, other: Choice) -> int:
    """How many groups two choices have on different devices."""
    return sum(a != b for a, b in zip(choice.devices, other.devices, strict=True))
