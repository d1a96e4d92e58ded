"""Kernels of lookups in a block of a table's rows.

::

    indices        [3, 7, 5, 0, 9]      of the whole table
    of rows 4..7   [-1, 3, 1, -1, -1]   of the block; -1 is a lookup that is not the block's

Only the block's own lookups are read, and only rows of its own are written; those of others contribute nothing. All of
the blocks together have the lookups of the table, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .bounds import CHECKED, check_lookups

__all__ = ["BLOCKS"]

_FORWARD: Final = CHECKED["aten._embedding_bag.default"]
_BACKWARD: Final = CHECKED["aten._embedding_bag_backward.default"]


def _block_indices(indices: Tensor, *, first: int, rows: int, num_weights: int, padding_idx: int = -1) -> Tensor:
    """Indices of a table as those of a block of its rows; -1 where they are not its rows, or the padding's.

    Raises:
        IndexError: an index is none of the table.
    """
    check_lookups(indices, 0, num_weights)
    local = indices - first
    outside = (local < 0).logical_or_(local >= rows)
    if padding_idx >= 0:
        outside.logical_or_(indices == padding_idx)
    return local.masked_fill_(outside, -1)


def _block_embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """The block's rows; zeros for what is none of its."""
    check_lookups(indices, -1, weight.shape[0])
    flat = indices.reshape(-1)
    own = (flat >= 0).nonzero().squeeze(1)
    found = weight.new_zeros((flat.shape[0], weight.shape[1]))
    found.index_copy_(0, own, weight.index_select(0, flat.index_select(0, own)))
    return found.view(*indices.shape, weight.shape[1])


class _Lookups(NamedTuple):
    """A block's own lookups.

    Attributes:
        at: their positions among all.
        rows: of the block.
        bags: of each.
        offsets: of the bags among them.
    """

    at: Tensor
    rows: Tensor
    bags: Tensor
    offsets: Tensor


def _own(indices: Tensor, offsets: Tensor, rows: int | None, include_last_offset: bool) -> _Lookups:
    """The block's own lookups, which are in a bag."""
    check_lookups(indices, -1, rows)
    count = indices.shape[0]
    check_lookups(offsets, 0, count + 1)
    bags = torch.searchsorted(offsets, torch.arange(count, dtype=offsets.dtype, device=offsets.device), right=True)
    bags.sub_(1)
    last = offsets.shape[0] - (2 if include_last_offset else 1)
    mine = (indices >= 0).logical_and_(bags >= 0).logical_and_(bags <= last)
    before = torch.nn.functional.pad(mine.cumsum(0, dtype=offsets.dtype), (1, 0))
    at = mine.nonzero().squeeze(1)
    own = bags.index_select(0, at).to(indices.dtype)
    return _Lookups(at, indices.index_select(0, at), own, before.index_select(0, offsets))


def _bag_sizes(indices: Tensor, offsets: Tensor, *, include_last_offset: bool = False, padding_idx: int = -1) -> Tensor:
    """How many lookups each bag has, without the padding."""
    count = indices.shape[0]
    check_lookups(offsets, 0, count + 1)
    ends = offsets if include_last_offset else torch.nn.functional.pad(offsets, (0, 1), value=count)
    if padding_idx >= 0:
        counted = torch.nn.functional.pad((indices != padding_idx).cumsum(0, dtype=offsets.dtype), (1, 0))
        ends = counted.index_select(0, ends)
    return ends.diff()


def _divided(sums: Tensor, bag_size: Tensor | None) -> Tensor:
    """Sums over bags, or gradients of them, as those of means."""
    return sums if bag_size is None else sums / bag_size.clamp(min=1).to(sums.dtype).unsqueeze(1)


def _taken(weights: Tensor | None, own: _Lookups) -> Tensor | None:
    """The weights of the block's own lookups."""
    return None if weights is None else weights.index_select(0, own.at)


def _block_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    include_last_offset: bool = False,
) -> Tensor:
    """Each bag's sum over the block's rows; its part of the mean, where the bags' whole sizes are given."""
    own = _own(indices, offsets, weight.shape[0], include_last_offset)
    given = (weight, own.rows, own.offsets.to(indices.dtype), False, 0, False)
    sums: Tensor = _FORWARD(*given, _taken(per_sample_weights, own), include_last_offset)[0]
    return _divided(sums, bag_size)


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
    """The gradient of the block's rows."""
    own = _own(indices, offsets, num_weights, include_last_offset)
    empty = own.rows.new_empty(0)
    bags = (own.rows, own.offsets.to(indices.dtype), own.bags, empty, empty)
    scaled = _divided(grad, bag_size).contiguous()
    found: Tensor = _BACKWARD(scaled, *bags, num_weights, False, 0, False, _taken(per_sample_weights, own), -1)
    return found


def _block_embedding_bag_sparse_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_size: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    include_last_offset: bool = False,
) -> tuple[Tensor, Tensor]:
    """The indices and values of the sparse gradient of the block's rows; slots of others' lookups are empty."""
    own = _own(indices, offsets, None, include_last_offset)
    values = grad.new_zeros((indices.shape[0], grad.shape[1]))
    rows = _divided(grad, bag_size).index_select(0, own.bags)
    if (weights := _taken(per_sample_weights, own)) is not None:
        rows.mul_(weights.unsqueeze(1))
    values.index_copy_(0, own.at, rows)
    slots = torch.full_like(indices, -1).index_copy_(0, own.at, own.rows)
    return slots.unsqueeze(0), values


def _block_embedding_bag_per_sample_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, *, include_last_offset: bool = False
) -> Tensor:
    """The gradients of the weights of the block's own lookups; zero for those of others."""
    own = _own(indices, offsets, weight.shape[0], include_last_offset)
    products = grad.index_select(0, own.bags).mul_(weight.index_select(0, own.rows))
    return grad.new_zeros(indices.shape).index_copy_(0, own.at, products.sum(1))


BLOCKS: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.bag_sizes": _bag_sizes,
    "graphir.block_embedding": _block_embedding,
    "graphir.block_embedding_bag": _block_embedding_bag,
    "graphir.block_embedding_bag_backward": _block_embedding_bag_backward,
    "graphir.block_embedding_bag_per_sample_weights_backward": _block_embedding_bag_per_sample_weights_backward,
    "graphir.block_embedding_bag_sparse_backward": _block_embedding_bag_sparse_backward,
    "graphir.block_indices": _block_indices,
}
"""The kernels of the types of lookups in blocks."""
