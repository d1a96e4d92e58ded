"""What comes before what in every interleaving of a plan's lanes, found by brute force."""

from __future__ import annotations

from graphir.ir.plan import Event, Plan


def happens_before(plan: Plan) -> list[set[int]]:
    """For each position, the positions that come before it."""
    before: list[set[int]] = []
    last: dict[str, int] = {}
    recorded: dict[Event | None, int] = {}
    for position, instruction in enumerate(plan.instructions):
        direct = {last[instruction.lane]} if instruction.lane in last else set()
        if instruction.kind == "wait":
            direct.add(recorded[instruction.event])
        elif instruction.kind == "record":
            recorded[instruction.event] = position
        before.append(direct.union(*[before[i] for i in direct]))
        last[instruction.lane] = position
    return before
