"""The search for a placement: plans that a person would try, a search among groups, and the plans of what it finds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from graphir.analysis.execution import streams_of
from graphir.ir.names import micro_batches
from graphir.ir.program import Program

from ..copies import InjectCopies
from .asked import Asked
from .attempts import Attempt, Attempts
from .by_hand import ByHand
from .drafts import choice_of
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

__all__ = ["Balancing", "nearest_limits"]

_WORSE: Final = 1.03
"""How many times as long as another's a step may be, as its groups say, so that a plan is worth a look."""

_MOST_EMITTED: Final = 20_000
"""Operators of a program above which peaks and seconds are not those of an emitted plan: it would take longer than the
search."""

_ATTEMPTS: Final = 4
"""How often the search goes on where a plan holds more than the groups said."""

_TRIES: Final = 4
_TRYING: Final = 0.2
_LARGER: Final = 1.05
_EMITTED_AGAIN: Final = 0.25
"""How many limits a refusal may try before it names some, and the part of the budget for all of them and for each:
there is a placement within them, and a balance that begins anew has to find one. Where it finds none within any limits
that are known, limits so many times as large come next. No more are tried behind so large a part of the plans that were
judged before."""

_HOPELESS: Final = 0.02
"""By how much the groups may exceed limits so that plans are worth a look."""

_SAID: Final = 1.01
"""How many times as long as its groups say a plan may take so that it is believed to be among the best."""

_BY_HAND: Final = 0.2
_BEFORE_A_REFUSAL: Final = 0.1
_UNTIL_ONE_FITS: Final = 2.5
"""The part of the budget for plans that a person would try: before the search, and before a refusal. And how many times
as many seconds while none keeps within the limits."""

_LEAST_BY_HAND: Final = 12
_PLAN: Final = 60
_OPERATORS: Final = 10
"""Where a number of placements is the budget: how many plans of a person are judged at least; and as how many operators
a plan counts beside its own, of which so many take as long as a placement of groups."""

_ON_TOP: Final = 0.3
"""The part of the seconds of a search that plans may take on top of these."""

_KINDS: Final = 3
_UNLIKE: Final = 0.1
"""How many of the next best choices are tried where the best ones are not, and what part of the groups is elsewhere."""

_OTHERS: Final = 2
_OTHERS_IN_PARTS: Final = 4
_MANY: Final = 1_500
"""How many of the next best choices are emitted, too: which is the best in the end, plans say. Of programs with so many
operators that this would take as long as a search, the best alone."""


