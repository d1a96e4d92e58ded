"""The scratch of lookups in a block of a table's rows: at most, which is where all lookups are the block's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from ...ir.dtype import ITEMSIZE
from ...ir.optypes.sized import SizedOperator

__all__ = ["BLOCKS"]


def _of_indices(call: SizedOperator) -> int:
    """Two masks, and a number."""
    return 2 * prod(call.operand(0).shape) + _NUMBER


def _of_sizes(call: SizedOperator) -> int:
    """The ends of the bags; with padding a mask and two counts."""
    indices, offsets = call.operand(0), call.operand(1)
    each = ITEMSIZE[offsets.dtype]
    if call.args.get("padding_idx", -1) < 0:
        return offsets.nbytes + each
    return prod(indices.shape) * (1 + 2 * each) + each


def _of_rows(call: SizedOperator) -> int:
    """Rows, their positions, and their indices."""
    indices, result = call.operand(1), call.result()
    return result.nbytes + prod(indices.shape) * (_NUMBER + ITEMSIZE[indices.dtype])


_NUMBER: Final = 8
"""Bytes of a position, of which torch has 64 bits."""

_TELLING: Final = 41
"""Bytes of each lookup while a block's own are told from others: three positions, and masks."""

_SORTED: Final = 24
"""Bytes of each lookup that torch sorts for the dense gradient: its index, position and bag."""


def _own(call: SizedOperator, first: int) -> int:
    """The block's own lookups: position, index and bag of each, and their offsets."""
    indices, offsets = call.operand(first), call.operand(first + 1)
    return prod(indices.shape) * (_NUMBER + 2 * ITEMSIZE[indices.dtype]) + offsets.nbytes


def _given(call: SizedOperator) -> tuple[int, int]:
    """The bytes of an operand, or of a result, divided by the sizes of bags; and those of the weights of lookups."""
    pattern = call.op.operands or "t" * len(call.op.inputs)
    sizes, weights = pattern[3:4] == "t", pattern[4:5] == "t"
    averaged = call.result() if call.op.type == "graphir.block_embedding_bag" else call.operand(0)
    return averaged.nbytes * sizes, call.operand(-1).nbytes * weights


def _of_bags(call: SizedOperator) -> int:
    """Torch has the sizes of bags beside the own lookups, and the offsets twice."""
    averaged, weights = _given(call)
    indices, offsets = call.operand(1), call.operand(2)
    telling = _TELLING * prod(indices.shape) + offsets.nbytes + _NUMBER - call.result().nbytes
    return max(telling, _own(call, 1) + 2 * offsets.nbytes + weights + averaged)


def _of_bags_backward(call: SizedOperator) -> int:
    averaged, weights = _given(call)
    return _own(call, 1) + _SORTED * prod(call.operand(1).shape) + averaged + 2 * weights


def _of_sparse_backward(call: SizedOperator) -> int:
    averaged, weights = _given(call)
    return _own(call, 1) + call.result(1).nbytes + averaged + weights


def _of_weights_backward(call: SizedOperator) -> int:
    """Rows of the gradient and of the weight for each lookup, and their products' sums."""
    lookups, width = prod(call.operand(2).shape), call.operand(0).shape[1]
    return _own(call, 2) + lookups * ITEMSIZE[call.operand(0).dtype] * (2 * width + 1)


BLOCKS: Final[Mapping[str, Callable[[SizedOperator], int]]] = {
    "graphir.block_indices": _of_indices,
    "graphir.bag_sizes": _of_sizes,
    "graphir.block_embedding": _of_rows,
    "graphir.block_embedding_bag": _of_bags,
    "graphir.block_embedding_bag_backward": _of_bags_backward,
    "graphir.block_embedding_bag_sparse_backward": _of_sparse_backward,
    "graphir.block_embedding_bag_per_sample_weights_backward": _of_weights_backward,
}
"""The formulas, by type."""
