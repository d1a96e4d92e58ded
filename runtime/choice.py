"""Which executor is to run a plan on the host: one thread, or one for each logical device.

Threads share Python's interpreter: each operator is called with its lock held, and a thread that wants the lock while
another one has it sleeps and is woken. So several threads pay some time for each operator, whatever it computes, and
gain only what they compute at the same time. Both are predicted from what each operator costs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from graphir.analysis.cost import Rates, work
from graphir.plan import Event, Plan, lane_device

from .calibration import measured

__all__ = ["HOST_ONLY", "Choice", "Prediction", "choose", "predict"]

_INTERPRETER_SECONDS: Final = 13e-6
"""What an operator takes longer where another thread calls operators too. Measured on plans of two devices with
operators of 9, 13 and 52 µs, whose speed-ups were 0.72, 1.01 and 1.61: 12 to 16 µs in each."""

_SEGMENT_SECONDS: Final = 4e-6
"""The same where segments run without the interpreter's lock; speed-ups of 1.23, 1.48 and 1.85: 3 to 6 µs."""

_WAKE_SECONDS: Final = 30e-6
"""What it takes to wake a thread that waits for an event."""

_GAIN: Final = 0.9
"""Threads have to be predicted to take at most this part of one thread's time."""


class Prediction(NamedTuple):
    """Seconds of a step.

    Attributes:
        one: in one thread.
        several: with a thread for each device.
    """

    one: float
    several: float


class Choice(NamedTuple):
    """The executor of a session.

    Attributes:
        executor: its name.
        reason: why this one, in words.
    """

    executor: str
    reason: str


HOST_ONLY: Final = ("serial", "threads")
"""The executors that run on the host only."""


def choose(plan: Plan, asked: str, on_host: bool, threads: int) -> Choice:
    """The executor for *plan*.

    Args:
        plan: what is to run.
        asked: an executor's name, or ``auto``.
        on_host: every device of the plan is bound to the host.
        threads: how many threads one kernel uses.
    """
    devices = len({lane_device(lane) for lane in plan.lanes})
    if asked in HOST_ONLY and devices < 2:
        return Choice("serial", "the plan has one device")
    if asked != "auto":
        return Choice(asked, "it was asked for")
    if not on_host:
        return Choice("reference", "the plan is not bound to the host")
    if devices < 2:
        return Choice("serial", "the plan has one device")
    side_by_side = min(devices, cores() // threads)
    if side_by_side < 2:
        return Choice("serial", f"kernels use {threads} threads, and the process has {cores()} cores")
    predicted = predict(plan, measured(threads), side_by_side, _INTERPRETER_SECONDS)
    return Choice(
        "threads" if predicted.several <= _GAIN * predicted.one else "serial",
        f"predicted: {predicted.one * 1e3:.2f} ms a step in one thread, {predicted.several * 1e3:.2f} ms in {devices}",
    )


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def predict(plan: Plan, rates: Rates, side_by_side: int, contention: float) -> Prediction:
    """How long a step takes, in one thread and in several.

    Args:
        plan: what is executed; a device's lanes are merged in issue order.
        rates: how fast kernels are.
        side_by_side: how many threads can compute at the same time.
        contention: seconds that each operator takes longer with several threads.
    """
    clocks = {lane_device(lane): 0.0 for lane in plan.lanes}
    recorded: dict[Event, float] = {}
    total, seconds = 0.0, _seconds(plan, rates)
    for instruction in plan.instructions:
        here = lane_device(instruction.lane)
        if instruction.op >= 0:
            total += seconds[instruction.op]
            clocks[here] += seconds[instruction.op] + contention
        elif instruction.event is not None and instruction.kind == "record":
            recorded[instruction.event] = clocks[here]
        elif instruction.event is not None and recorded[instruction.event] > clocks[here]:
            clocks[here] = recorded[instruction.event] + _WAKE_SECONDS
    return Prediction(total, max(*clocks.values(), total / side_by_side))


def _seconds(plan: Plan, rates: Rates) -> Mapping[int, float]:
    """What one instruction of each operator takes. Every participant of a collective reads what all of them have."""
    net = plan.step
    found = {}
    for position, op in enumerate(net.ops):
        done = work(op, net, plan.dims)
        if op.type == "AllReduce":
            read = done.nbytes // 2
            done = done._replace(nbytes=read + read // len(op.inputs))
        found[position] = rates.seconds(done)
    return found
