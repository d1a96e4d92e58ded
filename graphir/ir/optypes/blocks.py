"""Types of lookups in a block of a table's rows: their schemas and fakes.

``block_indices`` turns indices of a table into indices of a block of its rows: -1 for an index that is outside the
block, or the padding's. Lookups in a block read its own rows, and zeros for rows of other blocks, so that the sum over
all blocks is the lookup in the whole table. A bag's sum is divided by ``bag_size``, if given: the size of the whole
bag, which ``bag_sizes`` counts without the padding. A sparse gradient has an empty slot for each lookup in another
block.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from .fakes import typed
from .record import OperatorType

__all__ = ["BLOCKS"]

_BAGS: Final = "Tensor indices, Tensor offsets, Tensor? bag_size=None, Tensor? per_sample_weights=None, *, "


def _block_indices(indices: Tensor, **options: Any) -> Tensor:
    """Indices of the same shape."""
    return indices.new_empty(indices.shape)


def _bag_sizes(indices: Tensor, offsets: Tensor, *, include_last_offset: bool = False, padding_idx: int = -1) -> Tensor:
    """A number for each bag."""
    _check(indices, offsets)
    return offsets.new_empty(_bags(offsets, include_last_offset))


def _block_embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """A row for each index."""
    torch._check(weight.dim() == 2, lambda: f"graphir.block_embedding takes a matrix, not {typed(weight)}")
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _block_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    include_last_offset: bool = False,
) -> Tensor:
    """A row for each bag."""
    _check(indices, offsets, bag_size, per_sample_weights, matrix=weight, last=include_last_offset)
    return weight.new_empty((_bags(offsets, include_last_offset), weight.shape[1]))


def _block_embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    num_weights: int,
    include_last_offset: bool = False,
) -> Tensor:
    """The gradient of each row of the block."""
    _check(indices, offsets, bag_size, per_sample_weights, matrix=grad, last=include_last_offset)
    return grad.new_empty((num_weights, grad.shape[1]))


def _block_embedding_bag_sparse_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    include_last_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """Indices and values, with a slot for each index."""
    _check(indices, offsets, bag_size, per_sample_weights, matrix=grad, last=include_last_offset)
    return indices.new_empty((1, len(indices))), grad.new_empty((len(indices), grad.shape[1]))


def _block_embedding_bag_per_sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, *, include_last_offset: bool = False
) -> Tensor:
    """A number for each index."""
    _check(indices, offsets, matrix=grad, last=include_last_offset)
    return grad.new_empty(indices.shape)


def _bags(offsets: Tensor, include_last_offset: bool) -> int:
    return offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]


def _check(
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    matrix: Tensor | None = None,
    last: bool = False,
) -> None:
    """Raise a RuntimeError unless these are bags of lookups, with a size for each bag and a weight for each lookup."""
    fits = indices.dim() == offsets.dim() == 1 and (matrix is None or matrix.dim() == 2)
    fits = fits and (bag_size is None or bag_size.shape == (_bags(offsets, last),))
    fits = fits and (weights is None or weights.shape == indices.shape)
    given = ", ".join(typed(t) for t in (matrix, indices, offsets, bag_size, weights) if t is not None)
    torch._check(fits, lambda: f"the operands are not bags of lookups: {given}")


def _record(type: str, schema: str, fake: Any, **known: Any) -> OperatorType:
    return OperatorType(f"graphir.{type}", f"{type}{schema}", fake, **known)


BLOCKS: Final = (
    _record(
        "block_indices",
        "(Tensor indices, *, SymInt first, SymInt rows, SymInt num_weights, int padding_idx=-1) -> Tensor",
        _block_indices,
        only_elements=True,
    ),
    _record(
        "bag_sizes",
        "(Tensor indices, Tensor offsets, *, bool include_last_offset=False, int padding_idx=-1) -> Tensor",
        _bag_sizes,
        only_elements=True,
    ),
    _record(
        "block_embedding",
        "(Tensor weight, Tensor indices) -> Tensor",
        _block_embedding,
        only_elements=True,
        reads_rows=True,
    ),
    # The kernels of bags are torch's, which reach beyond the elements of their operands.
    _record(
        "block_embedding_bag",
        f"(Tensor weight, {_BAGS}bool include_last_offset=False) -> Tensor",
        _block_embedding_bag,
        reads_rows=True,
    ),
    _record(
        "block_embedding_bag_backward",
        f"(Tensor grad, {_BAGS}SymInt num_weights, bool include_last_offset=False) -> Tensor",
        _block_embedding_bag_backward,
        nondeterministic="adds in no fixed order on CUDA",
    ),
    _record(
        "block_embedding_bag_sparse_backward",
        f"(Tensor grad, {_BAGS}bool include_last_offset=False) -> (Tensor, Tensor)",
        _block_embedding_bag_sparse_backward,
        only_elements=True,
    ),
    _record(
        "block_embedding_bag_per_sample_weights_backward",
        "(Tensor grad, Tensor weight, Tensor indices, Tensor offsets, *, bool include_last_offset=False) -> Tensor",
        _block_embedding_bag_per_sample_weights_backward,
        only_elements=True,
    ),
)
