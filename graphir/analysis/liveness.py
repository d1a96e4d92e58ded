"""From when to when each storage of a step holds bytes."""

from __future__ import annotations

from typing import NamedTuple

from ..ir.blob import STATE_ROLES
from ..ir.net import Net
from ..ir.plan import Plan
from ..ir.program import Program

__all__ = ["Lifetime", "liveness", "stays"]


class Lifetime(NamedTuple):
    """The positions at which a storage is live: ``start <= position < end``.

    Positions count the operators of a step, or the instructions of a plan. A storage is live at the position that
    first writes it, and at the position of its last use.
    """

    start: int
    end: int


def liveness(subject: Program | Plan | Net) -> dict[str, Lifetime]:
    """The lifetime of each storage of a step, in the order in which they begin.

    State lives throughout, inputs from the start, what is handed back to the end. In a net or program everything else
    lives from its first write to its last use in program order; in a plan, from the first instruction that writes it
    to the one that frees it.
    """
    if isinstance(subject, Plan):
        return _of_plan(subject)
    return _of_net(subject.step if isinstance(subject, Program) else subject)


def _external(net: Net) -> tuple[dict[str, int], set[str]]:
    """The storages that are live at the start, and those that are live at the end."""
    blobs = net.blobs
    start = {blobs[name].storage: 0 for name in net.external_inputs}
    kept = {blobs[name].storage for name in net.external_outputs}
    kept |= {blobs[name].storage for name in net.external_inputs if blobs[name].role in STATE_ROLES}
    return start, kept


def _of_net(net: Net) -> dict[str, Lifetime]:
    blobs = net.blobs
    start, kept = _external(net)
    end = dict.fromkeys(start, 0)
    for position, op in enumerate(net.ops):
        for name in op.inputs:
            end[blobs[name].storage] = position + 1
        for name in op.outputs:
            storage = blobs[name].storage
            end[storage] = position + 1
            if storage not in start:
                start[storage] = position
    count = len(net.ops)
    return {s: Lifetime(first, count if s in kept else end.get(s, first + 1)) for s, first in start.items()}


def stays(program: Program) -> list[tuple[str, Lifetime]]:
    """From when to when each storage of a step is allocated where only ``Free`` operators free, in order of beginning.

    So it is in a Caffe2 workspace, where a blob keeps its bytes until it is freed, which is seldom. What is external,
    and what ``init`` makes, is allocated from the start. A storage that is written again after it was freed stays more
    than once.
    """
    net, blobs = program.step, program.step.blobs
    earlier = (*net.external_inputs, *(name for op in program.init.ops for name in op.outputs if name in blobs))
    since = {blobs[name].storage: 0 for name in earlier}
    found = []
    for position, op in enumerate(net.ops):
        for name in op.outputs:
            storage = blobs[name].storage
            if op.type != "Free":
                since.setdefault(storage, position)
            elif storage in since:
                found.append((storage, Lifetime(since.pop(storage), position)))
    found += [(storage, Lifetime(start, len(net.ops))) for storage, start in since.items()]
    return sorted(found, key=lambda stay: stay[1].start)


def _of_plan(plan: Plan) -> dict[str, Lifetime]:
    net, blobs = plan.step, plan.step.blobs
    start, _ = _external(net)
    end: dict[str, int] = {}
    for position, instruction in enumerate(plan.instructions):
        if instruction.kind == "free":
            end[instruction.storage] = position
        elif instruction.op >= 0:
            for name in instruction.makes(net.ops[instruction.op].outputs):
                start.setdefault(blobs[name].storage, position)
    count = len(plan.instructions)
    return {s: Lifetime(first, end.get(s, count)) for s, first in start.items()}
