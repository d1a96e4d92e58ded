"""How benchmarks measure: alternating runs in one process, medians, ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Ratio", "alternate", "seconds"]


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


def alternate(ours: Callable[[], object], theirs: Callable[[], object], *, pairs: int, inner: int = 1) -> Ratio:
    """Time two calls in turn, *inner* calls at a time, after a warm-up of each."""

    def repeat(run: Callable[[], object]) -> None:
        for _ in range(inner):
            run()

    for run in (ours, theirs, ours, theirs):
        repeat(run)
    gc.collect()
    gc.disable()
    try:
        measured = [(seconds(lambda: repeat(ours)), seconds(lambda: repeat(theirs))) for _ in range(pairs)]
    finally:
        gc.enable()
    low, middle, high = statistics.quantiles([a / b for a, b in measured], n=4)
    return Ratio(
        statistics.median(a for a, _ in measured) / inner,
        statistics.median(b for _, b in measured) / inner,
        middle,
        low,
        high,
    )
