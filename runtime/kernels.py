"""Kernels of graphir's own types: what moves and what is summed across devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphir.errors import PlanError
from graphir.ir.blob import overlaps
from graphir.ir.operator import Operator
from graphir.ir.size import Dims

from .calls import evaluate

__all__ = ["all_reduce", "copy", "mean_weights", "reduction"]


def copy(source: Tensor, device: torch.device | None = None) -> Tensor:
    """A new storage on *device* with the values and the strides of *source*, from offset 0."""
    device = device or source.device
    if source.is_contiguous() and device == source.device:
        return source.clone()
    size, stride = source.size(), source.stride()
    if not overlaps(size, stride):
        return torch.empty_strided(size, stride, dtype=source.dtype, device=device).copy_(source)
    # Elements that share memory cannot be written through the view: bring the span of memory that it covers.
    span = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    flat = source.as_strided((span,), (1,)).to(device, copy=True)
    return flat.as_strided(size, stride, 0)


def mean_weights(shares: Sequence[int]) -> tuple[float, ...] | None:
    """What each participant is scaled by before the mean; None where all shares are equal."""
    if len(set(shares)) <= 1:
        return None
    total = sum(shares)
    return tuple([share * len(shares) / total for share in shares])


def reduction(op: Operator, dims: Dims) -> tuple[int | None, tuple[float, ...] | None]:
    """The divisor and the weights of an ``AllReduce``; see :func:`all_reduce`.

    Raises:
        PlanError: the reduction is neither sum nor mean.
    """
    kind = op.args.get("reduction", "sum")
    if kind == "sum":
        return None, None
    if kind != "mean":
        raise PlanError(f"AllReduce cannot reduce by {kind!r}", fix="reductions: sum, mean")
    shares: Any = evaluate(op.args.get("shares", ()), dims)
    return len(op.inputs), mean_weights(shares)


def all_reduce(inputs: Sequence[Tensor], divisor: int | None, weights: Sequence[float] | None = None) -> Tensor:
    """One participant's result: the sum in participant order, in a storage of its own.

    Args:
        inputs: every participant's tensor.
        divisor: what the sum is divided by; None for a plain sum.
        weights: what each input is scaled by first; None: not at all.
    """
    if weights is None:
        total = inputs[0].add(inputs[1]) if len(inputs) > 1 else inputs[0].clone()
        for tensor in inputs[2:]:
            total.add_(tensor)
    else:
        total = inputs[0].mul(weights[0])
        for tensor, weight in zip(inputs[1:], weights[1:], strict=True):
            total.add_(tensor.mul(weight))
    return total if divisor is None else total.div_(divisor)
