"""The least limits that a search finds where the given ones are too small: no choice keeps less."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from choices import every_choice, limited
from graphir.passes.choice.attempts import Attempts, Budget
from graphir.passes.choice.groups import Grouped
from graphir.passes.choice.least import exceeded, least
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import Problem
from instances import Instance, Shape, instance


class Given(NamedTuple):
    """A problem as it is, whatever size is asked for."""

    problem: Problem
    tailed: None = None

    def grouped(self, most: int, *, tails: bool = False) -> Grouped:
        return Grouped(self.problem, [], {})


def attempts(problem: Problem, evaluations: int) -> Attempts:
    return Attempts(lambda: Given(problem), 1, Budget(0.0, evaluations, 0))


@pytest.mark.parametrize("shape", ["gpt", "resnet", "u-net", "two replicas"])
@pytest.mark.parametrize("uneven", [False, True])
def test_nothing_less_is_there(shape: Shape, uneven: bool) -> None:
    problem = instance(Instance(5, shape, 4 if shape == "two replicas" else 3, 2, 0.2))
    if uneven:
        first, second, _ = problem.limits
        problem = limited(problem, first, (second or 0) * 2)
    outcomes = Outcomes(problem)
    best = min(exceeded(problem, outcomes(choice).peaks) for choice in every_choice(problem))
    assert best > 1
    searches = attempts(problem, 2000)
    *_, (attempt,) = searches.rounds(regroups=False)
    found = least(searches, attempt, problem.now())
    assert exceeded(problem, outcomes(found.choice).peaks) == found.factor
    assert 1 <= found.proven <= best <= found.factor <= 1.01 * best


def test_limits_of_which_nothing_is_ruled_out_are_multiplied_by_one_at_least() -> None:
    problem = instance(Instance(5, "gpt", 3, 2, 0.2))
    assert exceeded(problem, (0, 0, 1 << 50)) == 1
    assert exceeded(limited(problem, 100, 200), (150, 500, 0)) == 2.5
