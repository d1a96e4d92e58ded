"""More evaluations, larger limits or more options give no longer step."""

from __future__ import annotations

from math import inf

from more import OPTIONS, problem, worst


def test_more_evaluations_never_give_a_longer_step() -> None:
    asked = problem(2)
    seconds = [asked.step(evaluations) for evaluations in (1, 31, 100, 125, 200)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < inf


def test_larger_limits_and_more_options_give_no_longer_step() -> None:
    asked = problem(2)
    assert worst([asked.step(125, times) for times in (1.0, 1.25)]) <= 1.005
    assert worst([asked.step(125, options=options) for options in OPTIONS]) <= 1.005
