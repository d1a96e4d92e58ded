"""The least that limits have to be multiplied by where no choice keeps them as they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import sqrt
from typing import Final, NamedTuple

from .attempts import EASED, Attempt, Attempts
from .bound import lower_bound
from .problem import Choice, Problem

__all__ = ["Least", "exceeded", "least"]

_NEAR: Final = 1.01
"""How many times what is proven a found factor may be, so that no less is looked for."""

_SEARCHES: Final = 4
"""How often limits between the two are searched."""


class Least(NamedTuple):
    """The least that was found, and what is proven.

    Attributes:
        choice: that keeps the limits times *factor*.
        factor: of its groups.
        proven: what limits have to be multiplied by for any choice of these groups, at least.
        interrupted: whether the last search was.
    """

    choice: Choice
    factor: float
    proven: float
    interrupted: bool


def exceeded(problem: Problem, peaks: Sequence[int]) -> float:
    """What limits have to be multiplied by so that some peaks are within them; 1 if they are, or a limit is 0."""
    pairs = [(peak, limit) for peak, limit in zip(peaks, problem.limits, strict=True) if limit]
    return max([1.0, *[peak / limit for peak, limit in pairs]])


def least(searches: Attempts, attempt: Attempt, choice: Choice, *, late: bool = False) -> Least:
    """The least that limits can be multiplied by, between what a linear program proves and what a choice takes, by
    searches within limits between the two.

    Args:
        searches: whose budget these are a part of.
        attempt: that found nothing within the limits.
        choice: that exceeds them.
        late: whether there is no time for these searches.
    """
    proven = lower_bound(attempt.grouped.problem).factor
    factor, low = exceeded(attempt.problem, attempt.outcomes(choice).peaks), proven
    interrupted, begun, budget = False, time.perf_counter(), searches.budget
    for number in range(_SEARCHES):
        if late or factor <= low * _NEAR:
            break
        middle = sqrt(low * factor)
        found = searches.eased(attempt, middle, choice, number, _SEARCHES).found
        if (took := exceeded(attempt.problem, found.outcome.peaks)) < factor:
            choice, factor = found.choice, took
        if interrupted := found.interrupted:
            break
        if factor > middle:
            low = middle
        late = budget.evaluations is None and time.perf_counter() - begun > EASED * budget.seconds
    return Least(choice, factor, proven, interrupted)
