"""What an operator costs: its arithmetic and the bytes that it moves, from shapes, and the seconds that follow.

The prediction is a roofline: an operator takes as long as the longer one of its arithmetic and its memory traffic,
and a constant for being called. It leaves out what a kernel loses on small matrices and gains in caches, so it tells
short operators from long ones, and not much more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final, NamedTuple, TypeAlias

from ..ir.blob import Blob, dense_nbytes
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.size import Dims, bind_shape

__all__ = ["Rates", "Work", "operator_seconds", "work"]


class Work(NamedTuple):
    """What one operator does.

    Attributes:
        flops: additions and multiplications of matrix products and convolutions; 0 for every other type.
        nbytes: bytes of the operands that it reads and the results that it writes; 0 for views.
    """

    flops: int
    nbytes: int


class Rates(NamedTuple):
    """How fast a device works.

    Attributes:
        flops_per_second: of large matrix products.
        bytes_per_second: of large elementwise operators.
        seconds_per_call: what calling an operator takes, however small it is.
    """

    flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float

    def seconds(self, work: Work) -> float:
        """How long an operator with this work takes."""
        return self.seconds_per_call + max(work.flops / self.flops_per_second, work.nbytes / self.bytes_per_second)


_Shapes: TypeAlias = Callable[[int], tuple[int, ...]]
"""The bound shape of an operator's input at this position, of its outputs at ``-1, -2, …``."""


def work(op: Operator, net: Net, dims: Dims) -> Work:
    """The work of an operator of *net* at these sizes. What has no shape counts nothing."""
    if len(op.effects.views) == len(op.outputs) and op.outputs:
        return Work(0, 0)
    count = len(op.inputs)

    def blob(position: int) -> Blob:
        return net.blob(op.inputs[position] if position >= 0 else op.outputs[-1 - position])

    def shape(position: int) -> tuple[int, ...]:
        return bind_shape(blob(position).shape or (), dims)

    rule = _FLOPS.get(op.type)
    touched = range(-len(op.outputs), count)
    if op.type in _LOOKUPS:
        touched = range(-len(op.outputs), 0)
    return Work(rule(op, shape) if rule else 0, sum(dense_nbytes(blob(i), dims) for i in touched))


def operator_seconds(net: Net, dims: Dims, rates: Rates) -> list[float]:
    """What one instruction of each operator takes. A part of a collective reads all that the collective reads, and
    makes one of its results."""
    found = []
    for op in net.ops:
        done = work(op, net, dims)
        if op.type == "AllReduce":
            read = done.nbytes // 2
            done = done._replace(nbytes=read + read // len(op.inputs))
        found.append(rates.seconds(done))
    return found


_LOOKUPS: Final = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.gather.default"})
"""Types that read a few rows of their operand, about as many bytes as they write."""


def _product(left: int) -> Callable[[Operator, _Shapes], int]:
    """A matrix product whose left factor is this input; the rows and columns are those of the result."""
    return lambda op, shape: 2 * prod(shape(-1)) * shape(left)[-1]


def _convolution(op: Operator, shape: _Shapes) -> int:
    """Each element of the result (of the input, if transposed) meets one filter."""
    swept = shape(0) if op.args.get("transposed") else shape(-1)
    return 2 * prod(swept) * prod(shape(1)[1:])


def _convolution_backward(op: Operator, shape: _Shapes) -> int:
    """As much as the forward, for the gradient of the input and again for that of the weight."""
    swept = shape(1) if op.args.get("transposed") else shape(0)
    mask = op.args.get("output_mask")
    wanted = sum(map(bool, mask[:2])) if isinstance(mask, tuple) else 2
    return 2 * prod(swept) * prod(shape(2)[1:]) * wanted


def _attention(products: int, query: int) -> Callable[[Operator, _Shapes], int]:
    """So many products of queries and keys; those of a causal mask are half empty, and not skipped everywhere."""
    return lambda op, shape: 2 * products * prod(shape(query)) * shape(query + 1)[-2]


_FLOPS: Final[Mapping[str, Callable[[Operator, _Shapes], int]]] = {
    "aten.mm.default": _product(0),
    "aten.bmm.default": _product(0),
    "aten.addmm.default": _product(1),
    "aten.baddbmm.default": _product(1),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "graphir.attention": _attention(2, 0),
    "graphir.attention_backward": _attention(5, 1),
}
