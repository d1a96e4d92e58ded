"""What calls allocate, by the memory events of PyTorch's profiler.

Every allocation of ATen, of oneDNN and of graphir's kernels on the host goes through one allocator, which reports to
the profiler of the thread that asks. Not seen is what a library keeps for itself, as BLAS does its packed panels, and
what a kernel's worker threads ask for by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from graphir.errors import GraphirError

__all__ = ["Allocated", "Recording", "recorded"]

_MARK: Final = "graphir: call "


class Allocated(NamedTuple):
    """Bytes that a call has asked for.

    Attributes:
        peak: the most at once.
        left: what is there when it has returned, while its results are held.
    """

    peak: int
    left: int


Recording: TypeAlias = "list[Allocated]"
"""What each call took, in their order; filled when the recording ends."""


@contextmanager
def recorded() -> Iterator[tuple[Callable[[Callable[[], object]], int], Recording]]:
    """A function that makes a call and watches it, and where the figures of its calls are found afterwards.

    What a call returns is held until it has returned, and let go of then. The function says which figures are the
    call's.

    Raises:
        GraphirError: a profiler runs already; there is one in a process.
    """
    if _running():
        raise GraphirError(
            "a profiler of PyTorch's is running, and there is one in a process", fix="profile before it, or after it"
        )
    found: Recording = []
    count = 0

    def watch(call: Callable[[], object]) -> int:
        nonlocal count
        number, count = count, count + 1
        with record_function(f"{_MARK}{number}"):
            returned = call()
        del returned
        return number

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield watch, found
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    found += _figures(sorted(kineto.kineto_results.events(), key=lambda event: event.start_ns()), count)


def _running() -> bool:
    enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
    return enabled()


def _figures(events: Sequence[Any], count: int) -> Iterator[Allocated]:
    begun = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name().startswith(_MARK)}
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    at = 0
    for number in range(count):
        start, end = begun[f"{_MARK}{number}"]
        while at < len(memory) and memory[at][0] < start:
            at += 1
        held = peak = 0
        while at < len(memory) and memory[at][0] <= end:
            held += memory[at][1]
            peak = max(peak, held)
            at += 1
        yield Allocated(peak, held)
