"""What more evaluations, larger limits and more options do to the steps of `passes.balance`: none gets longer."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Final

from limits import limited
from more import BUDGETS, LIMITS, OPTIONS, problem, steps, worst

__all__ = ["rows"]

PROBLEMS: Final = 60
EVALUATIONS: Final = 125
LONGER: Final = 1.005
"""The longest step, in steps of a balance that may do less."""


def rows() -> Iterator[str]:
    """The table: budgets, limits and options, each of which has the one before."""
    yield "| what grows | problems | longest step, in steps with less | longer by more than 0.5 % | refused with more |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    found: dict[str, list[float]] = {}
    for seed in range(PROBLEMS):
        for what, seconds in steps(problem(seed), EVALUATIONS).items():
            found.setdefault(what, []).append(worst(seconds))
    says = {
        "budget": f"evaluations: {', '.join([f'{budget:,}' for budget in BUDGETS])}",
        "limits": f"limits times {', '.join(map(str, LIMITS))}",
        "options": f"options: {', '.join([f'+{more[-1]}' for more in OPTIONS]).removeprefix('+')}",
    }
    for what, ratios in found.items():
        kept = [ratio for ratio in ratios if isfinite(ratio)]
        longest = limited(f"{max(kept):.4f}", at_most=1.0 if what == "budget" else LONGER)
        longer = limited(str(sum(ratio > LONGER for ratio in kept)), at_most=0)
        refused = limited(str(len(ratios) - len(kept)), at_most=0)
        yield f"| {says[what]} | {len(ratios)} | {longest} | {longer} | {refused} |"
