"""passes.pipeline(limits=): no longer than a schedule's own order that keeps within them, nor than with less room."""

from __future__ import annotations

from functools import cache

import pytest
from random_cuts import SCHEDULES, Planned, cut, least_of, planned

from graphir import passes

SEEDS = (1, 2)
"""Cuts of which steps within the peaks of an own order were up to 1.16 times as long as that order."""

program = cache(cut)


@cache
def own(seed: int, machine: str | None = None) -> dict[str, Planned]:
    """By schedule, what its own order comes to."""
    return {
        name: planned(passes.pipeline(program(seed), name, topology=machine), machine)  # type: ignore[arg-type]
        for name in SCHEDULES
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_no_longer_than_any_own_order_within_the_limits(seed: int) -> None:
    for limits in [plan.peaks for plan in own(seed).values()]:
        found = planned(passes.pipeline(program(seed), limits=limits))
        assert found.keeps(limits)
        assert found.seconds <= min([plan.seconds for plan in own(seed).values() if plan.keeps(limits)]) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_schedule_within_its_own_peaks_is_no_longer_than_its_own_order(schedule: str) -> None:
    for seed in SEEDS:
        alone = own(seed)[schedule]
        found = planned(passes.pipeline(program(seed), schedule, limits=alone.peaks))  # type: ignore[arg-type]
        assert found.keeps(alone.peaks) and found.seconds <= alone.seconds * (1 + 1e-9)


def test_on_cards_steps_are_judged_as_they_are_issued() -> None:
    """The simulation takes issuing for nothing. Short kernels are issued for longer than they run: the order that it
    took for the shortest was 1.03 times as long as another one."""
    plans = own(3, "h200x8")
    for limits in [plan.peaks for plan in plans.values()]:
        found = planned(passes.pipeline(program(3), limits=limits, topology="h200x8"), "h200x8")
        assert found.seconds <= min([plan.seconds for plan in plans.values() if plan.keeps(limits)]) * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "machine"), [(2, None), (8, None), (21, "h200x8")])
def test_more_room_makes_no_longer_a_step(seed: int, machine: str | None) -> None:
    """The step of cut 21 was 1.147 times as long with 1.5 times the least as with 1.25 times."""
    least = least_of(program(seed), machine)
    taken = []
    for percent in (100, 110, 125, 150, 200):
        limits = {device: nbytes * percent // 100 for device, nbytes in least.items()}
        found = planned(passes.pipeline(program(seed), limits=limits, topology=machine), machine)
        assert found.keeps(limits)
        taken.append(found.seconds)
    assert taken == sorted(taken, reverse=True)
