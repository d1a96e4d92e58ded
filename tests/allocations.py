"""The bytes that a step allocates on the host: as PyTorch's profiler sees them, and as predicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
from torch.profiler import ProfilerActivity, profile

import graphir
from graphir.ir.plan import Plan

__all__ = ["measured_peak", "predicted_peak"]


def measured_peak(run: Callable[[], object]) -> int:
    """The most bytes that this thread holds at once of what it allocates in *run*, by the profiler's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    kineto = profiler.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = [(e.start_ns(), e.nbytes()) for e in kineto.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(nbytes for _, nbytes in sorted(events, key=lambda event: event[0])), default=0)


def predicted_peak(plan: Plan, *, scratch: bool = True, profile: graphir.Profile | None = None) -> int:
    """The same of a session's step: what its devices hold together, beside state, and inputs, which are the caller's.

    One thread has to execute all lanes, so that what they hold at once is what the plan's order says; and each copy has
    to take memory of its own, as in the reference executor.
    """
    found = graphir.memory(plan.with_(buffers={}), profile=profile)
    held = np.zeros(found.positions, np.int64)
    for device in found.peak:
        held += found.timeline(device) - found.timeline(device, "inputs") - found.state[device]
        if not scratch:
            held -= found.timeline(device, "scratch")
    return int(held.max())
