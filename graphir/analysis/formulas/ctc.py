"""The arithmetic and the scratch of connectionist temporal classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from ...ir.dtype import ITEMSIZE
from ...ir.optypes.sized import SizedOperator

__all__ = ["CTC_FLOPS", "CTC_SCRATCH"]


def _cells(call: SizedOperator, first: int) -> int:
    """At most how many numbers the table has: a row for each frame, with the blanks between the longest labels."""
    frames, batch, _ = call.operand(first).shape
    return batch * frames * (2 * call.operand(first + 1).shape[-1] + 1)


def _flops(first: int, tables: int) -> Callable[[SizedOperator], int]:
    """Each number of a table is the logarithm of a sum of three exponentials, and a product."""
    return lambda call: 8 * tables * _cells(call, first)


def _scratch(first: int, tables: int) -> Callable[[SizedOperator], int]:
    """So many tables; a backward also has the losses. Before, labels are looked at: their positions and a mask."""

    def nbytes(call: SizedOperator) -> int:
        probabilities, targets = call.operand(first), call.operand(first + 1)
        itemsize = ITEMSIZE[probabilities.dtype]
        losses = probabilities.shape[1] * itemsize if tables > 1 else 0
        labels = 8 * targets.shape[-1] + 9 * prod(targets.shape)
        return max(tables * _cells(call, first) * itemsize + losses, labels)

    return nbytes


CTC_FLOPS: Final[Mapping[str, Callable[[SizedOperator], int]]] = {
    "graphir.ctc_loss": _flops(0, 1),
    "graphir.ctc_loss_backward": _flops(1, 3),
}
CTC_SCRATCH: Final[Mapping[str, Callable[[SizedOperator], int]]] = {
    "graphir.ctc_loss": _scratch(0, 1),
    "graphir.ctc_loss_backward": _scratch(1, 2),
}
"""The formulas, by type."""
