"""How long calls take: in turn, alone, and beside the same calls of another thread.

Calls are timed in turn, as in a step: each finds the caches as the calls of all others have left them, and of its
operands those in them that a step has just touched. Called again and again, an operator finds all operands there and
takes less than in a step; with none of them there it takes more. A call that follows one like it, with some others in
between, finds its code there: a short one takes half as long as the first.

A call in one thread is timed by the processor seconds of that thread, which leave out what other processes take, and
waits for the interpreter's lock. A call whose results need new pages from the operating system takes longer by each of
them, and steps that keep their heap need none: what counts are the runs with the fewest page faults.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

import torch

from ..machine.surroundings import neutral

try:
    import resource
except ImportError:  # not a Unix
    resource = None  # type: ignore[assignment]

__all__ = ["Timed", "Timing", "times"]

_RUNS: Final = 5
_ENOUGH: Final = 0.1
"""Seconds after which a call is not repeated."""


Name = TypeVar("Name", bound=Hashable)


class Timed(NamedTuple):
    """A call to be timed.

    Attributes:
        call: makes it.
        touch: brings what a step has just touched into the cache.
        operators: how many operators' work it does.
    """

    call: Callable[[], Any]
    touch: Callable[[], object]
    operators: int = 1


class Timing(NamedTuple):
    """Seconds of one operator's work: *alone*, and *beside* the same work in another thread; None where that was not
    measured."""

    alone: float
    beside: float | None = None


class _Run(NamedTuple):
    faults: int
    seconds: float


def times(
    calls: Mapping[Name, Timed], others: Mapping[Name, Timed], threads: int, failed: Callable[[Name, Exception], None]
) -> dict[Name, Timing]:
    """The median seconds of calls, in turn, after a first one of each, which pays for what is made on demand.

    Args:
        calls: by any name.
        others: what another thread calls at the same time, by the same names; those that are missing are measured
            alone. Empty where there are too few cores.
        threads: of a kernel.
        failed: is told of a call that fails, which is left out.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    alone: dict[Name, list[_Run]] = {name: [] for name in calls}

    def attempt(name: Name) -> None:
        try:
            alone[name].append(_run(calls[name], clock))
        except Exception as e:
            failed(name, e)
            del alone[name]

    for _ in range(1 + _RUNS):
        for name in list(alone):
            if sum(run.seconds for run in alone[name]) < _ENOUGH:
                attempt(name)
    nothing = Timed(_nothing, _nothing)
    reading = _usual([_run(nothing, clock) for _ in range(1 + _RUNS)])

    def each(name: Name, runs: Sequence[_Run]) -> float:
        return max(_usual(runs) - reading, 0.0) / calls[name].operators

    found = {name: Timing(each(name, runs)) for name, runs in alone.items()}
    both = {name: (calls[name], other) for name, other in others.items() if name in found}
    for name, runs in _side_by_side(both, threads, clock).items():
        found[name] = found[name]._replace(beside=each(name, runs))
    return found


def _nothing() -> None:
    """What reading the clock takes is left out: some tenths of a microsecond, since it asks the system."""


def _side_by_side(
    pairs: Mapping[Name, tuple[Timed, Timed]], threads: int, clock: Callable[[], float]
) -> dict[Name, list[_Run]]:
    """The runs of the first of each pair, while another thread makes those of the second, in the same order."""
    begun = threading.Barrier(2)

    def serve() -> None:
        with neutral(threads), torch.inference_mode(), suppress(threading.BrokenBarrierError):
            for _ in range(1 + _RUNS):
                begun.wait()
                for _, other in pairs.values():
                    with suppress(Exception):  # it has succeeded on other operands
                        _run(other, clock)

    taken: dict[Name, list[_Run]] = {name: [] for name in pairs}
    if not pairs:
        return taken
    thread = threading.Thread(target=serve, name="graphir-profile", daemon=True)
    thread.start()
    try:
        for _ in range(1 + _RUNS):
            begun.wait()
            for name, (one, _) in pairs.items():
                taken[name].append(_run(one, clock))
    except BaseException:
        begun.abort()
        raise
    finally:
        thread.join()
    return taken


def _run(timed: Timed, clock: Callable[[], float]) -> _Run:
    timed.touch()
    faults = _faults()
    start = clock()
    timed.call()
    seconds = clock() - start
    return _Run(_faults() - faults, seconds)


def _usual(runs: Sequence[_Run]) -> float:
    """The median seconds of the runs with the fewest page faults; the first one counts where there is no other."""
    later = runs[1:] or runs
    fewest = min(run.faults for run in later)
    return statistics.median([run.seconds for run in later if run.faults == fewest])


def _faults() -> int:
    """The page faults of the calling thread."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
