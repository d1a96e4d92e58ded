"""How many bytes operators allocate inside: memory that is neither operand nor result, and gone when they return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..ir.blob import Blob
from ..ir.operator import Operator
from ..ir.optypes.sized import SizedOperator, UnknownShape
from ..ir.optypes.table import operator_type
from ..ir.size import Dims
from .formulas.scratch import SCRATCH

__all__ = ["is_called", "scratch"]


def is_called(op: Operator) -> bool:
    """Whether a kernel runs for *op* that makes something: not for views, nor for what only frees or checks."""
    return op.type not in _UNCALLED and len(op.effects.views) < len(op.outputs)


_UNCALLED: Final = frozenset({"Free", "graphir.load"})


def scratch(op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> int | None:
    """The bytes that *op* holds at most at once, beside its operands and results, where kernels use so many threads.

    None where that is not known: no formula covers its type or its operands, or a shape is not known.
    """
    formula = SCRATCH.get(op.type) or operator_type(op.type).scratch
    if formula is None:
        return None
    try:
        found = formula(SizedOperator(op, blobs, dims, threads))
    except UnknownShape:
        return None
    return None if found is None else max(found, 0)
