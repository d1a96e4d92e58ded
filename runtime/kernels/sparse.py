"""Sparse gradients: what torch does with the sparse tensors that programs hold as two dense ones.

``indices`` (1, n) and ``values`` (n, d) say that ``values[k]`` is added to row ``indices[0, k]``, in the order of k. A
slot with the index -1 is empty: adding tensors, or leaving padding out, can give fewer rows than there are slots. So
sizes do not depend on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from graphir.optim import update_rows

from .bounds import CHECKED
from .communication import all_reduce, mean_weights
from .one_by_one import one_by_one
from .slots import SLOT_BY_SLOT, check_slots

__all__ = ["SPARSE", "SPARSE_UPDATES"]

_UNCHECKED: Final[Callable[..., Tensor]] = torch.ops.aten._sparse_coo_tensor_unsafe.default
"""Makes a sparse tensor, and trusts the indices."""


def _tensor(indices: Tensor, values: Tensor, rows: int) -> Tensor:
    """The sparse tensor of what is not empty.

    Torch's kernels for sparse tensors add to whatever address an index leads to, and a plan may make indices up.

    Raises:
        IndexError: an index is neither that of a row nor -1.
    """
    if not check_slots(indices, rows):
        present = indices[0] >= 0
        indices, values = indices[:, present], values[present]
    return _UNCHECKED(indices, values, (rows, *values.shape[1:]))


def _slots(gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """A sparse tensor as *count* slots."""
    indices, values = gradient._indices(), gradient._values()
    empty = count - values.shape[0]
    if not empty:
        return indices, values
    pad = torch.nn.functional.pad
    return pad(indices, (0, empty), value=-1), pad(values, (0, 0, 0, empty))


def sparse_sum(
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    rows: int,
    reduction: str = "sum",
    shares: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The indices and values of a sum of sparse gradients, in the order in which torch adds sparse tensors.

    Torch merges two of them from their beginnings: where both are at the same row, that is one row of the sum.
    """
    gradients = [_tensor(i, v, rows) for i, v in zip(indices, values, strict=True)]
    mean = reduction == "mean"
    total = all_reduce(gradients, len(gradients) if mean else None, mean_weights(shares) if mean else None)
    return _slots(total, sum(v.shape[0] for v in values))


def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    per_sample_weights: Tensor | None,
    *,
    num_weights: int,
    mode: int = 0,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor]:
    """The indices and values of the sparse gradient of an embedding bag's weight, in memory of their own."""
    given = (grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, False, mode, True)
    gradient = CHECKED["aten._embedding_bag_backward.default"](*given, per_sample_weights, padding_idx)
    found, values = _slots(gradient, indices.shape[0])
    return found.clone(), values  # torch's share the memory of the operand


SPARSE: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.sparse_sum": sparse_sum,
    "graphir.embedding_bag_backward": embedding_bag_backward,
    **SLOT_BY_SLOT,
}
"""The kernels of the types that make sparse gradients, and of those that update rows slot by slot."""


def _sgd(param: Tensor, indices: Tensor, values: Tensor, lr: float, *, maximize: bool) -> None:
    """``torch.optim.SGD`` without momentum."""
    gradient = _tensor(indices, values, param.shape[0])
    param.add_(-gradient if maximize else gradient, alpha=-lr)


def _adagrad(
    param: Tensor,
    indices: Tensor,
    values: Tensor,
    total: Tensor,
    step: Tensor,
    lr: float,
    *,
    lr_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """``torch.optim.Adagrad``."""
    gradient = _tensor(indices, values, param.shape[0])
    step.add_(1)
    gradient = (-gradient if maximize else gradient).coalesce()
    step_size = lr / (1 + (step.item() - 1) * lr_decay)
    rows, summands = gradient._indices(), gradient._values()
    total.add_(_like(gradient, rows, summands.pow(2)))
    scale = total.sparse_mask(gradient)._values().sqrt_().add_(eps)
    param.add_(_like(gradient, rows, summands / scale), alpha=-step_size)


def _adam(
    param: Tensor,
    indices: Tensor,
    values: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    maximize: bool,
) -> None:
    """``torch.optim.SparseAdam``."""
    gradient = _tensor(indices, values, param.shape[0])
    t = int(step.add_(1).item())
    gradient = (-gradient if maximize else gradient).coalesce()
    rows, new = gradient._indices(), gradient._values()
    before = exp_avg.sparse_mask(gradient)._values()
    change = new.sub(before).mul_(1 - beta1)
    exp_avg.add_(_like(gradient, rows, change))
    before_sq = exp_avg_sq.sparse_mask(gradient)._values()
    change_sq = new.pow(2).sub_(before_sq).mul_(1 - beta2)
    exp_avg_sq.add_(_like(gradient, rows, change_sq))
    numerator = change.add_(before)
    denominator = change_sq.add_(before_sq).sqrt_().add_(eps)
    step_size = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    param.add_(_like(gradient, rows, -step_size * numerator.div_(denominator)))


def _row_wise_adagrad(
    param: Tensor, indices: Tensor, values: Tensor, row_sum: Tensor, lr: float, *, eps: float, maximize: bool
) -> None:
    """:class:`graphir.optim.RowWiseAdagrad`."""
    gradient = _tensor(indices, values, param.shape[0])
    gradient = (-gradient if maximize else gradient).coalesce()
    update_rows(param, row_sum, gradient._indices()[0], gradient._values(), lr, eps)


def _like(gradient: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return _UNCHECKED(indices, values, gradient.shape)


SPARSE_UPDATES: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.sparse_sgd": partial(one_by_one, _sgd),
    "graphir.sparse_adagrad": partial(one_by_one, _adagrad),
    "graphir.sparse_adam": partial(one_by_one, _adam),
    "graphir.sparse_row_wise_adagrad": partial(one_by_one, _row_wise_adagrad),
}
"""What builds the kernels of the optimizer types that take sparse gradients."""
