"""A collective that gradients flow through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_gather", "summed"]


def all_gather(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Every participant's tensor, for each participant: ``tensors[i]`` is on the device of participant i.

    Backward gives a participant the sum, in participant order, of what reaches its tensor at all of them. It is one
    function for all, so it waits for nobody: autograd runs it when the gradients of all that have any are there.

    Args:
        tensors: of equal shapes.

    Returns:
        For each participant a tensor of shape ``[participants, *shape]``.
    """
    return _AllGather.apply(*tensors)  # type: ignore[no-any-return,no-untyped-call]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.places = [tensor.device for tensor in tensors]
        return tuple(torch.stack([tensor.to(own.device) for tensor in tensors]) for own in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        received = [gradient for gradient in gradients if gradient is not None]
        return tuple(summed([gradient[i] for gradient in received], place) for i, place in enumerate(ctx.places))


def summed(gradients: Iterable[Tensor | None], place: torch.device) -> Tensor | None:
    """The sum of those that there are, in their order, on *place*; None where there are none."""
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None:
            moved = gradient.to(place)
            total = moved if total is None else total + moved
    return total
