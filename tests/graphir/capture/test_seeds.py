"""Seeds: masks depend on step, replica and seed id, and eager PyTorch can draw the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from graphir.capture import seeded
from graphir.errors import CaptureError
from graphir.ir.seeds import mix


def test_the_low_half_depends_on_step_replica_and_id() -> None:
    seeds = [mix(*triple) & 0xFFFFFFFF for triple in itertools.product(range(20), range(8), range(20))]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_the_same_for_ever() -> None:
    assert mix(0, 0, 0) == 0x238275BC38FCBE91 and 0 <= mix(10**12, 7, 10**6) < 2**64


def test_masks_are_independent_and_unbiased() -> None:
    masks = []
    for step, replica in itertools.product(range(3), range(3)):
        with seeded(step, replica):
            masks += [F.dropout(torch.ones(4000), 0.5) > 0 for _ in range(3)]
    for mask in masks:
        assert abs(mask.float().mean() - 0.5) < 0.05
    for one, two in itertools.combinations(masks, 2):
        assert abs((one == two).float().mean() - 0.5) < 0.05


def test_eager_dropout_draws_what_a_seeded_generator_draws() -> None:
    x = torch.randn(5, 7)
    with seeded(3, 1):
        first, second = F.dropout(x, 0.3), F.dropout(x, 0.3)
    for seed_id, out in enumerate((first, second)):
        noise = torch.ops.aten.bernoulli.p(x, 0.7, generator=torch.Generator().manual_seed(mix(3, 1, seed_id)))
        assert torch.equal(out, x * noise.div(0.7))


def test_the_global_random_state_stays() -> None:
    before = torch.get_rng_state()
    with seeded(0):
        torch.randn(3)
        F.dropout(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operator_without_generator_is_refused() -> None:
    with seeded(0), pytest.raises(CaptureError, match="draws random numbers but takes no generator"):
        torch.ops.aten.native_dropout(torch.ones(3), 0.5, True)
