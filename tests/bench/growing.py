"""Steps of `passes.balance` with more evaluations, larger limits and more options, and the seconds of a refusal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import isfinite
from statistics import median
from typing import Final

from limits import limited
from more import BUDGETS, LIMITS, OPTIONS, Asked, problem, steps, worst

from graphir import passes
from graphir.errors import PassError

__all__ = ["rows"]

PROBLEMS: Final = 60
EVALUATIONS: Final = 125
LONGER: Final = 1.005
"""The longest step, in steps of a balance that may do less."""

REFUSALS: Final = 30
SHARES: Final = (1.0, 0.75, 0.5, 0.35)
SLOWER: Final = 1.5
SEARCH: Final = 2.0
"""How many problems are asked within so many times their limits, and the seconds of a refusal, at most, in those of the
slowest choice for the same problem, or of a search where that choice has needed none."""


def rows() -> Iterator[str]:
    """The two tables."""
    yield from _grown()
    yield ""
    yield from _refusals()


def _grown() -> Iterator[str]:
    """Budgets, limits and options, each of which has the one before."""
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
        longest, longer = f"{max(kept):.4f}", str(sum(ratio > LONGER for ratio in kept))
        if what != "limits":  # nothing is promised of these
            longest = limited(longest, at_most=1.0 if what == "budget" else LONGER)
            longer = limited(longer, at_most=0)
        refused = limited(str(len(ratios) - len(kept)), at_most=0)
        yield f"| {says[what]} | {len(ratios)} | {longest} | {longer} | {refused} |"


def _refusals() -> Iterator[str]:
    """By defaults: seconds of refusals in seconds of choices."""
    yield "| problems | choices | refusals | a refusal, in choices, median | at most |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    chosen, refused, ratios = 0, 0, []
    for seed in range(REFUSALS):
        asked = problem(seed)
        found = [_clock(asked, share) for share in SHARES]
        choices = [seconds for seconds, fits in found if fits]
        refusals = [seconds for seconds, fits in found if not fits]
        chosen, refused = chosen + len(choices), refused + len(refusals)
        ratios += [seconds / max(*choices, SEARCH) for seconds in refusals] if choices else []
    longest = limited(f"{max(ratios):.2f}", at_most=SLOWER)
    yield f"| {REFUSALS} | {chosen} | {refused} | {median(ratios):.2f} | {longest} |"


def _clock(asked: Asked, share: float) -> tuple[float, bool]:
    """The seconds of a balance within a share of the limits, and whether there is a placement."""
    limits = {device: int(share * nbytes) for device, nbytes in asked.limits.items()}
    begun = time.perf_counter()
    try:
        passes.balance(asked.program, limits, topology=asked.topology)
    except PassError:
        return time.perf_counter() - begun, False
    return time.perf_counter() - begun, True
