"""Searches for a choice within one budget: among groups of one size, or of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol

from .groups import Grouped, apart
from .outcome import Outcomes
from .problem import AGAIN, Choice, Problem
from .search import Clock, Found, Search, pauses, search

__all__ = ["EASED", "Attempt", "Attempts", "Budget"]

_MOST: Final = 48
"""How many groups there are at most: as many as a search can take."""

_MOST_IN_PARTS: Final = 96
"""The same, times the number of micro-batches, where there are several, each with tasks of its own."""

_FEWER: Final = (24, 12)
_MANY_AGAIN: Final = 0.2
"""How many there are to be, too, where so large a part of them computes again, or nothing is within the limits. What a
group reads of others is kept, so that larger groups keep less; and they hold more while they compute again."""

_FIRST: Final = 0.6
"""The part of a round for the first groups, where there are others."""

_WANTING: Final = 1.25
"""How many times the budget is spent while no plan keeps within the limits, at most."""

EASED: Final = 0.1
"""The part of the budget for searches within larger limits."""

_LEAST: Final = 0.25
"""The part of its seconds that the first search has at least, however long grouping took."""


class Read(Protocol):
    """What gives groups of several sizes: a :class:`.groups.Reading`."""

    @property
    def tailed(self) -> object | None:
        """None where there are no tails that save much."""

    def grouped(self, most: int, *, tails: bool = False) -> Grouped:
        """The program in so many groups at most, with or without *tails* apart."""


class Budget(NamedTuple):
    """What searches may take together, beside those that go on.

    Attributes:
        seconds: how long they search; what grouping takes is a part of it, and what is left to others.
        evaluations: how many choices they look at instead.
        seed: of their random changes.
    """

    seconds: float
    evaluations: int | None
    seed: int


class Attempt(NamedTuple):
    """A search for a choice.

    Attributes:
        grouped: the groups.
        outcomes: of their problem, with devices that hold as much more as plans have shown.
        found: the best choice.
    """

    grouped: Grouped
    outcomes: Outcomes
    found: Found

    @property
    def problem(self) -> Problem:
        """What is placed."""
        return self.outcomes.problem

    @property
    def rank(self) -> tuple[float, float]:
        """By how much limits are exceeded, and seconds of a step, as the groups say."""
        return self.found.outcome.over, self.found.outcome.seconds


class Attempts:
    """Searches for a choice, in rounds: a larger budget has more of them, and each does the same in any budget.

    Args:
        read: reads the program; what that takes is a part of the budget.
        parts: how many micro-batches it has.
        budget: of the searches.

    Attributes:
        reading: what gives the groups of the program.
        most: how many groups a search can take.
        grouped: the program in so many groups at most.
        looked: how many choices beside plain ones rounds were to look at so far.
        wanting: whether rounds go on for some more than the budget: no plan keeps within the limits so far.
        ended: whether the round is the last one.
    """

    def __init__(self, read: Callable[[], Read], parts: int, budget: Budget) -> None:
        self.parts, self.budget = parts, budget
        self.most = _MOST if parts == 1 else max(_MOST_IN_PARTS // parts, min(_FEWER))
        begun = time.perf_counter()
        self.reading = read()
        self.grouped = self.reading.grouped(self.most)
        self.spent, self.eases = time.perf_counter() - begun, 0
        self.looked = 0
        self.wanting = self.ended = self.longer = False
        self.clock = Clock()
        self.searches: dict[tuple[int, bool], tuple[Grouped, Search]] = {}

    @property
    def evaluated(self) -> int:
        """How many choices were looked at."""
        return self.eases + sum([search.tries for _, search in self.searches.values()])

    def leave(self, seconds: float) -> None:
        """Leave a part of the budget to what comes beside the searches."""
        self.spent += seconds

    def rounds(
        self, *, regroups: bool, starts: Callable[[Grouped], Sequence[Choice]] = lambda _: ()
    ) -> Iterator[list[Attempt]]:
        """Rounds of searches among as many groups as a search can take; where these compute again, or nothing is within
        the limits, among fewer and larger ones, too, if it *regroups*. Where tails save much, there is one with these
        apart. Each round begins also with the *starts* of groups that are known then."""
        regroups = regroups and self.parts == 1 and len(self.grouped.problem.groups) > min(_FEWER)
        if self.budget.evaluations is None:
            seconds = self.budget.seconds
            self.clock.until = time.perf_counter() + max(seconds - self.spent, _LEAST * seconds)
        lengths = pauses()
        most = next(lengths)
        while not self.ended:
            self.clock.round(most - self.looked, partial(self.round, starts=starts, regroups=regroups))
            self.looked, most = most, next(lengths)
            late = any(search.late for _, search in self.searches.values())
            done = not any(group.is_open for grouped, _ in self.searches.values() for group in grouped.problem.groups)
            evaluations = self.budget.evaluations
            self.ended = late or done or self.interrupted or (evaluations is not None and most > evaluations)
            yield self.attempts()
            if self.interrupted:
                return
            if self.ended and self.wanting and not done:
                self.ended = not self.lengthened(most)

    def lengthened(self, most: int) -> bool:
        """Whether a longer budget, which there is once where time is the budget, has another round."""
        if self.budget.evaluations is not None:
            return most <= _WANTING * self.budget.evaluations
        if self.longer:
            return False
        self.longer, self.clock.until = True, time.perf_counter() + (_WANTING - 1) * self.budget.seconds
        return True

    def round(self, count: int, *, starts: Callable[[Grouped], Sequence[Choice]], regroups: bool) -> None:
        """One round, in which so many choices are looked at."""
        grouped, first = self.searched(self.most, tails=False)
        for choice in starts(grouped):
            first.look(choice)
        best = first.found()
        many = best.choice.stored.count(AGAIN) >= _MANY_AGAIN * len(best.choice.stored)
        sizes = [(self.most, True)] if self.reading.tailed is not None else []
        if regroups and (many or best.outcome.over):
            sizes += [(size, False) for size in _FEWER]
        part = round(_FIRST * count) if sizes else count
        first.go_on(part)
        for size, tails in sizes:
            other, search = self.searched(size, tails=tails)
            if tails:
                search.look(apart(first.line.best, grouped, other))
            search.go_on((count - part) // len(sizes))

    def searched(self, most: int, *, tails: bool) -> tuple[Grouped, Search]:
        """The search among groups of one size."""
        found = self.searches.get((most, tails))
        if found is None:
            grouped = self.grouped if (most, tails) == (self.most, False) else self.reading.grouped(most, tails=tails)
            found = grouped, Search(Outcomes(grouped.problem), self.budget.seed, (), self.clock)
            self.searches[most, tails] = found
        return found

    def begun(self) -> list[Attempt]:
        """What the first search begins with."""
        self.searched(self.most, tails=False)
        return self.attempts()

    def attempts(self) -> list[Attempt]:
        """What searches have found so far."""
        return [Attempt(grouped, search.outcomes, search.found()) for grouped, search in self.searches.values()]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended a search."""
        return any(search.interrupted for _, search in self.searches.values())

    def hold(self, attempt: Attempt, more: Sequence[int], near: Choice) -> None:
        """Let the search of an attempt go on where devices hold so many bytes more than its groups say, and know a
        choice that is near the limits."""
        for grouped, found in self.searches.values():
            if grouped is attempt.grouped:
                found.hold(more)
                found.look(near)

    def eased(self, attempt: Attempt, factor: float, near: Choice, number: int, of: int) -> Attempt:
        """One of some searches within limits that are multiplied by a factor, which begins with a choice."""
        problem, (seconds, evaluations, seed) = attempt.problem, self.budget
        limits = tuple([None if limit is None else int(limit * factor) for limit in problem.limits])
        outcomes, part = Outcomes(replace(problem, limits=limits)), EASED / of
        looks = None if evaluations is None else max(round(evaluations * part), 1)
        found = search(outcomes, seconds * part, looks, seed + number, (near,))
        self.eases += found.evaluated
        return Attempt(attempt.grouped, outcomes, found)
