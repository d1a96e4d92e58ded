"""Rules for tensors without data, held against torch's kernels."""

from __future__ import annotations

import pytest
import torch

from graphir.ir.meta import META

OFFSETS = torch.tensor([2, 2, 7, 12], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b", "offsets"),
    [
        ((12, 8), (4, 10, 8), OFFSETS),  # rows of the first in groups, a matrix for each
        ((16, 16), (10, 16), OFFSETS),  # what is summed over in groups, as in the backward
        ((4, 5, 8), (12, 8), OFFSETS),  # columns of the second in groups
        ((3, 5, 8), (3, 10, 8), None),  # a product for each matrix
    ],
    ids=["rows", "sums", "columns", "batches"],
)
def test_grouped_products_are_laid_out_as_the_kernel_does(
    a: tuple[int, ...], b: tuple[int, ...], offsets: torch.Tensor | None, dtype: torch.dtype
) -> None:
    left, right = torch.randn(a, dtype=dtype), torch.randn(b, dtype=dtype).mT
    real = torch._grouped_mm(left, right, offs=offsets)
    rule = META["aten._grouped_mm.default"]
    shape = rule(left.to("meta"), right.to("meta"), None if offsets is None else offsets.to("meta"))
    assert (shape.shape, shape.stride(), shape.dtype) == (real.shape, real.stride(), real.dtype)


def test_grouped_products_need_matrices_that_fit() -> None:
    with pytest.raises(RuntimeError, match="contraction dimension"):
        META["aten._grouped_mm.default"](torch.empty(4, 3), torch.empty(2, 5, 8), OFFSETS[:2])
