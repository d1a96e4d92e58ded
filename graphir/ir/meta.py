"""What operators return on tensors without data, where torch's own rules differ from its kernels.

A rule takes the operator's arguments, with tensors on the meta device or fake ones, and returns such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["META"]


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A matrix product for each group: torch's rule takes bfloat16 only, its kernels take other types, too.

    Rows are padded to 16 bytes. Source: ``create_grouped_gemm_output_tensor`` in
    aten/src/ATen/native/GroupedMMUtils.h.
    """
    torch._check(mat_a.size(-1) == mat_b.size(-2), lambda: "contraction dimension of mat_a and mat_b must match")
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    groups = None
    if mat_a.dim() == mat_b.dim():
        groups = mat_a.size(0) if offs is None else offs.size(0)
    dtype = out_dtype or mat_a.dtype
    unit = 16 // dtype.itemsize
    pitch = -(-columns // unit) * unit
    if groups is None:
        return mat_a.new_empty_strided((rows, columns), (pitch, 1), dtype=dtype)
    return mat_a.new_empty_strided((groups, rows, columns), (rows * pitch, pitch, 1), dtype=dtype)


META: Final[Mapping[str, Callable[..., Any]]] = {"aten._grouped_mm.default": _grouped_mm}
"""The rules, by operator type."""
