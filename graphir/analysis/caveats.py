"""By how many bytes a caveat of a program can matter: what the kernels that a device may choose hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Final

from ..ir.dtype import ITEMSIZE
from ..ir.net import Net
from ..ir.optypes.sized import SizedOperator, UnknownShape
from ..ir.size import Dims
from ..ir.text import nbytes_text

__all__ = ["caveats_with_bytes"]


def caveats_with_bytes(caveats: Iterable[str], net: Net, dims: Dims) -> tuple[str, ...]:
    """*caveats* with the bytes of the operators that they are about.

    Args:
        caveats: of a program; one about a type of operator begins with the type.
        net: the program's step.
        dims: the value of each dimension.
    """
    return tuple([caveat + _bytes(caveat.partition(":")[0], net, dims) for caveat in caveats])


def _bytes(type: str, net: Net, dims: Dims) -> str:
    if type not in _HELD:
        return ""
    what, nbytes = _HELD[type]
    try:
        each = [nbytes(SizedOperator(op, net.blobs, dims, 1)) for op in net.ops if op.type == type]
    except UnknownShape:
        return ""
    return f"; {what}: {nbytes_text(max(each))} at most" if each else ""


def _scores(call: SizedOperator) -> int:
    """All scores of an attention, which the math kernel holds at once."""
    query, key = call.operand(0), call.operand(1)
    return prod(query.shape[:-1]) * key.shape[-2] * ITEMSIZE[query.dtype]


def _unfolded(call: SizedOperator) -> int:
    """The patches of a convolution's input, one beside the other, for each output."""
    weight, result = call.operand(1), call.result()
    return result.nbytes // max(result.shape[1], 1) * prod(weight.shape[1:])


_HELD: Final[Mapping[str, tuple[str, Callable[[SizedOperator], int]]]] = {
    "graphir.attention": ("the math kernel holds the scores of one operator", _scores),
    "aten.convolution.default": ("the input of an operator, unfolded for a product of matrices", _unfolded),
}
"""By type of operator: what a kernel may hold, and how much of it for one operator."""
