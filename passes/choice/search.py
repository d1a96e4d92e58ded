"""The best choice that a search finds; a longer search goes on where a shorter one ends.

::

    choices looked at     125  177  250   354   500 ...     at each of these a search may pause
    shift alone           ─    ─    ──    ──    ───
    shift and park        ─    ─    ──    ──    ───
    0.8 of the limits     ─    ─    ──    ──    ───
    0.9 of the limits     ─    ─    ──    ──    ───
    all, within limits    ───  ───  ────  ────  ──────      begins also with the best of the others

A search begins with plain choices (:mod:`.plain`): everything as it is, every cut into contiguous parts, everything
parked on one device, all computed again. Then lines anneal (:mod:`.annealing`). How long a search may take decides when
it ends, and nothing else. Lines with fewer options, and lines within smaller limits, find what a search finds that has
no more than these: with more of either a step is seldom longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from .annealing import Clock, Late, Line
from .outcome import Outcome, Outcomes
from .plain import Plain, allowed
from .problem import AGAIN, KEEP, Choice, Group

__all__ = ["Clock", "Found", "Search", "pauses", "search"]

_FIRST: Final = (0, 31, 62)
_THEN: Final = 125
"""How many choices beside plain ones a search looks at before it may pause; then every second time at twice as many."""

_CUTS: Final = 3
"""Where micro-batches flow, so many of the best plain choices are for plans to decide on, too."""

_TIGHTER: Final = (0.8, 0.9)
"""By what the limits of some lines are multiplied."""

_ASIDE: Final = 0.05
"""The part of a round for each line that has fewer options, or smaller limits."""

_HOPELESS: Final = 0.1
_FAIR: Final = 2
"""By how much a line may exceed its limits after so many runs, so that it goes on."""


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        choice: the best.
        outcome: what it comes to, with what is held more than the groups say; where no limits could be kept, the least
            excess is best.
        evaluated: how many choices were looked at, those that were again counted again.
        others: the best of each annealing, and what it began with; the best first, and the plain one last where there
            is one micro-batch.
        aside: the best with fewer options, and within smaller limits.
        interrupted: whether Ctrl-C ended it.
    """

    choice: Choice
    outcome: Outcome
    evaluated: int
    others: tuple[Choice, ...] = ()
    aside: tuple[Choice, ...] = ()
    interrupted: bool = False


def pauses() -> Iterator[int]:
    """How many choices beside plain ones a search has looked at where it may pause."""
    yield from _FIRST
    yield from (round(_THEN * 2 ** (number / 2)) for number in count())


def search(
    outcomes: Outcomes,
    seconds: float = 2.0,
    evaluations: int | None = None,
    seed: int = 0,
    starts: Sequence[Choice] = (),
) -> Found:
    """The best choice that can be found in so much time.

    Args:
        outcomes: of the problem of what is placed.
        seconds: how long to search.
        evaluations: how many choices beside plain ones to look at instead, at most: equal numbers and seeds find equal
            choices. The search ends at the last one of :func:`pauses`.
        seed: of the random changes.
        starts: choices to begin with, beside the plain ones.

    Ctrl-C ends the search early, with the best so far.
    """
    clock = Clock() if evaluations is not None else Clock(time.perf_counter() + seconds)
    found, looked = Search(outcomes, seed, starts, clock), 0
    for most in pauses():
        if found.late or found.interrupted or (evaluations is not None and most > evaluations):
            break
        clock.round(most - looked, found.go_on)
        looked = most
    return found.found()


