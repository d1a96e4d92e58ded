"""Kernels of graphir's own types: what moves and what is summed across devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from graphir.errors import PlanError
from graphir.ir.blob import overlaps, reach
from graphir.ir.calls import evaluate
from graphir.ir.operator import Operator
from graphir.ir.size import Dims

__all__ = [
    "ALIGNMENT",
    "all_reduce",
    "all_reduce_each",
    "allocate",
    "copy",
    "is_marked",
    "marked",
    "mean_weights",
    "reduction",
    "scale",
    "spanned",
]

ALIGNMENT: Final = 64
"""Bytes; torch's own allocations on the host begin at multiples of it. Kernels may sum in another order where operands
begin elsewhere modulo this."""


def copy(source: Tensor, device: torch.device | None = None) -> Tensor:
    """A new storage on *device* with the values and the strides of *source*, from offset 0."""
    if is_marked(source):
        return marked(copy(marked(source, source), device), source)
    size, stride = source.size(), source.stride()
    if not overlaps(size, stride):
        return allocate(source, size, stride, device or source.device).copy_(source)
    # Elements that share memory cannot be written through the view: bring the span of memory that it covers.
    return copy(spanned(source), device).as_strided(size, stride, 0)


def is_marked(tensor: Tensor) -> bool:
    """Whether torch shows the memory's conjugates or negatives, by a bit of the tensor."""
    return tensor.is_conj() or tensor.is_neg()


def marked(tensor: Tensor, like: Tensor) -> Tensor:
    """A view of *tensor* with those bits changed that *like* has: kernels and views ask for them."""
    shown = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(shown) if like.is_neg() else shown


def spanned(tensor: Tensor) -> Tensor:
    """The memory from the first to the last element, without gaps and each address once."""
    if tensor.is_contiguous():
        return tensor
    return tensor.as_strided((reach(tensor.size(), tensor.stride()),), (1,))


def allocate(like: Tensor, size: Sequence[int], stride: Sequence[int], device: torch.device) -> Tensor:
    """Uninitialised memory of this geometry for the values of *like*, from offset 0 of a storage of its own.

    On the host it begins at the address of *like* modulo 64: kernels may sum in another order where operands begin at
    odd addresses (matrix products do), so that a copy elsewhere would give other bits than the original.
    """
    shift = like.data_ptr() % ALIGNMENT if device.type == "cpu" and like.device.type == "cpu" else 0
    if not shift or not like.numel():
        return torch.empty_strided(size, stride, dtype=like.dtype, device=device)
    nbytes = reach(size, stride) * like.element_size()
    room = numpy.empty(nbytes + ALIGNMENT, numpy.uint8)
    start = (shift - room.ctypes.data) % ALIGNMENT
    return torch.from_numpy(room[start : start + nbytes]).view(like.dtype).as_strided(size, stride)


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
    if not isinstance(shares, tuple) or not all(type(share) is int and share > 0 for share in shares):
        raise PlanError(f"AllReduce has the shares {shares!r}", fix="shares are positive whole numbers, or sizes")
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


def scale(rows: Tensor, *, numerator: int, denominator: int) -> Tensor:
    """The rows times a ratio, without gaps."""
    return torch.mul(rows, numerator / denominator, out=rows.new_empty(rows.shape))


def all_reduce_each(
    inputs: Sequence[tuple[Tensor, ...]], divisor: int | None, weights: Sequence[float] | None = None
) -> tuple[Tensor, ...]:
    """One participant's results of several reductions, with the bits of :func:`all_reduce`.

    Args:
        inputs: for each participant, its tensors.
        divisor: see there.
        weights: see there.
    """
    if weights is not None or len(inputs) < 2:
        return tuple([all_reduce(tensors, divisor, weights) for tensors in zip(*inputs, strict=True)])
    totals: tuple[Tensor, ...] = torch._foreach_add(inputs[0], inputs[1])
    for tensors in inputs[2:]:
        torch._foreach_add_(totals, tensors)
    if divisor is not None:
        torch._foreach_div_(totals, divisor)
    return totals
