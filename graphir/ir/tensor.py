"""Torch's tensors: of which classes and layouts they may be, from which size on kernels divide them, and their bits."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["GRAIN_SIZE", "PLAIN", "Geometry", "byte_view", "geometry_of", "not_dense", "same_bits"]

PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The classes of tensors whose operators are those that torch dispatches."""

GRAIN_SIZE: Final = 32_768
"""Elements from which torch gives parts of an elementwise kernel or a copy to other threads, and waits for all of them.
Source: ``GRAIN_SIZE`` in aten/src/ATen/TensorIterator.h."""

_shape_of: Final = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_strides_of: Final = torch.Tensor.stride
_offset_of: Final = torch.Tensor.storage_offset
"""The plain integers, also while a recording gives Python other numbers for them."""


class Geometry(NamedTuple):
    """Where in its memory a tensor looks, and as what: offset and strides count elements.

    Attributes:
        conj: it shows the conjugates of what is there; torch says so by a bit of the tensor, and copies nothing.
        neg: it shows the negatives of what is there.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool
    neg: bool


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


def not_dense(tensor: torch.Tensor) -> str:
    """Why a tensor is not dense: ``nested``, ``quantized``, or its layout; empty for a dense one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements in row-major order, on the host: ``u8[n]``."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride before


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with data have one shape, one type and the same bits: a NaN is equal to itself."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(byte_view(a), byte_view(b)))
