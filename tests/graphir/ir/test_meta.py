"""Rules for tensors without data, held against torch's kernels."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphir.ir.meta import rule_of
from graphir.ir.opset import overload

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
    rule = rule_of("aten._grouped_mm.default")
    shape = rule(left.to("meta"), right.to("meta"), None if offsets is None else offsets.to("meta"))
    assert (shape.shape, shape.stride(), shape.dtype) == (real.shape, real.stride(), real.dtype)


def test_grouped_products_need_matrices_that_fit() -> None:
    with pytest.raises(RuntimeError, match="contraction dimension"):
        rule_of("aten._grouped_mm.default")(torch.empty(4, 3), torch.empty(2, 5, 8), OFFSETS[:2])


@pytest.mark.parametrize("type", ["aten._linalg_svd.default", "aten.linalg_eig.default"])
@pytest.mark.parametrize("shape", [(5, 5), (2, 3, 4, 4)])
def test_matrices_lie_by_column_as_the_kernels_make_them(type: str, shape: tuple[int, ...]):
    real = overload(type)(torch.randn(shape))
    for made, kernel in zip(rule_of(type)(torch.empty(shape, device="meta")), real, strict=True):
        assert (made.shape, made.stride(), made.dtype) == (kernel.shape, kernel.stride(), kernel.dtype)


@pytest.mark.parametrize("full", [True, False])
def test_singular_vectors_of_matrices_that_are_not_square(full: bool):
    type = "aten._linalg_svd.default"
    for shape in ((2, 5, 3), (2, 3, 5)):
        real = overload(type)(torch.randn(shape), full)
        made = rule_of(type)(torch.empty(shape, device="meta"), full)
        assert [(t.shape, t.stride()) for t in made] == [(t.shape, t.stride()) for t in real]


@pytest.mark.parametrize("type", ["aten._unsafe_view.default", "aten.view.default"])
@pytest.mark.parametrize(
    ("shape", "strides", "size"),
    [((1, 6, 8), (48, 1, 6), (1, 6, 2, 4)), ((1, 6, 8), (8, 8, 1), (1, 6, 2, -1)), ((1, 2, 4), (8, 1, 2), (2, 4))],
)
def test_views_have_the_strides_of_real_ones_along_one_element_too(
    type: str, shape: tuple[int, ...], strides: tuple[int, ...], size: tuple[int, ...]
) -> None:
    real = overload(type)(torch.empty_strided(shape, strides), size)
    with FakeTensorMode():
        fake = rule_of(type)(torch.empty_strided(shape, strides), size)
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize("mask", [(False, True, True), (False, True, False), (True, True, True)])
def test_batch_norm_has_no_gradient_of_an_input_that_needs_none(mask: tuple[bool, ...]) -> None:
    type, channels = "aten.native_batch_norm_backward.default", torch.rand(3)
    args = [*torch.rand(2, 4, 3), *[channels] * 5, True, 1e-5, mask]
    bare = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert [t is None for t in rule_of(type)(*bare)] == [t is None for t in overload(type)(*args)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_batch_norms_of_fake_tensors_lie_as_the_kernels_make_them(
    rows: int, dtype: torch.dtype, training: bool
) -> None:
    type = "aten.native_batch_norm.default"
    pictures = torch.rand(rows, 4, 2, 3, dtype=dtype)
    for x in (pictures, pictures.to(memory_format=torch.channels_last), pictures.transpose(2, 3)):
        given = x, *[torch.rand(4) for _ in range(4)]
        real = overload(type)(*given, training, 0.1, 1e-5)
        slopes = overload(f"{type[:-8]}_backward.default")
        back = slopes(x, x, *[given[i] for i in (1, 3, 4)], *real[1:], training, 1e-5, [True] * 3)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in given]
            made = rule_of(type)(*fakes, training, 0.1, 1e-5)
            statistics = [mode.from_tensor(t) for t in real[1:]]
            operands = fakes[0], fakes[0], fakes[1], fakes[3], fakes[4], *statistics
            returned = rule_of(f"{type[:-8]}_backward.default")(*operands, training, 1e-5, [True] * 3)
        for ours, theirs in zip((*made, *returned), (*real, *back), strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
            assert ours.device == theirs.device
