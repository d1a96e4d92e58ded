"""How fast this machine runs operators: measured once a process, in some 20 ms.

Each figure is the fastest of several runs, since whatever else the machine does only makes a run slower. A rate that is
too high makes operators look shorter, and keeps the choice of an executor at one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Final

import torch

from graphir.analysis.cost import Rates

from .surroundings import neutral

__all__ = ["host_rates"]

_RUNS: Final = 7
_SIDE: Final = 256
"""Rows and columns of a matrix: small enough to take a millisecond, large enough for a kernel's full speed."""

_ELEMENTS: Final = 2**20
"""Of a vector: three of them do not fit the cache of one core."""

_CALLS: Final = 100


@cache
def host_rates(threads: int) -> Rates:
    """The rates of kernels that use so many threads."""
    with neutral(threads), torch.inference_mode():
        square, long, short = torch.ones(_SIDE, _SIDE), torch.ones(_ELEMENTS), torch.ones(1)
        result, sums = torch.empty_like(square), torch.empty_like(long)

        def calls() -> None:
            for _ in range(_CALLS):
                torch.add(short, short)

        return Rates(
            2 * _SIDE**3 / _fastest(lambda: torch.mm(square, square, out=result)),
            3 * long.nbytes / _fastest(lambda: torch.add(long, long, out=sums)),
            _fastest(calls) / _CALLS,
        )


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs, after one that warms up."""
    run()
    found = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
