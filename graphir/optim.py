"""Optimizers that torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["RowWiseAdagrad", "update_dense", "update_rows"]


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum of squares for each row of a parameter, as large embedding tables are trained.

    For row i with the gradient g, of n numbers::

        row_sum[i] += (g * g).sum() / n
        param[i]   -= lr * g / (sqrt(row_sum[i]) + eps)

    This is ``RowWiseSparseAdagrad`` of Caffe2's ``sgd/adagrad_op.h``, whose learning rate is negative, for distinct
    indices: equal indices of a sparse gradient are added up first, as in torch's own optimizers. Rows without a
    gradient keep what they have.

    Args:
        params: parameters, or groups of them; a row is what has the same first index.
        lr: the learning rate.
        eps: added to the root, at least 0.
        initial_accumulator_value: of each row's sum, at least 0.
        maximize: ascend.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        given = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in given.items():
            if not value >= 0:
                raise ValueError(f"{name} is {value}, and has to be at least 0")
        super().__init__(params, {**given, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, dense or sparse.

        Args:
            closure: computes the loss anew, if given; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    first = float(group["initial_accumulator_value"])
                    state["row_sum"] = torch.full(param.shape[:1], first, dtype=param.dtype, device=param.device)
                gradient = -param.grad if group["maximize"] else param.grad
                rate, eps = float(group["lr"]), group["eps"]
                if gradient.is_sparse:
                    gradient = gradient.coalesce()
                    update_rows(param, state["row_sum"], gradient._indices()[0], gradient._values(), rate, eps)
                else:
                    update_dense(param, state["row_sum"], gradient, rate, eps)
        return loss


def update_dense(param: Tensor, row_sum: Tensor, gradient: Tensor, rate: float, eps: float) -> None:
    """Update all rows of a parameter, and their sums."""
    row_sum.add_(_mean_squares(gradient))
    param.addcdiv_(gradient, _column(row_sum.sqrt().add_(eps), gradient), value=-rate)


def update_rows(param: Tensor, row_sum: Tensor, rows: Tensor, gradients: Tensor, rate: float, eps: float) -> None:
    """Update some rows of a parameter, and their sums.

    Args:
        param: overwritten.
        row_sum: overwritten; a number for each row of it.
        rows: distinct indices.
        gradients: of each of these rows.
        rate: the learning rate.
        eps: added to the root.
    """
    row_sum.index_add_(0, rows, _mean_squares(gradients))
    scale = _column(row_sum.index_select(0, rows).sqrt_().add_(eps), gradients)
    param.index_add_(0, rows, gradients / scale, alpha=-rate)


def _mean_squares(rows: Tensor) -> Tensor:
    """The mean of the squares of each row."""
    return rows.reshape(len(rows), -1).pow(2).mean(1) if rows.numel() else rows.new_zeros(len(rows))


def _column(numbers: Tensor, like: Tensor) -> Tensor:
    """One number a row, so that it meets all of the row."""
    return numbers.view(-1, *[1] * (like.dim() - 1))
