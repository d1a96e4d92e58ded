"""More evaluations, larger limits or more options give no longer step."""

from __future__ import annotations

import gc
from math import inf
from random import Random

import by_hand
import pytest
from more import OPTIONS, Asked, problem, worst

import graphir

H200 = graphir.Topology.named("h200x8")


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Three unlike blocks on two devices."""
    program = by_hand.unlike("mlp", Random(3), 3)
    limit = int(0.8 * by_hand.held(program)["gpu:0"])
    return Asked(program, {"gpu:0": limit, "gpu:1": limit}, H200)


def test_more_evaluations_never_give_a_longer_step(asked: Asked) -> None:
    seconds = [asked.step(evaluations) for evaluations in (1, 31, 100, 125)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < inf


def test_larger_limits_and_more_options_give_no_longer_step(asked: Asked) -> None:
    assert worst([asked.step(125, times) for times in (1.0, 1.25)]) <= 1.005
    assert worst([asked.step(125, options=options) for options in OPTIONS]) <= 1.0


def test_an_option_more_is_never_longer_where_a_search_misses_what_one_with_fewer_finds() -> None:
    """With recompute, too, five looks find nothing within these limits; without, they do."""
    asked = problem(13)
    fewer, more = [asked.step(5, options=options) for options in OPTIONS[1:3]]
    assert more <= fewer < inf


def test_a_balance_leaves_nothing_that_only_the_collector_frees() -> None:
    """Neither a choice nor a refusal, of micro-batches that flow over streams."""
    program = by_hand.unlike("mlp", Random(3), 3, 2)
    held = by_hand.held(program)["gpu:0"]
    left = []
    for share in (0.8, 0.8, 0.3):  # the first one fills caches
        gc.collect()
        asked = Asked(program, {f"gpu:{device}": int(share * held) for device in range(2)}, H200)
        assert (asked.step(1, options=("shift", "recompute")) < inf) == (share > 0.5)
        left.append(gc.collect())
    assert max(left[1:]) < 1_000
