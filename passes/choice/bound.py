"""What no choice can beat: a lower bound of the seconds of a step within the limits, by linear programming.

The program is :mod:`.relaxed`; it is solved by HiGHS (Huangfu and Hall, Parallelizing the dual revised simplex method,
2018), which scipy has. What it proves is proven by :mod:`.linear`, whatever the solver's tolerances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from .facts import total_seconds
from .linear import Linear
from .problem import Problem
from .relaxed.bytes import Bytes
from .relaxed.parts import Parts
from .relaxed.times import Times

__all__ = ["Bound", "bound_of", "lower_bound"]

_SLACK: Final = 1e-7
"""The part of a limit that counts as nothing."""


class Bound(NamedTuple):
    """What no choice within the limits can beat.

    Attributes:
        seconds: of a step, at least; infinite where no choice is within the limits.
        factor: what the limits would have to be multiplied by, at least, for a choice to be within them; 1 if one may
            be as they are.
    """

    seconds: float
    factor: float = 1.0


def lower_bound(problem: Problem) -> Bound:
    """The seconds that every choice takes at least, or by how much limits are too small for any.

    Both say what no choice can beat, not what some choice reaches. Of a step whose micro-batches flow it is what all
    tasks take, shared by all devices.
    """
    issued = sum(task.issued for task in problem.tasks)
    if problem.parts > 1:
        spent = sum(min(task.seconds[d] for d in problem.groups[task.group].devices) for task in problem.tasks)
        used = {device for group in problem.groups for device in group.devices}
        return Bound(max(spent / len(used), issued))
    lp = Linear()
    parts = Parts(lp, problem)
    Bytes(parts, "limits")
    times = Times(parts)
    solved = lp.least(times.step)
    if solved.is_feasible:
        return Bound(max(solved.least * total_seconds(problem), issued, 0.0))
    if all(limit is None for limit in problem.limits):  # figures are too far apart for the solver
        return Bound(issued)
    factor = _least_factor(problem)
    if factor <= 1 + _SLACK:  # the limits are on the edge of what the solver can tell
        return lower_bound(replace(problem, limits=(None,) * len(problem.limits)))
    return Bound(float("inf"), factor)


def _least_factor(problem: Problem) -> float:
    """What all limits have to be multiplied by at least."""
    lp = Linear()
    return lp.least(Bytes(Parts(lp, problem), "factor").factor).least


def bound_of(problem: Problem, peaks: Sequence[int]) -> float:
    """The seconds that every choice takes at least that holds no more than the limits, or than *peaks*.

    A plan may fit where its groups are reckoned not to; without what these hold, nothing would be within the limits.
    """
    limits = [None if limit is None else max(limit, peak) for limit, peak in zip(problem.limits, peaks, strict=True)]
    return lower_bound(replace(problem, limits=tuple(limits))).seconds
