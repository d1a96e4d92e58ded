"""How many additions and multiplications matrix products and convolutions take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from ...ir.optypes.sized import SizedOperator
from ...ir.optypes.table import operator_type
from .ctc import CTC_FLOPS

__all__ = ["flops_of"]


def _product(left: int) -> Callable[[SizedOperator], int]:
    """A matrix product whose left factor is this input; the rows and columns are those of the result."""
    return lambda op: 2 * prod(op.result().shape) * op.operand(left).shape[-1]


def _convolution(op: SizedOperator) -> int:
    """Each element of the result (of the input, if transposed) meets one filter."""
    swept = op.operand(0) if op.args.get("transposed") else op.result()
    return 2 * prod(swept.shape) * prod(op.operand(1).shape[1:])


def _convolution_backward(op: SizedOperator) -> int:
    """As much as the forward, for the gradient of the input and again for that of the weight."""
    swept = op.operand(1) if op.args.get("transposed") else op.operand(0)
    mask = op.args.get("output_mask")
    wanted = sum(map(bool, mask[:2])) if isinstance(mask, tuple) else 2
    return 2 * prod(swept.shape) * prod(op.operand(2).shape[1:]) * wanted


def _attention(products: int, query: int) -> Callable[[SizedOperator], int]:
    """So many products of queries and keys. Under a causal mask half of each is empty, but not every kernel skips that
    half."""
    return lambda op: 2 * products * prod(op.operand(query).shape) * op.operand(query + 1).shape[-2]


_FLOPS: Final[Mapping[str, Callable[[SizedOperator], int]]] = {
    "aten.mm.default": _product(0),
    "aten.bmm.default": _product(0),
    "aten.addmm.default": _product(1),
    "aten.baddbmm.default": _product(1),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "graphir.attention": _attention(2, 0),
    "graphir.attention_backward": _attention(5, 1),
    **CTC_FLOPS,
}
"""The formulas, by type of torch and of graphir."""


def flops_of(type: str) -> Callable[[SizedOperator], int] | None:
    """The formula of *type*, also of a user's; None where arithmetic is not what a call spends its time on."""
    return _FLOPS.get(type) or operator_type(type).flops
