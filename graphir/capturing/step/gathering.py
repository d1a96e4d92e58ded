"""How the results of a step function become one where several replicas have them, as far as the step tells."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

from ...ir.program import Gathered, Scalar
from ..record.values import Value

__all__ = ["gathered"]

_ADDED: Final = ("aten.sum.", "aten.count_nonzero.")
"""Whole numbers that these make of a batch are, over replicas, added up."""


def gathered(
    values: Sequence[Value | Scalar], losses: Sequence[Value], reduced: Sequence[tuple[Value, Value]]
) -> list[Gathered | None]:
    """How each result of several replicas becomes one; *reduced* are parameters and their gradients."""
    local = _Local({gradient.index for _, gradient in reduced})
    return [_gather(value, losses, local) if isinstance(value, Value) else "first" for value in values]


def _gather(value: Value, losses: Sequence[Value], local: _Local) -> Gathered | None:
    if any(value is loss for loss in losses):
        return "mean"
    if not local.has(value):
        return "first"
    if value.dtype.is_floating_point:
        return "mean"
    call = value.call
    return "sum" if call is not None and call.type.startswith(_ADDED) else None


class _Local:
    """Which values are each replica's own: those that follow from its rows, or are drawn. What is made of reduced
    gradients is not.

    Args:
        reduced: the gradients of parameters, which all replicas have alike once the update begins.
    """

    def __init__(self, reduced: Container[int]) -> None:
        self._reduced = reduced
        self._known: dict[int, bool] = {}

    def has(self, value: Value) -> bool:
        """Whether a value is each replica's own."""
        order, waiting = list[Value](), [value]
        while waiting:
            found = waiting.pop()
            if found.index in self._known or (found.call is None and self._leaf(found)):
                continue
            order.append(found)
            self._known[found.index] = False
            assert found.call is not None
            waiting += found.call.inputs
        for found in sorted(order, key=lambda v: v.index):
            assert found.call is not None
            drawn = found.call.seed is not None
            self._known[found.index] = drawn or any(self._of(v, found) for v in found.call.inputs)
        return self._known[value.index]

    def _leaf(self, value: Value) -> bool:
        self._known[value.index] = value.root.kind == "input"
        return True

    def _of(self, value: Value, reader: Value) -> bool:
        reduced = reader.phase == "update" and value.index in self._reduced
        return not reduced and self._known[value.index]
