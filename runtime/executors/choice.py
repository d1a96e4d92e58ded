"""Which executor is to run a plan on the host: one thread, or one for each logical device.

Threads share Python's interpreter: each operator is called with its lock held, and a thread that wants the lock while
another one has it sleeps and is woken. So several threads pay some time for each operator, whatever it computes, and
gain only what they compute at the same time; where segments run without the lock they pay less. A step is predicted for
each executor from what its operators cost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from graphir.analysis.cost import Rates, operator_seconds
from graphir.analysis.schedule import schedule
from graphir.errors import SessionError
from graphir.ir.device import Device
from graphir.ir.plan import Plan, lane_device

from ..machine.calibration import host_rates
from .segments import printable, unavailable

__all__ = ["HOST_ONLY", "Choice", "choose", "predict"]

_INTERPRETER_SECONDS: Final = 13e-6
"""How much longer an operator is taken to last where another thread calls operators too. ``python tests/bench lock``
measures 2 to 6 µs, and 20 µs where both threads want the lock at the same moments."""

_SEGMENT_SECONDS: Final = 4e-6
"""The same where segments run without the interpreter's lock: 2 to 5 µs."""

_WAKE_SECONDS: Final = 30e-6
"""What it takes to wake a thread that waits for an event."""

_GAIN: Final = 0.9
"""An executor is preferred to a plainer one only if it is predicted to take at most this part of its time."""


class Choice(NamedTuple):
    """The executor of a session.

    Attributes:
        executor: its name.
        reason: why this one, in words.
    """

    executor: str
    reason: str


HOST_ONLY: Final = ("serial", "threads", "segments")
"""The executors that run on the host only."""


def choose(plan: Plan, asked: str, places: Mapping[Device, torch.device], threads: int) -> Choice:
    """The executor for *plan*.

    Args:
        plan: what is to run.
        asked: an executor's name, or ``auto``.
        places: the real device of each logical one.
        threads: how many threads one kernel uses.

    Raises:
        SessionError: it is asked for segments, which this torch cannot execute.
    """
    devices = len({lane_device(lane) for lane in plan.lanes})
    if asked == "segments" and (why := unavailable()):
        raise SessionError(f"the executor 'segments' cannot be used: {why}", fix="use executor='threads'")
    if asked in HOST_ONLY and devices < 2:
        return Choice("serial", "the plan has one device")
    if asked != "auto":
        return Choice(asked, "it was asked for")
    kinds = {place.type for place in places.values()}
    if "cuda" in kinds:
        return Choice("cuda", "the plan is bound to CUDA")
    if kinds - {"cpu"}:
        return Choice("reference", "the plan is not bound to the host")
    if devices < 2:
        return Choice("serial", "the plan has one device")
    side_by_side = min(devices, _cores() // threads)
    if side_by_side < 2:
        return Choice("serial", f"too few cores for two kernels at a time: {_cores()}, with threads={threads}")
    predicted = predict(plan, host_rates(threads), side_by_side)
    if unavailable():
        del predicted["segments"]
    chosen = "serial"
    for executor, seconds in predicted.items():
        if seconds <= _GAIN * predicted[chosen]:
            chosen = executor
    figures = ", ".join([f"{executor} {seconds * 1e3:.2f} ms" for executor, seconds in predicted.items()])
    return Choice(chosen, f"predicted for a step: {figures}")


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def predict(plan: Plan, rates: Rates, side_by_side: int) -> dict[str, float]:
    """How many seconds a step takes by each executor, the plainest first.

    Args:
        plan: what is executed; a device's lanes are merged in issue order.
        rates: how fast kernels are.
        side_by_side: how many threads can compute at the same time.
    """
    seconds = operator_seconds(plan.step, plan.dims, rates)
    serial = sum(seconds[i.op] for i in plan.instructions if i.op >= 0)
    locked = [_INTERPRETER_SECONDS] * len(seconds)
    free = [_SEGMENT_SECONDS if printable(op) else _INTERPRETER_SECONDS for op in plan.step.ops]
    found = {"serial": serial}
    for executor, extra in (("threads", locked), ("segments", free)):
        costs = [a + b for a, b in zip(seconds, extra, strict=True)]
        ends = (interval.end for interval in schedule(plan, costs, lane_device, _WAKE_SECONDS).values())
        found[executor] = max((serial / side_by_side, *ends))
    return found
