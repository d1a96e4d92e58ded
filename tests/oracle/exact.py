"""The best choice there is, by a constraint solver.

CP-SAT (Perron and Furnon, OR-tools) finds the optimum of a :mod:`.model` of which no choice is worse than it really is.
What it finds is evaluated: where it comes to more than the model says, or holds more than the limits, it is excluded,
and the model is solved again, until its optimum is no less than the best so far.

A hint within the limits is a solution, so that a model without one shows a defect, of the model or of the solver. The
solver's presolve is off: release 9.15 called models with whole bytes infeasible that are not; it is quicker without.
"""

from __future__ import annotations

import time
from math import isfinite
from typing import Final, NamedTuple

from graphir.passes.choice.bound import lower_bound
from graphir.passes.choice.outcome import Outcome, Outcomes
from graphir.passes.choice.problem import Choice, Problem
from ortools.sat.python.cp_model import FEASIBLE, INFEASIBLE, OPTIMAL, UNKNOWN, CpModel, CpSolver

from .model import add_problem

__all__ = ["Exact", "solve"]

_EQUAL: Final = 1e-5
"""Plans whose seconds differ by a smaller part are equally good: times in the model are rounded."""


class Exact(NamedTuple):
    """What a solver has found.

    Attributes:
        choice: the best within the limits; None: none was found.
        outcome: what it comes to.
        proven: whether none is better by more than a hundred-thousandth; without a choice, whether there is none.
        bound: seconds that every choice within the limits takes at least; infinite if there is none.
    """

    choice: Choice | None
    outcome: Outcome | None
    proven: bool
    bound: float


def solve(problem: Problem, seconds: float = 60.0, hint: Choice | None = None, workers: int = 2) -> Exact:
    """The best choice for a problem.

    Args:
        problem: what is placed.
        seconds: how long to look for it.
        hint: a choice to begin with.
        workers: threads of the solver. With one of them, the same problem is solved in the same way.
    """
    return _Solving(problem, seconds, workers).run(hint)


class _Solving:
    """One problem being solved.

    Attributes:
        best: so far, and what it comes to.
        seen: whether the solver has found one within the limits; it is excluded then.
        bound: seconds of what is not excluded, at least.
    """

    def __init__(self, problem: Problem, seconds: float, workers: int) -> None:
        self.until = time.perf_counter() + seconds
        self.problem, self.workers = problem, workers
        self.outcomes = Outcomes(problem)
        self.cp = CpModel()
        self.step = add_problem(self.cp, problem)
        self.cp.minimize(self.step.makespan)
        self.best: tuple[Choice, Outcome] | None = None
        self.seen = False
        self.bound = lower_bound(problem).seconds

    def run(self, hint: Choice | None) -> Exact:
        for choice in (self.problem.now(), *([] if hint is None else [hint])):
            self.take(choice)
        if self.best is not None and self.step.chosen.has(self.best[0]):
            chosen = {state.index for state in self.step.chosen.literals(self.best[0])}
            for states in self.step.chosen.states:
                for state in states.values():
                    self.cp.add_hint(state, state.index in chosen)
        if not isfinite(self.bound):
            return self.found(True)
        self.cp.add(self.step.makespan >= self.step.ticks(self.bound))
        while (left := self.until - time.perf_counter()) > 0:
            if self.solved(left):
                return self.found(True)
        return self.found(False)

    def take(self, choice: Choice) -> Outcome:
        """What a choice comes to; the best is kept."""
        outcome = self.outcomes(choice)
        if not outcome.over and (self.best is None or outcome.seconds < self.best[1].seconds):
            self.best = choice, outcome
        return outcome

    def solved(self, seconds: float) -> bool:
        """Solve the model for what is as good as the best; whether nothing is better."""
        step = self.step
        if self.best is not None:
            self.cp.add(step.makespan <= step.ticks(self.best[1].seconds))
        solver = CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = self.workers
        solver.parameters.cp_model_presolve = False
        status = solver.solve(self.cp)
        if status == INFEASIBLE:
            if self.best is not None and not self.seen:
                raise AssertionError(f"the model of a placement excludes {self.best[0]}")
            return True
        if status not in (OPTIMAL, FEASIBLE, UNKNOWN):
            raise AssertionError(self.cp.validate())
        self.bound = max(self.bound, solver.best_objective_bound * step.tick)
        if status != UNKNOWN:
            choice = step.chosen.choice(solver)
            self.seen |= not self.take(choice).over
            self.cp.clear_hints()
            step.chosen.forbid(choice)
        return self.best is not None and self.best[1].seconds * (1 - _EQUAL) <= self.bound

    def found(self, proven: bool) -> Exact:
        if self.best is None:
            return Exact(None, None, proven, float("inf") if proven else self.bound)
        choice, outcome = self.best
        least = outcome.seconds * (1 - _EQUAL)
        return Exact(choice, outcome, proven, least if proven else min(self.bound, least))
