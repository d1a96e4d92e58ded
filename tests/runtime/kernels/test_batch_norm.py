"""Batch norms over several participants, held against torch's on all values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from graphir.runtime.kernels.batch_norm import BATCH_NORM
from torch import Tensor

from graphir.ir.optypes import fakes

moments_of = BATCH_NORM["graphir.batch_norm_moments"]
normalise = BATCH_NORM["graphir.synchronised_batch_norm"]
backward = BATCH_NORM["graphir.synchronised_batch_norm_backward"]
NORM = torch.ops.aten.native_batch_norm.default
GRADIENTS = torch.ops.aten.native_batch_norm_backward.default

SHAPES = [(7, 3), (7, 3, 4), (7, 3, 4, 5), (7, 3, 1, 1), (7, 3, 2, 3, 2)]
CUTS = [[1, 6], [2, 1, 4], [1, 1, 1, 4]]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """Contiguous, with the channels last, permuted, with gaps, and repeated."""
    x = torch.randn(shape, dtype=torch.float64).mul(2).add(3).to(dtype)
    yield x
    if len(shape) == 4:
        yield x.to(memory_format=torch.channels_last)
    yield x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
    yield torch.stack([x, x], -1).flatten(-2)[..., ::2]
    yield x[:, :1].expand(shape)


def close(ours: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    assert ours.dtype == theirs.dtype, what
    scale = theirs.double().abs().max().clamp_min(1e-3)
    assert ((ours.double() - theirs.double()).abs().max() / scale).item() < tolerance, what


def test_an_average_over_no_batches_is_refused() -> None:
    x, numbers, none = torch.randn(4, 3), torch.ones(3), torch.tensor(0)
    with pytest.raises(ZeroDivisionError, match="a batch norm averages over no batches"):
        BATCH_NORM["graphir.cumulative_batch_norm"](x, numbers, numbers, numbers.clone(), numbers.clone(), none, eps=0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_forward_and_backward_are_those_of_all_values(cuts: list[int], affine: bool, dtype: torch.dtype) -> None:
    """In every layout, results laid out as torch's are, of element types that the fakes say, too."""
    torch.manual_seed(0)
    tolerance, held = TOLERANCES[dtype], torch.float32 if dtype == torch.bfloat16 else dtype
    for shape in SHAPES:
        for x in layouts(shape, dtype):
            weight = torch.rand(3, dtype=held) + 0.5 if affine else None
            bias = torch.randn(3, dtype=held) if affine else None
            running = torch.zeros(3, dtype=held), torch.ones(3, dtype=held)
            grad = torch.randn(shape, dtype=dtype)
            ours = [[tensor.clone() for tensor in running] for _ in cuts]
            out, mean, inverse = NORM(x, weight, bias, *running, True, 0.1, 1e-5)
            expected = GRADIENTS(grad, x, weight, *running, mean, inverse, True, 1e-5, [True, True, True])

            parts, grads, n = x.split(cuts), grad.split(cuts), len(cuts)
            total = sum(moments_of(part, participant=r, participants=n) for r, part in enumerate(parts))
            made = [
                normalise(part, total, weight, bias, *own, momentum=0.1, eps=1e-5)
                for part, own in zip(parts, ours, strict=True)
            ]
            close(torch.cat([found[0] for found in made]), out, tolerance, "out")
            for found, own in zip(made, ours, strict=True):
                close(found[1], mean, tolerance, "mean")
                close(found[2], inverse, tolerance, "inverse")
                close(own[0], running[0], tolerance, "running mean")
                close(own[1], running[1], tolerance, "running variance")
            for r, part in enumerate(parts):
                alone = NORM(part, weight, bias, *running, len(part) > 1, 0.1, 1e-5)[0]
                assert [s for s, k in zip(made[r][0].stride(), shape, strict=True) if k > 1] == [
                    s for s, k in zip(alone.stride(), shape, strict=True) if k > 1
                ]

            sums = [
                GRADIENTS(g, part, weight, None, None, mean, inverse, True, 1e-5, [False, True, True])
                for g, part in zip(grads, parts, strict=True)
            ]
            weights, biases = (torch.stack([found[k] for found in sums]).sum(0) for k in (1, 2))
            back = [
                backward(g, part, total, weight, mean, inverse, weights, biases)
                for g, part in zip(grads, parts, strict=True)
            ]
            close(torch.cat(back), expected[0], tolerance, "gradient")
            on_meta = [None if t is None else t.to("meta") for t in (parts[1], total, weight, bias, *running)]
            shown = fakes.synchronised_batch_norm(*on_meta, momentum=0.1, eps=1e-5)  # type: ignore[arg-type]
            assert [(t.shape, t.stride(), t.dtype) for t in shown] == [(t.shape, t.stride(), t.dtype) for t in made[1]]
            given = [
                None if t is None else t.to("meta")
                for t in (grads[1], parts[1], total, weight, mean, inverse, weights, biases)
            ]
            shown_back = fakes.synchronised_batch_norm_backward(*given)  # type: ignore[arg-type]
            assert (shown_back.stride(), shown_back.dtype) == (back[1].stride(), back[1].dtype)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    """Sums of squares would lose all of them."""
    x = torch.randn(2000, 4, dtype=torch.float64) + 1e8
    parts = x.split([1, 700, 1299])
    total = sum(moments_of(part, participant=r, participants=3) for r, part in enumerate(parts))
    inverse = normalise(x, total, None, None, None, None, momentum=0.1, eps=0.0)[2]
    torch.testing.assert_close(inverse, x.var(0, correction=0).rsqrt(), rtol=1e-7, atol=0)


def test_a_participant_that_is_left_out_counts_nothing() -> None:
    """Its row is zero in the sum."""
    x = torch.randn(5, 3, dtype=torch.float64)
    some = sum(moments_of(part, participant=r, participants=4) for r, part in zip((0, 2), x.split([2, 3]), strict=True))
    out = normalise(x, some, None, None, None, None, momentum=0.1, eps=1e-5)[0]
    close(out, NORM(x, None, None, None, None, True, 0.1, 1e-5)[0], 1e-12, "out")


def test_gradients_are_in_the_scale_of_their_own_loss() -> None:
    """The weighted mean of sums, times numerator / denominator, counts as the sum of all."""
    x, grad = torch.randn(2, 6, 3, dtype=torch.float64)
    moments = moments_of(x, participant=0, participants=1)
    _, mean, inverse = normalise(x, moments, None, None, None, None, momentum=0.1, eps=1e-5)
    sums = torch.randn(2, 3, dtype=torch.float64)
    whole = backward(grad, x, moments, None, mean, inverse, *sums)
    scaled = backward(grad, x, moments, None, mean, inverse, *(sums * 2 / 7), numerator=7, denominator=2)
    torch.testing.assert_close(scaled, whole)


def test_plans_that_were_made_up_read_nothing_else() -> None:
    x, moments = torch.randn(4, 3), torch.zeros(1, 3, 2, dtype=torch.float64)
    with pytest.raises(IndexError, match="participant 3 is out of bounds for 2"):
        moments_of(x, participant=3, participants=2)
    with pytest.raises(ValueError, match="a parameter or statistic has 2 elements, not 3"):
        normalise(x, moments, None, None, None, None, momentum=0.1, eps=1e-5)
    with pytest.raises(RuntimeError):
        backward(x, x, torch.ones(1, 3, 3), None, *[torch.ones(2)] * 4)
