"""Caffe2's sparse optimizers, which update rows slot by slot.

Torch adds the slots of a row of a sparse gradient up, and updates the row once. In Caffe2 each slot updates its row and
the row's state by itself, so that a later slot of the same row sees what an earlier one has left. Rows do not depend on
each other, so all slots go that are the first of their row, then all that are the second, and so on::

    slot      0  1  2  3  4        round 0: slots 0 and 1
    row       7  3  7  7  3        round 1: slots 2 and 4
                                   round 2: slot 3

That gives the bits of Caffe2's loop: within a round no row comes twice. Arithmetic is in Caffe2's order of operators.
Slots with the index -1 are empty.

Sources: ``adagrad_op.h``, ``adam_op.h``, ``momentum_sgd_op.h``, ``ftrl_op.cc``, ``adadelta_op.h``, ``storm_op.h`` of
``caffe2/sgd``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["SLOT_BY_SLOT", "check_slots"]


def check_slots(indices: Tensor, rows: int) -> bool:
    """Whether there is no empty slot.

    Torch's kernels for sparse tensors write to whatever address an index leads to, and a plan may make indices up.

    Raises:
        IndexError: an index is neither that of a row nor -1.
    """
    lowest, highest = (int(bound) for bound in indices.aminmax()) if indices.numel() else (0, -1)
    if lowest < -1 or highest >= rows:
        wrong = highest if highest >= rows else lowest
        raise IndexError(f"the sparse index {wrong} is out of bounds for {rows} rows")
    return lowest >= 0


def _rounds(indices: Tensor, param: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The slots of each round, and their rows."""
    index = indices[0]
    slots = torch.arange(index.shape[0], device=index.device)
    if not check_slots(indices, param.shape[0]):
        slots = slots[index >= 0]
    ordered, order = index[slots].sort(stable=True)
    places = torch.arange(order.shape[0], device=index.device)
    begins = torch.ones_like(order, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    number = places - places.where(begins, 0).cummax(0).values if places.numel() else places
    by_round = order[number.sort(stable=True).indices]
    for part in by_round.split(number.bincount().tolist()):
        chosen = slots[part]
        yield chosen, index[chosen]


def _row_means(squares: Tensor) -> Tensor:
    return squares.reshape(squares.shape[0], -1).mean(1)


def _beside(per_row: Tensor, rows: Tensor) -> Tensor:
    """A number for each row, in a shape that broadcasts to *rows*."""
    return per_row.reshape((-1,) + (1,) * (rows.dim() - 1))


def _adagrad(
    param: Tensor,
    moment: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    weight_decay: float = 0.0,
    by_rows: bool = False,
) -> None:
    """``h += g²`` (by rows the mean of a row's squares), ``w += lr g / (√h + ε)``."""
    for slots, rows in _rounds(indices, param):
        before, grad = param[rows], values[slots]
        if weight_decay:
            grad = grad.add(before, alpha=weight_decay)
        squares = grad * grad
        total = moment[rows] + (_row_means(squares) if by_rows else squares)
        root = total.sqrt() + epsilon
        moment.index_copy_(0, rows, total)
        param.index_copy_(0, rows, before + lr * grad / (_beside(root, grad) if by_rows else root))


def _adam(
    param: Tensor,
    moment_1: Tensor,
    moment_2: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    correction: Tensor,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-5,
    by_rows: bool = False,
    adapted: bool = False,
) -> Tensor:
    """``w += lr c m / (√v + ε)``; what each slot's row is raised by, or *adapted* the same without the rate."""
    given = torch.zeros_like(values)
    rate = correction if adapted else lr * correction
    for slots, rows in _rounds(indices, param):
        grad = values[slots]
        squares = grad * grad
        first = moment_1[rows] * beta1 + grad * (1 - beta1)
        second = moment_2[rows] * beta2 + (_row_means(squares) if by_rows else squares) * (1 - beta2)
        root = second.sqrt() + epsilon
        growth = rate * first / (_beside(root, grad) if by_rows else root)
        moment_1.index_copy_(0, rows, first)
        moment_2.index_copy_(0, rows, second)
        param.index_copy_(0, rows, param[rows] + (lr * growth if adapted else growth))
        given.index_copy_(0, slots, growth)
    return given


def _momentum_sgd(
    param: Tensor,
    buffer: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> Tensor:
    """``m' = μ m + lr g``, ``w -= m'``, or with Nesterov's momentum ``(1 + μ) m' - μ m``; what is subtracted."""
    given = torch.zeros_like(values)
    for slots, rows in _rounds(indices, param):
        before = buffer[rows]
        after = lr * values[slots] + momentum * before
        step = (1 + momentum) * after - momentum * before if nesterov else after
        buffer.index_copy_(0, rows, after)
        param.index_copy_(0, rows, param[rows] - step)
        given.index_copy_(0, slots, step)
    return given


def _ftrl(
    param: Tensor,
    n_z: Tensor,
    indices: Tensor,
    values: Tensor,
    alpha_inverse: Tensor,
    *,
    beta: float = 1.0,
    lambda1: float = 0.001,
    lambda2: float = 0.001,
) -> None:
    """``n' = n + g²``, ``z' = z + g - (√n' - √n) w / alpha``; the weight follows from both."""
    for slots, rows in _rounds(indices, param):
        grad, (n, z) = values[slots], n_z[rows].unbind(-1)
        total = n + grad * grad
        root = total.sqrt()
        z = z + grad - (root - n.sqrt()) * alpha_inverse * param[rows]
        weight = (z.sign() * lambda1 - z) / ((root + beta) * alpha_inverse + lambda2)
        n_z.index_copy_(0, rows, torch.stack([total, z], -1))
        param.index_copy_(0, rows, weight.where(z.abs() > lambda1, 0.0))


def _adadelta(
    param: Tensor,
    moment: Tensor,
    delta: Tensor,
    indices: Tensor,
    values: Tensor,
    lr: Tensor,
    *,
    epsilon: float = 1e-5,
    decay: float = 0.95,
) -> None:
    """``h = k h + (1 - k) g²``, ``s = √(d + ε) / √(h + ε) g``, ``d = k d + (1 - k) s²``, ``w += lr s``, k the decay."""
    for slots, rows in _rounds(indices, param):
        grad, deltas = values[slots], delta[rows]
        squares = decay * moment[rows] + (1 - decay) * grad * grad
        step = (deltas + epsilon).sqrt() / (squares + epsilon).sqrt() * grad
        moment.index_copy_(0, rows, squares)
        delta.index_copy_(0, rows, decay * deltas + (1 - decay) * step * step)
        param.index_copy_(0, rows, param[rows] + lr * step)


def _storm(param: Tensor, moment: Tensor, indices: Tensor, values: Tensor, lr: Tensor, keep: Tensor) -> None:
    """``m = g + keep (m - g)``, ``w += lr m``."""
    for slots, rows in _rounds(indices, param):
        grad = values[slots]
        new = grad + keep * (moment[rows] - grad)
        moment.index_copy_(0, rows, new)
        param.index_copy_(0, rows, param[rows] + lr * new)


SLOT_BY_SLOT: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.caffe2_sparse_adagrad": _adagrad,
    "graphir.caffe2_sparse_adam": _adam,
    "graphir.caffe2_sparse_momentum_sgd": _momentum_sgd,
    "graphir.caffe2_sparse_ftrl": _ftrl,
    "graphir.caffe2_sparse_adadelta": _adadelta,
    "graphir.caffe2_sparse_storm": _storm,
}
"""The kernels of these types."""
