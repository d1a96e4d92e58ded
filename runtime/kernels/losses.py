"""Losses in memory of their own size.

Some of torch's losses are computed for each element in the memory of their result, which then shrinks to one number and
keeps all of it: a step's loss would hold a tensor of the output's size, through the backward and in the caller's list
of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor

from graphir.ir.opset import overload

__all__ = ["LOSSES"]


def _called(kernel: Callable[..., Tensor], *operands: Any, **named: Any) -> Tensor:
    loss = kernel(*operands, **named)
    return loss if loss.dim() else loss.clone()


LOSSES: Final[Mapping[str, Callable[..., Any]]] = {
    type: partial(_called, overload(type)._op)
    for type in (
        "aten.binary_cross_entropy.default",
        "aten.mse_loss.default",
        "aten.smooth_l1_loss.default",
        "aten.soft_margin_loss.default",
    )
}
"""Torch's types whose result keeps that memory, and what calls them."""
