"""How long a step of a plan would take, on the machine at hand or on another one."""

from __future__ import annotations

from typing import Final, Literal

import torch

from graphir.runtime.executors.choice import GONE, HOST_ONLY, execution_of
from graphir.runtime.machine.here import here
from graphir.runtime.machine.places import Binding

from ..analysis.estimate import Estimate, estimated
from ..analysis.execution import Execution
from ..analysis.memory import check_dims, check_profile, check_threads
from ..analysis.profile_files import profile_of
from ..analysis.profiles import Profile
from ..analysis.topology import Topology
from ..errors import GraphirError, nearest
from ..ir.plan import Plan, sizes_of
from ..ir.size import Dims
from ..ir.verify import Planned, require, subject_of

__all__ = ["EXECUTORS", "estimate"]

EXECUTORS: Final = ("auto", "serial", "threads", "cuda")
"""What may execute a plan, in an estimate."""


def estimate(
    plan: Plan | Planned,
    topology: Topology | str | None = None,
    *,
    executor: str = "auto",
    cuda_graph: bool = False,
    dims: Dims | None = None,
    threads: int | None = None,
    profile: Profile | Literal["cached"] | None = "cached",
) -> Estimate:
    """Predict the seconds of a step, of its lanes and of its links, and the critical path.

    Operators take what :func:`graphir.profile` measured of their calls, else what their arithmetic and their bytes say
    at the topology's rates. Copies take what their link says; those that are on one directed link at a time queue in
    issue order. Workers execute their lanes in issue order: on CUDA a stream for each lane, which one host thread
    issues to: what it calls is counted as the executor makes the calls, and nothing starts before it is issued. On the
    host a worker is a thread for each device, with all its lanes.

    Args:
        plan: what would be executed; or a session or a compiled step, which stand for their plan.
        topology: where: a topology, or the name of one. None: this machine, as :meth:`.Topology.here` has it; its host
            if *executor* is one of the host's.
        executor: ``serial`` or ``threads`` where the topology is a host; ``cuda`` elsewhere; by default what a session
            would choose.
        cuda_graph: whether the executor ``cuda`` replays its steps as CUDA graphs, as a session does that is made with
            ``cuda_graph=True``; else one host thread issues each kernel, copy and event.
        dims: the value of each dimension; those that the plan was emitted for by default.
        threads: how many threads one kernel uses; as many as torch now uses by default.
        profile: what :func:`graphir.profile` measured, on the machine of the topology. By default what this machine's
            file has, for topologies that were measured here. None: shapes alone.

    Raises:
        GraphirError: *plan* is no plan; *topology* is none, or lacks a device, a link, or the arithmetic of an element
            type; this machine lacks a card; an unknown executor, or one that the topology cannot have; *dims*,
            *threads* or *profile* are none.

    Warns:
        ProfileWarning: this machine's file cannot be used; it says so once.
    """
    plan = subject_of(plan)
    require(plan, (Plan,), "estimate")
    check_threads(threads)
    check_dims("dims", {} if dims is None else dims, plan)
    check_profile(profile)
    if executor not in EXECUTORS:
        fix = GONE.get(executor, ", ".join(EXECUTORS))
        raise GraphirError(f"no executor {executor!r}{nearest(executor, EXECUTORS)}", fix=fix)
    if isinstance(topology, str):
        topology = Topology.named(topology)
    if not isinstance(topology, Topology | None):
        raise GraphirError(
            f"topology is a {type(topology).__name__}, not a Topology",
            fix="give a name such as 'h200x8', Topology.load(path), one made by hand, or None",
        )
    count = threads or torch.get_num_threads()
    binding: Binding = "cpu" if executor in HOST_ONLY else "auto"
    place = topology or here(plan.step.devices, threads=count, binding=binding, free=False)
    figures = profile_of(place) if profile == "cached" else profile
    sizes = {**sizes_of(plan), **(dims or {})}
    execution = execution_of(plan, executor, place, count, figures)
    if cuda_graph:
        execution = _with_graph(plan, execution)
    return estimated(plan, place, execution, sizes, figures, count)


def _with_graph(plan: Plan, execution: Execution) -> Execution:
    cards = [str(device) for device in plan.devices if not device.is_host]
    if execution.issue is None or len(cards) != 1:
        where = ", ".join(cards) if execution.issue is not None else "the host"
        raise GraphirError(
            f"cuda_graph=True: a graph is of one GPU, the plan is on {where}",
            fix="leave it out, or place the plan on one device of a machine with GPUs",
        )
    return execution._replace(graph=True)