class Search:
    """A search that goes on.

    Args:
        outcomes: of the problem of what is placed.
        seed: of the random changes.
        starts: choices to begin with, beside the plain ones.
        clock: says when its time is spent; never by default.

    Attributes:
        lines: the last one has all options and the limits.
        more: by device, how many bytes more are held than outcomes say.
        late: whether time is spent.
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(
        self, outcomes: Outcomes, seed: int = 0, starts: Sequence[Choice] = (), clock: Clock | None = None
    ) -> None:
        self.outcomes, self.problem, clock = outcomes, outcomes.problem, clock or Clock()
        self.more = [0] * len(self.problem.devices)
        self.late = self.interrupted = False
        plain = Plain(outcomes)
        self.placed, groups = plain.placed(), self.problem.groups
        whole = Line(outcomes, groups, 1.0, [*self.placed, *starts], seed, clock)
        stored = list(plain.stored([self.placed[0], *sorted(self.placed, key=whole.cost)[:2]]))
        self.plain = [*self.placed, *stored]
        self.starts = [allowed(groups, choice) for choice in starts]
        begins = [*self.plain, *starts]
        asked = [(fewer, 1.0) for fewer in _fewer(groups)] + [(groups, factor) for factor in _TIGHTER]
        self.lines = [
            Line(outcomes, some, factor, begins, seed + number, clock)
            for number, (some, factor) in enumerate([*asked, (groups, 1.0)])
        ]
        self.runs = 0

    @property
    def line(self) -> Line:
        """The line with all options and the limits."""
        return self.lines[-1]

    @property
    def tries(self) -> int:
        """How many choices were looked at."""
        return len(self.plain) + len(self.starts) + sum([line.tries for line in self.lines])

    def look(self, choice: Choice) -> None:
        """Begin also with a choice."""
        choice = allowed(self.problem.groups, choice)
        if choice not in self.starts:
            self.starts.append(choice)
        self.line.look(choice)

    def hold(self, more: Sequence[int]) -> None:
        """Let devices hold so many bytes more than before, than outcomes say."""
        self.more = [held + n for held, n in zip(self.more, more, strict=True)]
        for line in self.lines:
            line.hold(more)

    def go_on(self, evaluations: int) -> None:
        """Look at so many choices more, each line at some."""
        *aside, line = self.lines
        at_work = [one for one in aside if not self.rests(one)]
        part = round(_ASIDE * evaluations)
        begun, self.late = self.tries, False
        try:
            for one in at_work:
                one.look(line.best)
                one.run(part)
                line.look(one.best)
            line.run(evaluations - (self.tries - begun))
        except Late:
            self.late = True
        except KeyboardInterrupt:
            self.interrupted = True
        for one in aside:
            line.look(one.best)
        self.runs += 1

    def rests(self, line: Line) -> bool:
        """Whether a line has nothing to find: it is far from its limits, or the best is within these."""
        if line.factor < 1 and not line.over(self.outcomes(self.line.best)):
            return True
        return self.runs >= _FAIR and line.least[0] > _HOPELESS

    def found(self) -> Found:
        """What is found so far."""
        line, several = self.line, self.problem.parts > 1
        ranked = sorted(self.placed, key=line.rank)
        ends = {*ranked[: _CUTS if several else 1], *self.starts, *line.ends} - {line.best}
        last = None if several else ranked[0]
        others = sorted(ends, key=lambda choice: (choice == last, line.rank(choice)))
        aside = [one.best for one in self.lines[:-1] if not line.over(self.outcomes(one.best))]
        outcome = self.outcomes(line.best)
        held = tuple([peak + more for peak, more in zip(outcome.peaks, self.more, strict=True)])
        outcome = outcome._replace(over=line.least[0], peaks=held)
        return Found(
            line.best,
            outcome,
            self.tries,
            tuple(others),
            tuple(dict.fromkeys([one for one in aside if one != line.best])),
            self.interrupted,
        )


def _fewer(groups: Sequence[Group]) -> list[Sequence[Group]]:
    """The groups with fewer options: without anything that is stored otherwise, without what is computed again, and
    without state that is parked."""
    home = [group._replace(away=()) for group in groups]
    kept = [group._replace(stored=(KEEP,)) for group in home]
    parked = [group._replace(stored=tuple([s for s in group.stored if s != AGAIN])) for group in home]
    found: list[Sequence[Group]] = []
    for some in (kept, parked, home):
        if any(group.is_open for group in some) and some != list(groups) and some not in found:
            found.append(some)
    return found
