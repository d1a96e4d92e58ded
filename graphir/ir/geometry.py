"""Geometries of tensors: shape, strides, offset and element type."""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

import torch

from ..errors import GraphirError, nearest
from .blob import Blob, contiguous_strides, same_strides
from .dtype import ITEMSIZE
from .size import LARGEST, Dims, bind, bind_shape
from .symbols import to_symbol, to_torch

__all__ = ["Geometry", "absurdity", "contiguous", "geometry", "geometry_of", "same_layout"]

_shape_of: Final = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_strides_of: Final = torch.Tensor.stride
_offset_of: Final = torch.Tensor.storage_offset
"""Torch's own getters. They give plain integers even while a recording gives Python other numbers."""


class Geometry(NamedTuple):
    """Which elements of its memory a tensor shows: offset and strides count elements, and every size is bound.

    Attributes:
        conj: the tensor shows the conjugates of the elements in memory. Torch sets a bit of the tensor, and copies
            nothing.
        neg: the tensor shows the negatives of the elements in memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool = False
    neg: bool = False

    @property
    def symbol(self) -> str:
        """The element type, as a blob has it."""
        return str(to_symbol(self.dtype))

    @property
    def declared_strides(self) -> tuple[int, ...] | None:
        """The strides, as a blob has them: None where they are contiguous."""
        return None if self.strides == contiguous_strides(self.shape) else self.strides

    def __str__(self) -> str:
        text, strides = f"{self.symbol}[{','.join(map(str, self.shape))}]", self.declared_strides
        if strides is not None:
            text += f" strides [{','.join(map(str, strides))}]"
        return text + (f" offset {self.offset}" if self.offset else "")


def contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> Geometry:
    """The geometry of a contiguous tensor at the beginning of its memory."""
    return Geometry(shape, contiguous_strides(shape), 0, dtype)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The geometry of *tensor* now."""
    return Geometry(
        tuple(_shape_of(tensor)),
        _strides_of(tensor),
        int(_offset_of(tensor)),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


def geometry(blob: Blob, dims: Dims) -> Geometry | None:
    """The blob's geometry under *dims*; None where its shape or type is not known.

    Raises:
        GraphirError: a dimension has no value, or the element type is unknown.
    """
    shape, dtype, strides, offset = blob.shape, blob.dtype, blob.strides, blob.offset
    if shape is None or dtype is None:
        return None
    if dtype not in ITEMSIZE:
        raise GraphirError(
            f"blob {blob.name!r} has the unknown element type {dtype!r}{nearest(dtype, ITEMSIZE)}",
            fix=f"element types: {', '.join(ITEMSIZE)}",
        )
    bound = bind_shape(shape, dims)
    return Geometry(
        bound,
        contiguous_strides(bound) if strides is None else bind_shape(strides, dims),
        offset if isinstance(offset, int) else bind(offset, dims),
        to_torch(dtype),
    )


def absurdity(g: Geometry) -> str:
    """Why no tensor can have this geometry; empty if one can."""
    numbers = (*g.shape, *(g.declared_strides or ()), g.offset)
    if min(numbers) < 0 or max(*numbers, prod(g.shape)) > LARGEST:
        return f"is declared {g}, which is not a possible size"
    return f"has {len(g.strides)} strides for {len(g.shape)} dimensions" if len(g.strides) != len(g.shape) else ""


def same_layout(a: Geometry, b: Geometry) -> bool:
    """Whether two geometries of one shape put each element at the same place, counted from the first.

    The stride of a dimension of size 1, and all strides of an empty tensor, do not count.
    """
    return a.strides == b.strides or 0 in a.shape or same_strides(a.shape, a.strides, b.strides)
