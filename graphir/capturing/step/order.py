"""The order of the calls of a step function, and what of them belongs to the update."""

from __future__ import annotations

from collections.abc import Sequence

from ..record.values import RecordedCall

__all__ = ["in_order", "settle"]


def settle(calls: Sequence[RecordedCall]) -> None:
    """Let calls on state alone belong to the update, if they are outside of modules, and neither the forward nor a
    backward reads what they make."""
    read: set[int] = set()
    for call in reversed(calls):
        alone = not call.scope and call.seed is None and not any(value.follows_input for value in call.inputs)
        if call.phase == "forward" and alone and not any(value.index in read for value in call.outputs):
            call.phase, call.scope = "update", next((value.scope for value in call.inputs if value.scope), "")
            for value in call.outputs:
                value.phase = "update"
        elif call.phase != "update":
            read.update([value.index for value in call.inputs])


def in_order(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls of a backward, and those behind, with what belongs to the forward first: what the step computes of its
    results. A write of state stays in its place, and what comes of it."""
    made = {value.index for call in calls for value in call.outputs}
    first: list[RecordedCall] = []
    others: list[RecordedCall] = []
    for call in calls:
        free = call.phase == "forward" and not any(value.version for value in call.outputs)
        if free and not any(value.index in made for value in call.inputs):
            made.difference_update([value.index for value in call.outputs])
            first.append(call)
        else:
            others.append(call)
    return [*first, *others]
