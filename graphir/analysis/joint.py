"""Reductions that stand side by side in a plan, and updates that follow each other, are made in one call: by generated
code, and as they are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TypeAlias

from ..ir.moved import NOW
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.opset import signature

__all__ = ["Held", "are_alike", "are_incomplete", "grouped", "joins"]

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


def joins(op: Operator, first: Operator, net: Net, updated: Collection[str]) -> bool:
    """Whether an update can be made in one call with others that are held back.

    Args:
        op: the update.
        first: the first one that is held back.
        net: of both.
        updated: the storages that those held back write.
    """
    blobs = net.blobs
    return (
        (op.type, op.args, op.operands, op.device) == (first.type, first.args, first.operands, first.device)
        and [blobs[name].dtype for name in op.inputs] == [blobs[name].dtype for name in first.inputs]
        and _shared(op) == _shared(first)
        and not any(blobs[name].storage in updated for name in op.inputs)
    )


def _shared(op: Operator) -> list[tuple[str, int]]:
    """What updates made in one call share: their learning rate and other numbers, and what says whether to skip
    them."""
    reads = list(op.reads)
    return [reads[i] for i in _numbers(op.type, op.operands, len(reads))]


@lru_cache(maxsize=256)
def _numbers(type: str, operands: str | None, count: int) -> tuple[int, ...]:
    """The positions of the inputs that are numbers of an optimizer."""
    names = signature(type).names(operands, count)
    return tuple([i for i, name in enumerate(names) if name in ("lr", "found_inf") or name.endswith(NOW)])
