"""A collective that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["all_gather"]


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
        return tuple(_sum([gradient[i].to(place) for gradient in received]) for i, place in enumerate(ctx.places))


def _sum(parts: Sequence[Tensor]) -> Tensor | None:
    if not parts:
        return None
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
