"""Searches for a choice within one budget: among groups of one size, or of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from .groups import Grouped, apart
from .outcome import Outcomes
from .problem import AGAIN, Choice, Problem
from .search import Found, search

__all__ = ["Attempt", "Attempts", "Budget"]

_MOST: Final = 48
"""How many groups there are at most: as many as a search can take."""

_MOST_IN_PARTS: Final = 96
"""The same, times the number of micro-batches, where there are several, each with tasks of its own."""

_FEWER: Final = (24, 12)
_MANY_AGAIN: Final = 0.2
"""How many there are to be, too, where so large a part of them computes again, or nothing is within the limits. What a
group reads of others is kept, so that larger groups keep less; and they hold more while they compute again."""

_NEAR: Final = 0.02
"""By how much the limits may be exceeded so that another search among the same groups comes first."""

_FIRST: Final = 0.6
"""The part of a search after which it is decided whether to go on with these."""

_FROM_STARTS: Final = 0.1
"""The part of the budget for a search that begins with what a caller knows."""

_ONWARD: Final = 0.25
"""The part of the budget for which a search goes on where a plan holds more than its groups said."""


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
    """Searches for a choice.

    Args:
        read: reads the program; what that takes is a part of the budget.
        parts: how many micro-batches it has.
        budget: of the searches.

    Attributes:
        reading: what gives the groups of the program.
        most: how many groups a search can take.
        grouped: the program in so many groups at most.
        evaluated: how many choices were looked at.
        interrupted: whether Ctrl-C ended a search, or what came before or after it.
    """

    def __init__(self, read: Callable[[], Read], parts: int, budget: Budget) -> None:
        self.parts, self.budget = parts, budget
        self.most = _MOST if parts == 1 else max(_MOST_IN_PARTS // parts, min(_FEWER))
        begun = time.perf_counter()
        self.reading = read()
        self.grouped = self.reading.grouped(self.most)
        self.spent, self.evaluated = time.perf_counter() - begun, 0
        self.interrupted = False

    def leave(self, seconds: float) -> None:
        """Leave a part of the budget to what comes after the searches."""
        self.spent += seconds

    def made(self, *, regroups: bool, starts: Callable[[Grouped], Sequence[Choice]] = lambda _: ()) -> list[Attempt]:
        """Searches among as many groups as a search can take; where these compute again, or nothing is within the
        limits, among fewer and larger ones, too, if it *regroups*. Where tails save much, the search goes on with these
        apart. A last one begins with the *starts* of its groups, if there are any."""
        found = self.of_sizes(regroups=regroups)
        given = starts(self.grouped)
        if given and not found[-1].found.interrupted:
            found.append(self.searched(self.grouped, self.grouped.problem, _FROM_STARTS, given, 1))
        return found

    def of_sizes(self, *, regroups: bool) -> list[Attempt]:
        """The searches that begin with plain choices alone."""
        regroups = regroups and self.parts == 1 and len(self.grouped.problem.groups) > min(_FEWER)
        tails_apart = self.reading.tailed is not None
        first = self.attempt(self.grouped, _FIRST if regroups or tails_apart else 1.0)
        found = first.found
        if found.interrupted or not (regroups or tails_apart):
            return [first]
        many = found.choice.stored.count(AGAIN) >= _MANY_AGAIN * len(found.choice.stored)
        if regroups and not tails_apart and not many and 0 < found.outcome.over <= _NEAR:
            other = self.searched(self.grouped, self.grouped.problem, 1 - _FIRST, (), 1)  # as it may be stuck there
            if not other.found.outcome.over:
                return [other]
        sizes = [(self.most, True)] if tails_apart else []
        if regroups and (found.outcome.over or many):
            sizes += [(most, False) for most in _FEWER]
        if not sizes:
            return [self.attempt(self.grouped, 1 - _FIRST, (found.choice, *found.others))]
        attempts = [first]
        for most, finer in sizes:
            if not attempts[-1].found.interrupted:
                grouped = self.reading.grouped(most, tails=finer)
                before = [apart(found.choice, self.grouped, grouped)] if finer else []
                attempts.append(self.attempt(grouped, (1 - _FIRST) / len(sizes), before))
        return attempts

    def attempt(self, grouped: Grouped, part: float, starts: Sequence[Choice] = ()) -> Attempt:
        """A search among some groups, with a part of the budget."""
        return self.searched(grouped, grouped.problem, part, starts, 0)

    def onward(self, attempt: Attempt, more: Sequence[int], near: Choice, number: int, of: int) -> Attempt:
        """A search that goes on from an attempt.

        Args:
            attempt: whose plans hold more than its groups said.
            more: by device, how much more.
            near: the choice that exceeds the limits least.
            number: how often it went on, so that it draws other numbers.
            of: how many searches go on.
        """
        problem = attempt.problem
        problem = replace(problem, held=tuple([held + n for held, n in zip(problem.held, more, strict=True)]))
        starts = (near, attempt.found.choice, *attempt.found.others)
        return self.searched(attempt.grouped, problem, _ONWARD / of, starts, number)

    def anew(self, attempt: Attempt) -> Attempt:
        """Another search among the same groups, which draws other numbers."""
        return self.searched(attempt.grouped, attempt.problem, _ONWARD, (), 1)

    def eased(self, attempt: Attempt, factor: float, near: Choice, number: int, of: int) -> Attempt:
        """A search within limits that are multiplied by a factor, as :meth:`onward` goes on."""
        problem = attempt.problem
        limits = tuple([None if limit is None else int(limit * factor) for limit in problem.limits])
        return self.searched(attempt.grouped, replace(problem, limits=limits), _ONWARD / of, (near,), number)

    def searched(
        self, grouped: Grouped, problem: Problem, part: float, starts: Sequence[Choice], number: int
    ) -> Attempt:
        seconds, evaluations, seed = self.budget
        seconds *= part
        if not self.evaluated:
            seconds = max(seconds - self.spent, _LEAST * seconds)
        outcomes = Outcomes(problem)
        looks = None if evaluations is None else max(round(evaluations * part), 1)
        found = search(outcomes, seconds, looks, seed + number, starts)
        self.evaluated += found.evaluated
        self.interrupted |= found.interrupted
        return Attempt(grouped, outcomes, found)
