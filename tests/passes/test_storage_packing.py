"""passes.packing: values in few bytes of storage."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
from graphir.passes.packing import Span, pack


def total(spans: list[Span], storages: list[int]) -> int:
    return sum(
        max(span.nbytes for span, s in zip(spans, storages, strict=True) if s == storage) for storage in set(storages)
    )


def overlap(spans: list[Span], storages: list[int]) -> bool:
    held: dict[int, list[Span]] = {}
    for span, storage in zip(spans, storages, strict=True):
        held.setdefault(storage, []).append(span)
    return any(a.end >= b.start for group in held.values() for a, b in pairwise(sorted(group)))


def least(spans: list[Span]) -> int:
    """By trying every plan."""
    plans = product(*(range(i + 1) for i in range(len(spans))))
    return min(total(spans, list(plan)) for plan in plans if not overlap(spans, list(plan)))


def random_spans(rng: random.Random, count: int, positions: int, sizes: int) -> list[Span]:
    spans = []
    for _ in range(count):
        start = rng.randrange(positions)
        spans.append(Span(start, rng.randrange(start, positions), rng.randrange(sizes)))
    return spans


def test_nothing_needs_nothing() -> None:
    assert pack([]) == []


def test_a_chain_needs_two_storages() -> None:
    spans = [Span(i, i + 1, 100 - i) for i in range(50)]
    assert total(spans, pack(spans)) == 100 + 99


def test_live_at_one_position_is_no_sharing() -> None:
    assert len(set(pack([Span(0, 3, 8), Span(3, 5, 8)]))) == 2


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([Span(0, 0, 1), Span(1, 2, 9), Span(2, 3, 1)], id="as made"),
        pytest.param([Span(0, 1, 1), Span(1, 2, 9), Span(3, 3, 1)], id="reversed"),
        pytest.param([Span(0, 1, 5), Span(0, 3, 3), Span(2, 5, 4), Span(4, 6, 5)], id="neither"),
    ],
)
def test_small_plans_are_the_best(spans: list[Span]) -> None:
    assert total(spans, pack(spans)) == least(spans)


def test_random_plans_are_sound_and_near_the_best() -> None:
    rng = random.Random(0)
    ours = best = 0
    for _ in range(150):
        spans = random_spans(rng, 6, 8, 10)
        found = pack(spans)
        assert not overlap(spans, found)
        ours += total(spans, found)
        best += least(spans)
    assert ours <= best * 1.02


@pytest.mark.parametrize("seed", range(6))
def test_large_plans_are_sound(seed: int) -> None:
    rng = random.Random(seed)
    spans = random_spans(rng, 400, 600, rng.choice((1, 3, 10**6)))
    found = pack(spans)
    assert not overlap(spans, found)
    assert pack(list(spans)) == found
    live = max(sum(s.nbytes for s in spans if s.start <= at <= s.end) for at in range(600))
    assert live <= total(spans, found) <= 1.6 * live