class Balancing:
    """Some searches, what they need, and what they have found.

    Args:
        asked: what a caller asks.
        since: the step that the report compares with, where that is not the program as it is.

    Attributes:
        wanted: the same for groups.
        read: the program as it was read to be grouped.
        grouped: the program in as many groups as a search can take.
        plans: what choices come to as plans.
        hands: the plans of a person.
        trying: tries those that were not tried so far.
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
        """Try plans of a person, in a share of the budget, or in more of the seconds while none of them fits; no more
        behind the *first* one that fits, if that is asked for."""
        begun, before = time.perf_counter(), self.plans.emitted
        seconds, evaluations = self.asked.budget.seconds * share, self.asked.budget.evaluations
        plan = (len(self.program.step.ops) + _PLAN) / _OPERATORS
        most = None if evaluations is None else _LEAST_BY_HAND + round(evaluations * share / plan)
        try:
            for _ in self.trying:
                if most is not None:
                    enough = self.plans.emitted - before >= most
                else:
                    spent = time.perf_counter() - begun
                    enough = spent >= seconds * (_UNTIL_ONE_FITS if self.hands.best is None else 1)
                if enough or (first and self.hands.best is not None):
                    break
        except KeyboardInterrupt:  # as in a search: the best so far
            if self.hands.best is None:
                raise
            self.searches.interrupted = True

    def run(self) -> Balanced:
        """The best placement that is found.

        Raises:
            Refused: none is within the limits.
        """
        self.begin_by_hand()
        found = self.searched()
        if isinstance(found, Balanced):
            return found
        raise self.refused(*found)

    def before(self) -> Before:
        """The step as it is."""
        return self.figures.before(self.grouped, Outcomes(self.grouped.problem), exact=self.emits)

    def keeps(self) -> bool:
        """Whether any placement within the limits is found, as :meth:`run` would."""
        self.begin_by_hand(first=True)
        return self.hands.best is not None or isinstance(self.searched(), Balanced)

    def begin_by_hand(self, *, first: bool = False) -> None:
        """Try the first plans of a person; the searches have less time then."""
        if self.emits:
            begun = time.perf_counter()
            self.hands.know(self.asked.known)
            self.try_by_hand(_BY_HAND, first=first)
            self.searches.leave(time.perf_counter() - begun)

    def searched(self) -> Balanced | tuple[Attempt, Choice]:
        """The best of what searches find and of a person's plans; where none is within the limits, the attempt and its
        choice that exceed them least."""
        if self.emits:
            self.leave_to_plans()
        regroups = self.emits and "recompute" in self.asked.options
        attempts = self.searches.made(regroups=regroups, starts=self.starts)
        if not self.emits:
            best = min(attempts, key=lambda attempt: attempt.rank)
            choice = best.found.choice
            if best.found.outcome.over:
                return best, choice
            made = Emitted(choice, placed(self.program, best.grouped, choice), str(InjectCopies()))
            return self.figures.report(best, made, attempts)
        nearest: tuple[Attempt, Emitted] | None = None
        for number in range(_ATTEMPTS):
            tried: list[tuple[Attempt, Emitted]] = []
            try:
                self.try_plans(attempts, tried)
            except KeyboardInterrupt:  # as in a search: the best so far
                if not self.fitting(tried):
                    raise
                self.searches.interrupted = True
            fitting = self.fitting(tried)
            hand = self.hands.best
            if fitting:
                of, one = min(fitting, key=lambda pair: (pair[1].seconds, pair[1].program is not self.program))
                if hand is None or one.seconds <= hand.judged.seconds:
                    return self.figures.report(of, self.plans.fastest(one), attempts)
            if hand is not None:
                return self.figures.report_by_hand(hand, attempts)
            near = tried + ([nearest] if nearest else [])
            nearest = min(near, key=lambda pair: self.plans.excess(pair[1].peaks))
            attempts = [a for a in attempts if a.found.outcome.over <= _HOPELESS and not a.found.interrupted]
            if not attempts:
                break
            attempts = [
                self.onward(attempt, [one for of, one in tried if of is attempt], number + 1, len(attempts))
                for attempt in attempts
            ]
        assert nearest is not None
        attempt, one = nearest
        self.try_by_hand(_BEFORE_A_REFUSAL)
        if self.hands.best is not None:
            return self.figures.report_by_hand(self.hands.best, [attempt])
        return attempt, one.choice

    def starts(self, grouped: Grouped) -> list[Choice]:
        """What a search among some groups begins with beside plain choices."""
        found = (self.hands.best, self.hands.nearest)
        return [choice_of(hand.draft, grouped) for hand in found if hand is not None]

    def leave_to_plans(self) -> None:
        """Let the search end early enough for the plans of what it finds, by what that of the program itself takes."""
        begun = time.perf_counter()
        self.plans.of(self.grouped, self.grouped.problem.now())
        plans = (1 + self.others()) * (time.perf_counter() - begun)
        self.searches.leave(max(plans - _ON_TOP * self.asked.budget.seconds, 0.0))

    def others(self) -> int:
        """How many of the next best choices are worth a plan."""
        if self.parts > 1:
            return _OTHERS_IN_PARTS
        return _OTHERS if len(self.program.step.ops) <= _MANY else 0

    def try_plans(self, attempts: Sequence[Attempt], found: list[tuple[Attempt, Emitted]]) -> None:
        """Add the candidates as plans. Where some are within the limits, but none takes as short as its groups say,
        some of the next best ones and the plain one, too: these may be of another kind."""
        for attempt, choice in self.candidates(attempts):
            found.append((attempt, self.plans.of(attempt.grouped, choice)))
        best = min(attempts, key=lambda attempt: attempt.rank)
        unlike = self.unlike(best, attempts, [one.choice for of, one in found if of is best])
        for choice in (*unlike, *best.found.others[-1:]):
            if self.slow(found) and all(one.choice != choice for _, one in found):
                found.append((best, self.plans.of(best.grouped, choice)))
        fastest = min(self.fitting(found), key=lambda pair: pair[1].seconds, default=None)
        if fastest is not None and fastest[1].choice in best.found.others[-1:]:  # no search was needed for that
            again = self.searches.anew(best)
            found.append((again, self.plans.of(again.grouped, again.found.choice)))

    def fitting(self, found: Sequence[tuple[Attempt, Emitted]]) -> list[tuple[Attempt, Emitted]]:
        """Those whose plans are within the limits."""
        return [(attempt, one) for attempt, one in found if not self.plans.excess(one.peaks)]

    def slow(self, found: Sequence[tuple[Attempt, Emitted]]) -> bool:
        """Whether some plans are within the limits, and all of these take longer than their groups say."""
        fitting = [(one.seconds, attempt.outcomes(one.choice).seconds) for attempt, one in self.fitting(found)]
        return bool(fitting) and all(seconds > _SAID * said for seconds, said in fitting)

    def unlike(self, best: Attempt, attempts: Sequence[Attempt], tried: Sequence[Choice]) -> list[Choice]:
        """Some of the next best choices of the groups of the best attempt that have a good part of the groups elsewhere
        than those that were tried."""
        found, alike = list(tried), [attempt for attempt in attempts if attempt.grouped is best.grouped]
        others = {choice for attempt in alike for choice in (attempt.found.choice, *attempt.found.others)}
        for choice in sorted(others, key=lambda choice: (best.outcomes(choice).over, best.outcomes(choice).seconds)):
            if all(_elsewhere(choice, other) >= _UNLIKE * len(choice.devices) for other in found):
                found.append(choice)
        return found[len(tried) : len(tried) + _KINDS]

    def candidates(self, attempts: Sequence[Attempt]) -> list[tuple[Attempt, Choice]]:
        """The choices that are worth a plan: the best ones of the best attempt, and the best one of each other that is
        about as good."""
        best, *others = sorted(attempts, key=lambda attempt: attempt.rank)
        over, seconds = best.rank
        near = [other for other in others if over or (not other.rank[0] and other.rank[1] <= _WORSE * seconds)]
        found = [(best, choice) for choice in (best.found.choice, *best.found.others[: self.others()])]
        found += [(other, other.found.choice) for other in near]
        now = best.problem.now()
        pinned = any(group.now not in group.devices for group in best.problem.groups)
        return found if pinned or any(choice == now for _, choice in found) else [*found, (best, now)]

    def onward(self, attempt: Attempt, tried: Sequence[Emitted], number: int, of: int) -> Attempt:
        """The attempt again, with devices that hold more than its groups say."""
        if not tried:
            return attempt
        peaks = tried[0].peaks
        excess = self.plans.over(peaks)
        more = [
            max(peaks.get(name, 0) - expected, 0) if name in excess else 0
            for name, expected in zip(attempt.problem.devices, attempt.found.outcome.peaks, strict=True)
        ]
        nearest = min(tried, key=lambda one: self.plans.excess(one.peaks))
        return self.searches.onward(attempt, more, nearest.choice, number, of)

    def refused(self, attempt: Attempt, choice: Choice) -> Refused:
        """What is missing where the nearest placement is, and limits under which there is one."""
        found = least(self.searches, attempt, choice)
        given = {str(device): nbytes for device, nbytes in self.plans.limits.items()}

        def within(peaks: Mapping[str, int]) -> dict[str, int]:
            """The limits within which these peaks are, too."""
            return {name: max(nbytes, peaks.get(name, 0)) for name, nbytes in given.items()}

        nearest: list[tuple[Mapping[str, int], Program | None]] = []
        ample, placings = [], []
        problem = attempt.grouped.problem
        for one in dict.fromkeys((found.choice, choice)):
            reckoned = problem.named(Outcomes(problem)(one).peaks)
            made = self.plans.of(attempt.grouped, one) if self.emits else None
            nearest.append((reckoned, None) if made is None else (made.peaks, made.made))
            placings += [] if made is None else [made.program]
            ample.append(within({name: max(nbytes, nearest[-1][0].get(name, 0)) for name, nbytes in reckoned.items()}))
        if (hand := self.hands.nearest) is not None:
            nearest.append((hand.judged.peaks, hand.judged.made))
            placings.append(hand.program)
        missing, at = missing_of(self.plans, *min(nearest, key=lambda one: self.plans.factor(one[0])))
        certain = proven(self.program, self.wanted.limits, self.wanted.devices, self.asked.options)
        known = [*[within(held) for held, _ in nearest], *ample]
        interrupted = attempt.found.interrupted or found.interrupted
        emitted = self.plans.emitted
        return Refused(self.program, missing, at, given, known, placings, certain, found.proven, interrupted, emitted)


def nearest_limits(asked: Asked, refused: Refused) -> tuple[Mapping[str, int], bool]:
    """Limits for a refusal to name, and whether a placement within them is found: those within which plans keep are
    tried, the least first, and then larger ones."""
    begun, budget = time.perf_counter(), asked.budget
    shorter = budget._replace(seconds=_TRYING * budget.seconds)
    if budget.evaluations is not None:
        shorter = shorter._replace(evaluations=max(round(_TRYING * budget.evaluations), 1))
    limits: Mapping[str, int] = min(refused.nearest, key=refused.times)
    emitted = 0
    for number in range(_TRIES):
        late = time.perf_counter() - begun > shorter.seconds if budget.evaluations is None else False
        if refused.interrupted or (number and (late or emitted > _EMITTED_AGAIN * refused.emitted)):
            break
        try:
            trial = Balancing(asked._replace(program=refused.program, limits=limits, budget=shorter))
            if trial.keeps():
                return limits, True
            emitted += trial.plans.emitted
        except KeyboardInterrupt:  # there is something to say already
            break
        tried = refused.times(limits)
        more = [one for one in refused.nearest if refused.times(one) > tried]
        larger = {device: int(_LARGER * nbytes) for device, nbytes in limits.items()}
        limits = min(more, key=refused.times, default=larger)
    return limits, False


def _elsewhere(choice: Choice, other: Choice) -> int:
    """How many groups two choices have on different devices."""
    return sum(a != b for a, b in zip(choice.devices, other.devices, strict=True))
