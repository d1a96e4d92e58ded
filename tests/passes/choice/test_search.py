"""A longer search goes on where a shorter one ends, and lines with fewer options or smaller limits help it."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch
from graphir.passes.choice.outcome import Outcome, Outcomes
from graphir.passes.choice.problem import AGAIN, KEEP, Choice, Problem
from graphir.passes.choice.search import Clock, Found, Search, pauses, search
from instances import INSTANCES, Instance, instance

import graphir
from graphir import passes


class Noted(Outcomes):
    """Notes choices, each when it is looked at for the first time."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.looked: dict[Choice, None] = {}

    def __call__(self, choice: Choice) -> Outcome:
        self.looked.setdefault(choice)
        return super().__call__(choice)


def looked(given: Instance, evaluations: int) -> tuple[list[Choice], Found]:
    outcomes = Noted(instance(given))
    found = search(outcomes, evaluations=evaluations)
    return list(outcomes.looked), found


@pytest.mark.parametrize("given", INSTANCES[1::9], ids=lambda given: given.name)
def test_a_longer_search_looks_first_at_what_a_shorter_one_looks_at(given: Instance) -> None:
    runs = [looked(given, evaluations) for evaluations in (20, 125, 300, 600)]
    for (short, first), (long, then) in pairwise(runs):
        assert len(short) < len(long) and long[: len(short)] == short
        assert (then.outcome.over, then.outcome.seconds) <= (first.outcome.over, 1.0001 * first.outcome.seconds)


def test_a_search_pauses_each_second_time_at_twice_as_many() -> None:
    counts = list(islice(pauses(), 14))
    assert counts[0] == 0 and counts == sorted(counts)
    assert all(abs(later - 2 * one) <= 1 for one, later in zip(counts[3:], counts[5:], strict=False))


def test_a_search_ends_at_the_last_pause_within_its_budget() -> None:
    given = INSTANCES[0]
    plain = looked(given, 1)[1].evaluated
    assert [looked(given, n)[1].evaluated - plain for n in (31, 61, 62, 200)] == [31, 31, 62, 177]


def test_a_search_ends_when_its_seconds_are_spent() -> None:
    begun = time.perf_counter()
    found = search(Outcomes(instance(INSTANCES[0])), seconds=0.05)
    assert found.evaluated and time.perf_counter() - begun < 5
    assert search(Outcomes(instance(INSTANCES[0])), seconds=0.0).choice


def test_a_round_is_as_long_as_there_is_time_for() -> None:
    counts: list[int] = []
    for count, pace in ((5_000, 0.1), (50, 0.1), (5_000, 0.0), (5_000, 1e6)):
        Clock(time.perf_counter() + 100, pace).round(count, counts.append)
    assert 500 < counts[0] <= 1000 and counts[1:] == [50, 5_000, 31]
    Clock(pace=1e6).round(5_000, counts.append)
    assert counts[-1] == 5_000


@pytest.mark.parametrize("given", [INSTANCES[2], INSTANCES[9]], ids=lambda given: given.name)
def test_what_is_found_with_fewer_options_or_within_smaller_limits_is_at_hand(given: Instance) -> None:
    problem = instance(given)
    outcomes = Outcomes(problem)
    found = search(outcomes, evaluations=500)
    tight = [int(0.9 * limit) for limit in problem.limits if limit is not None]
    assert any(
        all(peak <= most for peak, most in zip(outcomes(choice).peaks, tight, strict=False)) for choice in found.aside
    )
    assert any(AGAIN not in choice.stored for choice in (found.choice, *found.aside))
    assert all(not outcomes(choice).over for choice in found.aside)


def test_a_search_within_one_option_has_no_line_beside_it() -> None:
    problem = instance(INSTANCES[0])
    kept = replace(problem, groups=tuple([group._replace(stored=(KEEP,)) for group in problem.groups]))
    both = Search(Outcomes(problem)), Search(Outcomes(kept))
    assert [len(one.lines) for one in both] == [5, 3]
    parked = replace(problem, groups=tuple([g._replace(stored=(KEEP, 1), devices=(0,)) for g in problem.groups]))
    assert len(Search(Outcomes(parked)).lines) == 3


def test_what_devices_hold_more_counts_from_then_on() -> None:
    problem = instance(INSTANCES[2])
    one = Search(Outcomes(problem))
    one.go_on(400)
    first = one.found()
    assert not first.outcome.over
    spare = [
        0 if limit is None else limit - peak for limit, peak in zip(problem.limits, first.outcome.peaks, strict=True)
    ]
    one.hold([most + 1 for most in spare])
    held = one.found()
    assert held.choice != first.choice or held.outcome.over
    one.go_on(400)
    then = one.found()
    for limit, peak, more in zip(problem.limits, Outcomes(problem)(then.choice).peaks, spare, strict=True):
        assert then.outcome.over or limit is None or peak + more + 1 <= limit


def test_where_nothing_can_be_chosen_a_balance_does_not_search() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    program = graphir.capture(model, (torch.randn(4, 8),))
    found = passes.balance(program, {"gpu:0": "1 MiB"}, options=["park"], topology="cpu", seconds=60)
    assert not found.pipeline and found.evaluated < 1_000
