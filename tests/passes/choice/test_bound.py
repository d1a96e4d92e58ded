"""What no choice can beat: no choice does, and limits that are too small are found out."""

from __future__ import annotations

import random
from math import inf, isfinite

import pytest
from choices import chosen_at_random, every_choice, limited, varied
from graphir.passes.choice.bound import lower_bound
from graphir.passes.choice.facts import total_seconds
from graphir.passes.choice.linear import Linear
from graphir.passes.choice.outcome import Outcome, Outcomes
from graphir.passes.choice.problem import AGAIN, KEEP, Choice, Problem
from graphir.passes.choice.relaxed.bytes import Bytes
from graphir.passes.choice.relaxed.parts import Parts
from graphir.passes.choice.relaxed.times import Times
from graphir.passes.choice.search import search
from instances import INSTANCES, Instance, instance


def at_random(seed: int) -> tuple[Problem, Choice, Outcome]:
    """A problem, a choice for it, and what that comes to."""
    rng = random.Random(seed)
    problem = instance(rng.choice(INSTANCES))
    problem = varied(problem, rng) if seed % 3 else problem
    choice = chosen_at_random(problem, rng)
    return problem, choice, Outcomes(problem)(choice)


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_within_limits_beats_the_bound(seed: int) -> None:
    """Limits are what a random choice holds, on each device or on the fullest one: as tight as can be."""
    problem, _, outcome = at_random(seed)
    if not isfinite(outcome.seconds):
        return
    *peaks, _ = outcome.peaks
    tight = limited(problem, *(peaks if seed % 2 else [max(peaks)] * len(peaks)))
    bound = lower_bound(tight)
    assert bound.seconds <= outcome.seconds
    assert bound.factor == 1
    half = lower_bound(limited(tight, *[(limit or 0) // 2 for limit in tight.limits[:-1]]))
    assert half.factor <= 2.0001
    assert isfinite(half.seconds) == (half.factor == 1)


@pytest.mark.parametrize("seed", range(40))
def test_what_the_program_says_of_one_choice_is_no_more_than_it_comes_to(seed: int) -> None:
    """Groups are whole: all parts but those of a random choice are nothing, and limits are what it holds."""
    problem, choice, outcome = at_random(seed)
    if not isfinite(outcome.seconds):
        return
    *peaks, _ = outcome.peaks
    tight = limited(problem, *[max(peak, 1) + d for d, peak in enumerate(peaks)])
    for goal in ("limits", "factor"):
        lp = Linear()
        parts = Parts(lp, tight)
        held = Bytes(parts, goal)
        numbers = {alike.one: k for k, alike in enumerate(parts.classes)}
        for group, (d, stored) in enumerate(zip(choice.devices, choice.stored, strict=True)):
            kind = "park" if stored >= 0 else "again" if stored == AGAIN else "keep"
            lp.equal({parts.parts[group][numbers[d], kind]: 1.0}, 1.0)
            if stored >= 0:
                lp.equal({parts.away[group][numbers[stored]]: 1.0}, 1.0)
        if goal == "factor":
            assert lp.least(held.factor).least <= 1
        else:
            solved = lp.least(Times(parts).step)
            assert solved.is_feasible
            assert solved.least * total_seconds(tight) <= outcome.seconds


@pytest.mark.parametrize("given", INSTANCES, ids=lambda given: given.name)
def test_what_a_search_finds_is_seldom_far_above_the_bound(given: Instance) -> None:
    problem = instance(given)
    found, bound = search(Outcomes(problem), evaluations=300), lower_bound(problem)
    if not found.outcome.over:
        assert 0.7 * found.outcome.seconds < bound.seconds <= found.outcome.seconds


def chain(limit: int | None) -> Problem:
    return limited(instance(Instance(3, "gpt", 4, 2, 1.0)), limit, limit)


def test_a_chain_on_one_device_takes_all_its_tasks() -> None:
    problem = chain(None)
    groups = tuple([group._replace(devices=(0,), stored=(KEEP,)) for group in problem.groups])
    problem = Problem(**{**vars(problem), "groups": groups})
    bound = lower_bound(problem)
    assert bound.seconds == pytest.approx(Outcomes(problem)(problem.now()).seconds, rel=1e-6)


def test_limits_that_need_it_raise_the_bound() -> None:
    """One device, where all has to be: what does not fit is computed again, and that is counted."""
    problem = chain(None)
    groups = tuple([group._replace(devices=(0,), stored=group.stored[:2]) for group in problem.groups])
    problem = Problem(**{**vars(problem), "groups": groups})
    free = lower_bound(problem)
    need = Outcomes(problem)(problem.now()).peaks[0]
    tight = lower_bound(limited(problem, need * 8 // 10, None))
    assert tight.seconds > free.seconds * 1.02


def test_limits_that_nothing_keeps_are_found_out() -> None:
    problem = instance(Instance(5, "gpt", 3, 2, 0.2))
    bound = lower_bound(problem)
    assert bound.seconds == inf
    outcomes = [Outcomes(problem)(choice) for choice in every_choice(problem)]
    peaks = [outcome.peaks[:2] for outcome in outcomes]
    limits = [limit or 0 for limit in problem.limits[:2]]
    assert 1 < bound.factor <= min(max(p / m for p, m in zip(row, limits, strict=True)) for row in peaks)


def test_limits_are_found_out_where_groups_have_to_be() -> None:
    problem = chain(1 << 40)
    groups = tuple([group._replace(devices=(1,), stored=(KEEP,)) for group in problem.groups])
    problem = Problem(**{**vars(problem), "groups": groups})
    need = Outcomes(problem)(Choice((1,) * 4, (KEEP,) * 4)).peaks[1]
    bound = lower_bound(limited(problem, 1 << 40, need - 100_000))
    assert bound.seconds == inf
    assert bound.factor == pytest.approx(need / (need - 100_000), rel=0.001)


@pytest.mark.parametrize("devices", [2, 8])
def test_devices_that_are_alike_are_bounded_as_those_that_hardly_differ(devices: int) -> None:
    problem = instance(Instance(7, "u-net", 10, devices, 0.9 / devices + 0.1))
    *limits, _ = problem.limits
    uneven = limited(problem, *[(limit or 0) + d for d, limit in enumerate(limits)])
    assert lower_bound(uneven).seconds == pytest.approx(lower_bound(problem).seconds, rel=1e-5)


def test_what_linear_programs_prove_does_not_depend_on_the_solver() -> None:
    lp = Linear()
    x, y = lp.variable(0.0, 10.0), lp.variable(0.0, 10.0)
    lp.at_most({x: -1.0, y: -2.0}, -3.0)
    lp.at_most({x: -3.0, y: -1.0}, -4.0)
    total = lp.variable(0.0, 100.0)
    lp.equal({x: 1.0, y: 1.0, total: -1.0}, 0.0)
    solved = lp.least(total)
    assert 2.0 - 1e-6 < solved.least <= 2.0
    lp.at_most({total: 1.0}, 1.9)
    assert not lp.least(total).is_feasible
