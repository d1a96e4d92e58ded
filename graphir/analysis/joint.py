"""Reductions that stand side by side in a plan and are made in one call: by generated code, and as they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TypeAlias

from ..ir.net import Net
from ..ir.operator import Operator

__all__ = ["Held", "are_alike", "are_incomplete", "grouped"]

Held: TypeAlias = tuple[int, Operator, int]
"""A part of a reduction that is held back: its position in the plan, the operator, and which part."""


def are_alike(op: Operator, other: Operator, state: Collection[str]) -> bool:
    """Whether two reductions can be made in one call: their arguments are equal, and no result is *state*."""
    alike = (len(op.inputs), op.args) == (len(other.inputs), other.args)
    return alike and not any(name in state for name in (*op.outputs, *other.outputs))


def are_incomplete(held: Sequence[Held]) -> bool:
    """Whether parts of the reduction that was held back last are still to come."""
    if not held:
        return False
    last = held[-1][1]
    return sum([op is last for _, op, _ in held]) < len(last.outputs)


def grouped(
    held: Sequence[Held], net: Net, state: Collection[str]
) -> tuple[list[tuple[int, Operator]], list[list[tuple[int, Operator]]]]:
    """The parts that are made one by one, and the reductions that are made together, each with its first position:
    those of equal element types among the same devices, all of whose parts are held back."""
    parts = Counter(id(op) for _, op, _ in held)
    apart: list[tuple[int, Operator]] = []
    groups: dict[object, list[tuple[int, Operator]]] = {}
    for position, op, part in held:
        blobs = [net.blobs[name] for name in op.inputs]
        if parts[id(op)] < len(blobs) or op.outputs[0] in state:
            apart.append((position, op))
        elif part == 0:
            groups.setdefault(tuple([(blob.device, blob.dtype) for blob in blobs]), []).append((position, op))
    return apart, list(groups.values())
