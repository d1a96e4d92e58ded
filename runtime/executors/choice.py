"""Which executor is to run a plan on the host: one thread, or one for each logical device.

Threads share Python's interpreter: each operator is called with its lock held, and a thread that wants the lock while
another one has it sleeps and is woken. So several threads pay some time for each operator, whatever it computes, and
gain only what they compute at the same time. A step is predicted for each executor from what its operators cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from graphir.analysis.cost import operator_costs
from graphir.analysis.execution import ONE_THREAD, THREADS, Execution, streams_of
from graphir.analysis.profile_files import cached
from graphir.analysis.profiles import Profile
from graphir.analysis.schedule import schedule
from graphir.analysis.topology import Topology
from graphir.errors import GraphirError
from graphir.ir.device import Device
from graphir.ir.plan import Plan, lane_device

from ..machine.calibration import cores, host_topology

__all__ = ["GONE", "HOST_ONLY", "Choice", "choose", "execution_of", "predict"]

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


HOST_ONLY: Final = ("serial", "threads")
"""The executors that run on the host only."""

GONE: Final[Mapping[str, str]] = {"segments": "use 'threads', which gives the same bits: 'segments' is gone"}
"""What to say of an executor that is gone."""


def choose(plan: Plan, asked: str, places: Mapping[Device, torch.device], threads: int) -> Choice:
    """The executor for *plan*.

    Args:
        plan: what is to run.
        asked: an executor's name, or ``auto``.
        places: the real device of each logical one.
        threads: how many threads one kernel uses.
    """
    devices = len({lane_device(lane) for lane in plan.lanes})
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
    if min(devices, cores() // threads) < 2:
        return Choice("serial", f"too few cores for two kernels at a time: {cores()}, with threads={threads}")
    predicted = predict(plan, host_topology(plan.step.devices, threads), cached(), threads)
    figures = ", ".join([f"{executor} {seconds * 1e3:.2f} ms" for executor, seconds in predicted.items()])
    return Choice(_fastest(predicted), f"predicted for a step: {figures}")


def _fastest(predicted: Mapping[str, float]) -> str:
    """The plainest executor that nothing less plain gains enough over."""
    chosen = "serial"
    for executor, seconds in predicted.items():
        if seconds <= _GAIN * predicted[chosen]:
            chosen = executor
    return chosen


_EXECUTIONS: Final[Mapping[str, Execution]] = {"serial": ONE_THREAD, "threads": THREADS}
"""How the executors of the host execute lanes, the plainest first."""


def predict(plan: Plan, topology: Topology, profile: Profile | None, threads: int) -> dict[str, float]:
    """How many seconds a step takes by each executor of the host, the plainest first.

    Args:
        plan: what is executed, at its own sizes.
        topology: a host.
        profile: what was measured of calls there.
        threads: how many threads one kernel uses.
    """
    costs = operator_costs(plan.step, plan.dims, lambda device: topology.speed(device).rates(), profile, threads)
    return {
        name: schedule(plan, plan.dims, costs, execution, topology).times.seconds
        for name, execution in _EXECUTIONS.items()
    }


def execution_of(plan: Plan, executor: str, topology: Topology, threads: int, profile: Profile | None) -> Execution:
    """How an executor executes the lanes of a plan on a machine.

    Args:
        plan: what is executed.
        executor: its name; ``auto``: the one that a session would choose there.
        topology: the machine.
        threads: how many threads one kernel uses.
        profile: what was measured of calls there.

    Raises:
        GraphirError: the machine cannot have it.
    """
    on_host = topology.host is not None
    if executor != "auto" and on_host is (executor == "cuda"):
        kind = "a host" if on_host else "no host"
        raise GraphirError(
            f"the executor {executor!r} does not run on topology {topology.name!r}, which is {kind}",
            fix="leave executor out, or give another topology",
        )
    if not on_host:
        return streams_of(topology)
    if len({lane_device(lane) for lane in plan.lanes}) < 2:
        return ONE_THREAD
    return _EXECUTIONS[_fastest(predict(plan, topology, profile, threads)) if executor == "auto" else executor]
