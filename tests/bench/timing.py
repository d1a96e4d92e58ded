"""How benchmarks measure: alternating runs in one process, medians, ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

__all__ = ["Ratio", "alternate", "in_turn", "quartile", "ratio", "seconds", "warmed"]


class Ratio(NamedTuple):
    """Median seconds of ours and of theirs, and the median of the ratios pair by pair with its quartiles."""

    ours: float
    theirs: float
    ratio: float
    low: float
    high: float


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def warmed(step: Callable[[], object], warm: int) -> Callable[[int], float]:
    """What makes so many steps, after *warm* that are not timed, and returns their seconds."""

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    def timed(steps: int) -> float:
        run(warm)
        return seconds(lambda: run(steps))

    return timed


def alternate(ours: Callable[[], object], theirs: Callable[[], object], *, pairs: int, inner: int = 1) -> Ratio:
    """Time two calls in turn, *inner* calls at a time, after a warm-up of each."""

    def repeat(run: Callable[[], object]) -> None:
        for _ in range(inner):
            run()

    taken = in_turn(
        {"ours": lambda: seconds(lambda: repeat(ours)), "theirs": lambda: seconds(lambda: repeat(theirs))}, pairs
    )
    measured = list(zip(taken["ours"], taken["theirs"], strict=True))
    low, middle, high = statistics.quantiles([a / b for a, b in measured], n=4)
    return Ratio(
        statistics.median(a for a, _ in measured) / inner,
        statistics.median(b for _, b in measured) / inner,
        middle,
        low,
        high,
    )


def in_turn(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each of several runs says that it took, one after the other, round by round, after a warm-up of each."""
    for run in (*runs.values(), *runs.values()):
        run()
    gc.collect()
    gc.disable()
    try:
        measured = [[run() for run in runs.values()] for _ in range(rounds)]
    finally:
        gc.enable()
    return dict(zip(runs, map(list, zip(*measured, strict=True)), strict=True))


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def quartile(taken: Sequence[float]) -> float:
    """The lower quartile: what else a machine does only ever adds to a time, and in a quarter of them to few."""
    return statistics.quantiles(taken, n=4)[0]
