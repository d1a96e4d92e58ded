"""Seeds: masks depend on step, replica and seed id, and eager PyTorch can draw the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphir.capturing.seeded import seeded
from graphir.errors import CaptureError
from graphir.ir.seeds import mix


def test_the_low_half_depends_on_step_replica_and_id() -> None:
    seeds = [mix(*triple) & 0xFFFFFFFF for triple in itertools.product(range(20), range(8), range(20))]
    assert len(set(seeds)) == len(seeds)


def test_seeds_are_the_same_for_ever() -> None:
    assert mix(0, 0, 0) == 0x238275BC38FCBE91 and 0 <= mix(10**12, 7, 10**6) < 2**64


KEEP, SIZE = 0.7, 4000


def masks() -> dict[tuple[int, int, int], Tensor]:
    """Dropout's masks, by step, replica and seed id."""
    found = {}
    for step, replica in itertools.product(range(4), range(4)):
        with seeded(step, replica):
            for seed_id in range(4):
                found[step, replica, seed_id] = F.dropout(torch.ones(SIZE), 1 - KEEP) > 0
    return found


def test_masks_are_unbiased() -> None:
    """The sum over masks of their squared deviations is chi-square distributed: 64 degrees of freedom."""
    kept = torch.stack([mask.double().mean() for mask in masks().values()])
    chi_square = ((kept - KEEP).square() / (KEEP * (1 - KEEP) / SIZE)).sum().item()
    assert 32 < chi_square < 107  # all but 0.1 % of unbiased masks


def test_elements_are_unbiased() -> None:
    """Each element is dropped as often as any other: 4000 degrees of freedom."""
    stacked = torch.stack([*masks().values()]).double()
    chi_square = ((stacked.mean(0) - KEEP).square() / (KEEP * (1 - KEEP) / len(stacked))).sum().item()
    assert abs(chi_square - SIZE) < 3.3 * (2 * SIZE) ** 0.5


def test_masks_are_independent_between_steps_replicas_and_operators() -> None:
    """Correlations of all 2016 pairs, also of masks that are shifted against each other by an element."""
    stacked = torch.stack([*masks().values()]).double() - KEEP
    for shift in (0, 1, 2):
        products = stacked @ stacked.roll(shift, 1).T / (SIZE * KEEP * (1 - KEEP))
        pairs = products[~torch.eye(len(stacked), dtype=torch.bool)] * SIZE**0.5
        assert pairs.abs().max() < 4.6 and abs(pairs.mean()) < 0.1 and 0.9 < pairs.std() < 1.1


def test_consecutive_seeds_give_first_numbers_that_are_uniform() -> None:
    """The first number of each generator, in 20 bins: 19 degrees of freedom."""
    first = []
    for step, replica in itertools.product(range(100), range(10)):
        with seeded(step, replica):
            first.append(torch.rand(()))
    counts = torch.stack(first).histc(20, 0, 1)
    assert ((counts - 50).square() / 50).sum() < 43.8


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


@pytest.mark.parametrize("numbers", [("x",), (None,), (1.0,), (-1,), (0, "y"), (0, True)])
def test_steps_and_replicas_are_whole_numbers(numbers: Any) -> None:
    with pytest.raises(CaptureError, match=r"seeded: (step|replica) is "), seeded(*numbers):
        pass
