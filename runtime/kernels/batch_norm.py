"""Batch norms that average over batches, and those whose statistics are of several replicas.

Of the latter, each replica reduces its own values by torch's kernel, which takes the mean first and then the distances
from it. What replicas exchange, and what follows from it for each channel, is in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from graphir.ir.opset import overload
from graphir.ir.optypes.fakes import laid_out

from .bounds import CHECKED

__all__ = ["BATCH_NORM"]

_STATISTICS: Final = overload("aten.batch_norm_update_stats.default")._op
_NORMALISE: Final = CHECKED["aten.native_batch_norm.default"]


def _at_least_single(tensor: Tensor) -> Tensor:
    """The tensor in an element type in which statistics can be held."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _cumulative(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's batch norm returns whose running statistics are averages over all batches."""
    given = input, weight, bias, running_mean, running_var
    made: tuple[Tensor, Tensor, Tensor] = _NORMALISE(*given, True, _momentum(batches), eps)
    return made


def _momentum(batches: Tensor) -> float:
    """The weight of the newest batch, by torch's own arithmetic."""
    number = float(batches)
    if not number:
        raise ZeroDivisionError("a batch norm averages over no batches")
    return 1.0 / number


def _moments(input: Tensor, *, participant: int, participants: int) -> Tensor:
    """This participant's counts, means and sums of squared distances, in its row of (participants, 3, channels)."""
    moments = input.new_zeros((participants, 3, input.shape[1]), dtype=torch.float64)
    if not 0 <= participant < participants:
        raise IndexError(f"participant {participant} is out of bounds for {participants}")
    mean, variance = _STATISTICS(_at_least_single(input), None, None, 0.0)
    count, own = input.numel() // max(input.shape[1], 1), moments[participant]
    own[0].fill_(count)
    own[1].copy_(mean)
    own[2].copy_(variance).mul_(count)
    return moments


def _merged(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The count, the mean, and the sum of squared distances from it, of all values of each channel."""
    counts, means, squares = moments.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0).div_(count)
    return count, mean, squares.sum(0).add_((means - mean).square_().mul_(counts).sum(0))


def _forward(
    input: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's batch norm in training returns, by the merged statistics; running statistics are updated."""
    if batches is not None:
        momentum = _momentum(batches)
    count, mean, squares = _merged(moments)
    variance = squares / count
    for running, new in ((running_mean, mean), (running_var, squares.div_(count - 1))):
        if running is not None:
            running.copy_(new.mul(momentum).add_(running, alpha=1 - momentum))
    params = [tensor for tensor in (weight, bias, running_mean, running_var) if tensor is not None]
    dtype = params[0].dtype if params else input.dtype
    single = torch.promote_types(dtype, torch.float32)
    out: Tensor = _NORMALISE(input, weight, bias, mean.to(single), variance.to(single), False, momentum, eps)[0]
    return out, mean.to(dtype), variance.add_(eps).rsqrt_().to(dtype)


def _backward(
    grad_out: Tensor,
    input: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    *,
    numerator: int = 1,
    denominator: int = 1,
) -> Tensor:
    """The gradient of the input: ``scale * (grad_out - sum(grad_out) / n - normalised * sum(grad_out * normalised) /
    n)`` over all n values of a channel."""
    factor = moments[:, 0].sum(0).reciprocal_().mul_(numerator / denominator)
    inverse = save_invstd.double()
    scale = inverse if weight is None else inverse * weight
    slope = (scale * inverse).mul_(grad_weight).mul_(factor).neg_()
    shift = (scale * grad_bias).mul_(factor).neg_()
    found = laid_out(input)
    x, grad = _at_least_single(input), _at_least_single(grad_out)
    made = found if x is input else torch.empty_like(found, dtype=x.dtype)

    def by_channel(numbers: Tensor) -> Tensor:
        return numbers.to(x.dtype).view(-1, *[1] * (x.dim() - 2))

    torch.sub(x, by_channel(save_mean), out=made)
    torch.addcmul(by_channel(shift), made, by_channel(slope), out=made)
    made.addcmul_(grad, by_channel(scale))
    return made if made is found else found.copy_(made)


BATCH_NORM: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.batch_norm_moments": _moments,
    "graphir.cumulative_batch_norm": _cumulative,
    "graphir.synchronised_batch_norm": _forward,
    "graphir.synchronised_batch_norm_backward": _backward,
}
"""The kernels, by operator type."""
