"""Torch's tensors: of which classes and layouts they may be, and from which size on kernels divide them."""

from __future__ import annotations

from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["GRAIN_SIZE", "PLAIN", "not_dense"]

PLAIN: Final = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
"""The classes of tensors whose operators are those that torch dispatches."""

GRAIN_SIZE: Final = 32_768
"""Elements from which torch gives parts of an elementwise kernel or a copy to other threads, and waits for all of them.
Source: ``GRAIN_SIZE`` in aten/src/ATen/TensorIterator.h."""


def not_dense(tensor: torch.Tensor) -> str:
    """What a tensor is that is not dense: ``nested``, ``quantized``, or its layout; nothing of a dense one."""
    if tensor.is_nested or tensor.is_quantized:
        return "nested" if tensor.is_nested else "quantized"
    return "" if tensor.layout is torch.strided else str(tensor.layout)
