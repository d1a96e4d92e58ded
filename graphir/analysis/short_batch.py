"""Plans of steps whose batch is too short for all replicas.

:mod:`.left_out` says which operators are left. They are issued in the plan's own order, a copy right after the
reduction whose result it brings, and :mod:`.instructions` puts in the events. So the plan is one like all others:
``graphir.runtime.check`` proves it, and every executor runs it.

It has no receive buffers: such a step is rare, and what it would keep for the next one is better free.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..collector import collector_paused
from ..ir.plan import Plan
from .buffers import Buffers
from .hazards import hazards
from .instructions import Issue, instructions
from .left_out import LeftOut
from .values import value_numbers

__all__ = ["short_batch"]


def short_batch(plan: Plan, count: int) -> Plan:
    """The plan of steps in which only the first *count* replicas have rows.

    The others execute nothing of their forward and backward, take no part in reductions, keep their buffers, and take
    the same updates. ``program.sharing`` are those that have rows; the others have no dimensions any more.

    Args:
        plan: of a program whose every replica has a batch dimension.
        count: at least 1.

    Raises:
        PlanError: an update reads what only a replica without rows computes.
    """
    with collector_paused():
        left = LeftOut(plan.program, count)
        step = left.program.step
        buffers = Buffers(step, left.program.dims)
        return Plan(
            program=left.program,
            dims={dim: value for dim, value in plan.dims.items() if dim in left.program.dims},
            instructions=instructions(step, list(_order(plan, left)), hazards(step), buffers),
            values=value_numbers(left.program),
        )


def _order(plan: Plan, left: LeftOut) -> Iterator[Issue]:
    """What is left, in the order of the plan's instructions."""
    blobs, issued = left.program.step.blobs, set[int]()
    for instruction in plan.instructions:
        if instruction.kind == "free":
            if instruction.storage in blobs:
                yield instruction.storage
        elif instruction.op >= 0 and instruction.op not in issued:
            issued.add(instruction.op)
            yield from ((position,) for position in left.became[instruction.op])
