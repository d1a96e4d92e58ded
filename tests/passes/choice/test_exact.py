"""The best choice there is: of small problems, that of all choices; and the model is as good as outcomes, or better."""

from __future__ import annotations

import random
from math import inf, isfinite

import pytest
from choices import chosen_at_random, every_choice, limited, varied
from graphir.passes.choice.bound import lower_bound
from graphir.passes.choice.facts import interchangeable
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import Choice, Problem
from instances import INSTANCES, Instance, instance

pytest.importorskip("ortools", reason="the extra test installs it")

from oracle import exact
from oracle.model import add_problem
from ortools.sat.python.cp_model import OPTIMAL, CpModel, CpSolver

EQUAL = 2e-5
"""What is proven is so up to rounding."""

SMALL = [
    Instance(1, "gpt", 3, 2, 1.0),
    Instance(2, "resnet", 3, 2, 1.0),
    Instance(3, "u-net", 4, 2, 1.0),
    Instance(4, "two replicas", 2, 3, 1.0),
    Instance(5, "gpt", 2, 3, 1.0),
]


@pytest.mark.parametrize(
    ("given", "kind"),
    zip(SMALL, ["varied", "alike", "alike", "varied", "varied"], strict=True),
    ids=lambda value: getattr(value, "name", value),
)
def test_the_best_of_all_choices_is_found(given: Instance, kind: str) -> None:
    """Under limits that few choices keep, and under those that none keeps."""
    problem = instance(given)
    problem = varied(problem, random.Random(given.seed)) if kind == "varied" else problem
    outcomes = Outcomes(problem)
    found = [outcome for choice in every_choice(problem) if isfinite((outcome := outcomes(choice)).seconds)]
    fullest = sorted(max(outcome.peaks[:-1]) for outcome in found)
    for limit in (fullest[len(fullest) // 50], fullest[len(fullest) // 4]):
        tight = limited(problem, *[limit] * given.devices)
        least = min(outcome.seconds for outcome in found if max(outcome.peaks[:-1]) <= limit)
        solved = exact.solve(tight, workers=1)
        assert solved.proven and solved.outcome is not None
        assert solved.outcome.over == 0
        assert least <= solved.outcome.seconds <= least * (1 + EQUAL)
        assert lower_bound(tight).seconds <= least
    assert exact.solve(limited(problem, *[fullest[0] - 1] * given.devices), workers=1) == (None, None, True, inf)


def renamed(problem: Problem, choice: Choice) -> Choice:
    """The same choice, but for the names of devices that are alike: those are used in order."""
    names: dict[int, int] = {}
    for row in interchangeable(problem):
        used = [device for device in dict.fromkeys(choice.devices) if device in row]
        names.update(zip([*used, *[device for device in row if device not in used]], row, strict=True))
    stored = [names[s] if s >= 0 else s for s in choice.stored]
    return Choice(tuple([names[d] for d in choice.devices]), tuple(stored))


@pytest.mark.parametrize("seed", range(16))
def test_no_choice_looks_worse_to_the_solver_than_it_is(seed: int) -> None:
    """A random choice is fixed, and limits are what it holds."""
    rng = random.Random(seed)
    problem = instance(rng.choice(INSTANCES[:28]))
    problem = varied(problem, rng) if seed % 2 else problem
    choice = chosen_at_random(problem, rng)
    *peaks, _ = Outcomes(problem)(choice).peaks
    if not isfinite(Outcomes(problem)(choice).seconds):
        return
    tight = limited(problem, *(peaks if seed % 3 else [max(peaks)] * len(peaks)))
    choice = renamed(tight, choice)
    outcome = Outcomes(tight)(choice)
    assert not outcome.over
    cp = CpModel()
    step = add_problem(cp, tight)
    assert step.chosen.has(choice)
    for literal in step.chosen.literals(choice):
        cp.add(literal == 1)
    cp.minimize(step.makespan)
    solver = CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_presolve = False
    assert solver.solve(cp) == OPTIMAL
    assert 0.75 * outcome.seconds < solver.objective_value * step.tick <= outcome.seconds


def test_a_hint_is_kept_where_there_is_no_time() -> None:
    problem = instance(INSTANCES[0])
    hint = Choice((0, 1) * 4, (-1,) * 8)
    found = exact.solve(problem, seconds=0.0, hint=hint)
    assert found.choice == hint
    assert found.outcome == Outcomes(problem)(hint)
    assert not found.proven
    assert found.bound == lower_bound(problem).seconds


def test_a_hint_is_kept_where_nothing_is_better() -> None:
    problem = instance(INSTANCES[13])
    best = exact.solve(problem)
    assert best.proven and best.outcome is not None
    assert best.bound < best.outcome.seconds < best.bound * (1 + EQUAL)
    assert exact.solve(problem, hint=best.choice) == best
