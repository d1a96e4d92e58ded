"""Plans of steps whose batch is too short for all replicas.

:mod:`.left_out` says which operators are left. They are issued in the plan's own order, a copy right after the
reduction whose result it brings, and :mod:`.instructions` puts in the events. So the plan is one like all others:
``graphir.runtime.check`` proves it, and every executor runs it.

It has no receive buffers: such a step is rare, and what it would keep for the next one is better free.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..collector import collector_paused
from ..ir.device import Device
from ..ir.plan import Plan
from .buffers import Buffers
from .hazards import Hazards, hazards
from .instructions import Issue, instructions
from .left_out import LeftOut
from .values import value_numbers

__all__ = ["short_batch"]


def short_batch(plan: Plan, count: int) -> Plan:
    """The plan of steps in which only the first *count* replicas have rows.

    The others execute nothing of their forward and backward, take no part in reductions, keep their buffers, and take
    the same updates. ``program.sharing`` are those that have rows; the others have no dimensions any more.

    Args:
        plan: of a program in which every replica has a batch dimension.
        count: at least 1.

    Raises:
        PlanError: a replica has none, or an update reads what only a replica without rows computes.
    """
    with collector_paused():
        left = LeftOut(plan.program, count)
        step = left.program.step
        found, buffers = hazards(step), Buffers(step, left.program.dims)
        return Plan(
            program=left.program,
            dims={dim: value for dim, value in plan.dims.items() if dim in left.program.dims},
            instructions=instructions(step, list(_order(plan, left, found)), found, buffers),
            values=value_numbers(left.program),
        )


def _order(plan: Plan, left: LeftOut, found: Hazards) -> Iterator[Issue]:
    """What is left, in the order of the plan's instructions; transfers that are a group there are one here."""
    blobs, issued = left.program.step.blobs, set[int]()
    kind, transfers = "", list[int]()
    for instruction in plan.instructions:
        if instruction.kind == "record":
            continue
        became = left.became[instruction.op] if instruction.op >= 0 and instruction.op not in issued else ()
        issued.add(instruction.op)
        together = instruction.kind == kind and not any(
            set(found.earlier[position]).intersection(transfers) for position in became[:1]
        )
        if not together:
            yield from _groups(transfers, left)
        kind = instruction.kind
        if kind in ("copy", "collective"):
            transfers += became
        elif kind != "free":
            yield from ((position,) for position in became)
        elif instruction.storage in blobs:
            yield instruction.storage
    yield from _groups(transfers, left)


def _groups(transfers: list[int], left: LeftOut) -> Iterator[Issue]:
    """Reductions at once, and copies from one device to another. *transfers* is empty then."""
    step, groups = left.program.step, dict[tuple[Device, ...], list[int]]()
    for position in transfers:
        op = step.ops[position]
        route = (step.blobs[op.inputs[0]].device, op.device) if op.kind == "copy" else ()
        groups.setdefault(route, []).append(position)
    transfers.clear()
    yield from map(tuple, groups.values())
