"""Torch's tensors: the classes and layouts that they may have, the size at which kernels split them, and their bits."""

from __future__ import annotations

from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["GRAIN_SIZE", "PLAIN", "byte_view", "not_dense", "same_bits"]

PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The classes of tensors whose operators are those that torch dispatches."""

GRAIN_SIZE: Final = 32_768
"""From this number of elements on, torch splits an elementwise kernel or a copy over threads, and waits for them all.
Source: ``GRAIN_SIZE`` in aten/src/ATen/TensorIterator.h."""


def not_dense(tensor: torch.Tensor) -> str:
    """Why a tensor is not dense: ``nested``, ``quantized``, or its layout; empty for a dense one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout)


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements in row-major order, on the host: ``u8[n]``."""
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # the stride of one element may be any


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with data have one shape, one type and the same bits: a NaN is equal to itself."""
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(byte_view(a), byte_view(b)))
