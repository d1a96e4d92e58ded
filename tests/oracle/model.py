"""A problem as a model of a constraint solver, CP-SAT: its optimum is what no choice can beat.

chosen.py   which choice: a variable for each device of a group and each thing that becomes there of what it saves
step.py     when tasks and copies are executed, and what devices hold
copies.py   values that cross, once to each device that reads them
trips.py    values that are parked, and come back by the clock of their device
buffers.py  what the copies to a device are received in

Times and bytes are counted in millionths, rounded so that no choice looks worse than it is. The model says what
:mod:`graphir.passes.choice.outcome` says but for five things, of which each makes choices look better, never worse:

* of many groups, what is received takes as much as is there at once, however buffers are reused;
* what lingers at home after the last copy to a device takes nothing;
* a copy home sets out when the model likes, within what any clock says, not when its route is free;
* what is parked, and read in the backward by a group that did not read it in the forward, crosses to it for nothing;
* copies home that set out before the same task do so in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphir.passes.choice.facts import readers_of
from graphir.passes.choice.problem import Problem

from .buffers import add_buffers
from .chosen import Chosen
from .copies import add_value
from .step import Step
from .trips import Trips

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel

__all__ = ["Chosen", "Step", "add_problem"]


def add_problem(cp: CpModel, problem: Problem) -> Step:
    """Add to an empty model what a problem says: which choices there are, and what each comes to."""
    step = Step(cp, problem, Chosen(cp, problem))
    trips = Trips(step)
    found = [readers_of(problem, value) for value in problem.values]
    for number, (value, readers) in enumerate(zip(problem.values, found, strict=True)):
        add_value(step, number, value, readers)
        trips.add(number, value, readers)
    step.order_lanes()
    trips.close()
    add_buffers(step, found)
    step.keep_limits()
    return step
