"""More evaluations, larger limits or more options never give a longer step."""

from __future__ import annotations

from math import inf

import pytest
from more import LIMITS, OPTIONS, problem, worst

from graphir import passes


@pytest.mark.parametrize("seed", [1])
def test_more_evaluations_never_give_a_longer_step(seed: int) -> None:
    asked = problem(seed)
    seconds = [asked.step(evaluations) for evaluations in (1, 31, 100, 125, 200)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < inf
