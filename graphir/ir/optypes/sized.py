"""Operators with their sizes bound, which formulas of cost and of workspace are given."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from ..blob import Blob, contiguous_strides, dense_strides, same_strides
from ..dtype import ITEMSIZE
from ..operator import Operator, bind_arg
from ..size import Dims, bind_shape

__all__ = ["SizedOperand", "SizedOperator", "UnknownShape", "copied"]


class UnknownShape(Exception):
    """The shape of an operand is not known."""


class SizedOperand(NamedTuple):
    """An operand or result, its sizes bound; ``strides`` are None for contiguous ones, as a blob's are."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        return self.strides is None or same_strides(self.shape, self.strides, contiguous_strides(self.shape))

    @property
    def channels_last(self) -> bool:
        """Whether its elements lie so that those of dimension 1 are neighbours."""
        if self.strides is None or len(self.shape) < 4 or self.shape[1] == 1 or self.contiguous:
            return False
        wanted = dense_strides(self.shape, (1, *range(len(self.shape) - 1, 1, -1), 0))
        return same_strides(self.shape, self.strides, wanted)


class SizedOperator(NamedTuple):
    """An operator, the sizes that it runs at, and the threads that its kernels use. Sizes are bound when asked for."""

    op: Operator
    blobs: Mapping[str, Blob]
    dims: Dims
    threads: int

    @property
    def args(self) -> Mapping[str, Any]:
        """The operator's arguments, sizes bound."""
        return {name: bind_arg(arg, self.dims) for name, arg in self.op.args.items()}

    def has(self, position: int) -> bool:
        """Whether an input is given for the type's tensor parameter at *position*."""
        pattern = "t" * len(self.op.inputs) if self.op.operands is None else self.op.operands
        return pattern[position : position + 1] == "t"

    def operand(self, position: int) -> SizedOperand:
        """The operand at *position*."""
        return _bound(self.blobs[self.op.inputs[position]], self.dims)

    def strided(self, *positions: int) -> list[SizedOperand]:
        """The operands at *positions* that may not be contiguous."""
        return [self.operand(i) for i in positions if self.blobs[self.op.inputs[i]].strides is not None]

    def result(self, position: int = 0) -> SizedOperand:
        """The result at *position*."""
        return _bound(self.blobs[self.op.outputs[position]], self.dims)


def _bound(blob: Blob, dims: Dims) -> SizedOperand:
    if blob.shape is None or blob.dtype is None:
        raise UnknownShape
    strides = None if blob.strides is None else bind_shape(blob.strides, dims)
    return SizedOperand(bind_shape(blob.shape, dims), strides, blob.dtype)


def copied(call: SizedOperator, *positions: int) -> int:
    """Bytes of the operands that a kernel for dense operands copies first."""
    strided = call.strided(*positions)
    return sum(operand.nbytes for operand in strided if not (operand.contiguous or operand.channels_last))
