"""When each instruction of a plan would be executed, from what its operators cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..collector import collector_paused
from ..errors import GraphirError
from ..ir.blob import dense_nbytes
from ..ir.net import Net
from ..ir.plan import Event, Instruction, Plan
from ..ir.size import Dims
from ..ir.text import operator_text
from .execution import Execution
from .liveness import liveness
from .simulation import Holdings, Sharing, Tasks, Times, shared, simulate
from .topology import Link, Topology

__all__ = ["Crossing", "Interval", "Schedule", "holdings", "schedule"]


class Interval(NamedTuple):
    """Seconds since a step's first instruction began."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


class Crossing(NamedTuple):
    """What an instruction brings from one device to another.

    Attributes:
        link: the number of the directed link, in :attr:`Schedule.links`.
        nbytes: what is brought.
        seconds: what that takes when it has the link to itself.
    """

    link: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """When each instruction of a plan is executed, by its position.

    Attributes:
        plan: what is executed.
        tasks: its instructions: those of operators take time, records and frees none, waits until their event.
        times: when.
        crossings: what copies and parts of collectives bring over links; of others nothing.
        links: the directed links, as pairs of devices.
    """

    plan: Plan
    tasks: Tasks
    times: Times
    crossings: Mapping[int, tuple[Crossing, ...]]
    links: tuple[tuple[str, str], ...]

    def intervals(self) -> dict[int, Interval]:
        """The interval of each instruction; that of a wait begins when its worker comes to it."""
        free, starts, ends, _ = self.times
        return {
            position: Interval(free[position] if instruction.kind == "wait" else starts[position], ends[position])
            for position, instruction in enumerate(self.plan.instructions)
        }


def schedule(
    plan: Plan, dims: Dims, seconds: Sequence[float], execution: Execution, topology: Topology | None = None
) -> Schedule:
    """A list schedule: each worker executes its lanes' instructions in issue order, each as early as it can.

    Args:
        plan: what is executed.
        dims: the value of each dimension.
        seconds: what an instruction of each operator takes, by the operator's position in the step; of what crosses a
            link of the *topology*, the link says it.
        execution: who executes a lane.
        topology: the links, and what threads of a host take from each other; None: copies take their *seconds*, and
            nothing queues or is shared.

    Raises:
        GraphirError: the topology lacks a link that a copy needs.
    """
    routes = _Routes(plan.step, dims, topology)
    with collector_paused():
        return _scheduled(plan, seconds, execution, topology, routes)


def _scheduled(
    plan: Plan, seconds: Sequence[float], execution: Execution, topology: Topology | None, routes: _Routes
) -> Schedule:
    tasks = _tasks(plan, seconds, execution, routes)
    times = simulate(tasks, execution.wake, execution.patience, execution.issue)
    host = None if topology is None else topology.host
    if host is not None and max(tasks.workers, default=0):
        lock = [0.0] * len(tasks.workers)
        if execution.lock is not None:
            of_op = [execution.lock(op) for op in plan.step.ops]
            lock = [of_op[instruction.op] if instruction.op >= 0 else 0.0 for instruction in plan.instructions]
        tasks = tasks._replace(seconds=shared(tasks, times, Sharing(host.cores, host.slowdown, lock)))
        times = simulate(tasks, execution.wake, execution.patience, execution.issue)
    return Schedule(plan, tasks, times, routes.crossings, tuple(routes.numbers))


def _tasks(plan: Plan, seconds: Sequence[float], execution: Execution, routes: _Routes) -> Tasks:
    """The instructions of a plan as tasks."""
    numbers: dict[str, int] = {}
    of_lane = {lane: numbers.setdefault(execution.worker(lane), len(numbers)) for lane in plan.lanes}
    recorded: dict[Event, int] = {}
    count = len(plan.instructions)
    workers = [of_lane[instruction.lane] for instruction in plan.instructions]
    taken = [0.0] * count
    after: list[tuple[int, ...]] = [()] * count
    links: list[tuple[int, ...]] = [()] * count
    for position, (kind, _, op, _, event, _) in enumerate(plan.instructions):
        if kind == "run":
            taken[position] = seconds[op]
        elif kind == "record" and event is not None:
            recorded[event] = position
        elif kind == "wait" and event in recorded:
            after[position] = (recorded[event],)
        elif op >= 0:
            found = routes.of(position, plan.instructions[position])
            links[position] = tuple([crossing.link for crossing in found])
            taken[position] = routes.seconds(kind, seconds[op], found) if found else seconds[op]
    return Tasks(workers, taken, after, links)


class _Routes:
    """What instructions bring over links."""

    def __init__(self, net: Net, dims: Dims, topology: Topology | None) -> None:
        self.net, self.dims, self.topology = net, dims, topology
        self.numbers: dict[tuple[str, str], int] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.crossings: dict[int, tuple[Crossing, ...]] = {}

    def of(self, position: int, instruction: Instruction) -> tuple[Crossing, ...]:
        """What a copy brings, or a part of a collective from each other participant's device."""
        op, blobs = self.net.ops[instruction.op], self.net.blobs
        target = blobs[op.outputs[instruction.part]].device
        sources = [blobs[name] for name in op.inputs if blobs[name].device != target]
        if self.topology is None or not sources:
            return ()
        found = []
        for blob in sources:
            pair = blob.device, target
            link = self.links.get(pair)
            if link is None:
                try:
                    link = self.links[pair] = self.topology.link(*pair)
                except GraphirError as e:
                    raise GraphirError(e.what, at=operator_text(op, self.net), fix=e.fix) from None
                self.numbers[pair] = len(self.numbers)
            nbytes = dense_nbytes(blob, self.dims)
            found.append(Crossing(self.numbers[pair], nbytes, link.seconds(nbytes)))
        self.crossings[position] = tuple(found)
        return self.crossings[position]

    def seconds(self, kind: str, spent: float, crossings: Sequence[Crossing]) -> float:
        """What an instruction takes that brings these: a copy that alone. A part of a collective brings one operand
        after the other and adds them; threads of a host read them where they are."""
        brought = sum([crossing.seconds for crossing in crossings])
        if kind == "copy":
            return brought
        on_host = self.topology is not None and self.topology.host is not None
        return max(spent, brought) if on_host else spent + brought


def holdings(plan: Plan, dims: Dims) -> Holdings:
    """What a plan's storages hold, for :func:`.simulation.held`: devices by their position in ``plan.step.devices``.

    State, inputs and outputs stay; scratch and receive buffers are not in it.
    """
    numbers = {device: number for number, device in enumerate(plan.step.devices)}
    blobs, count = plan.step.blobs, len(plan.instructions)
    given = {blobs[name].storage for name in plan.step.external_inputs}
    devices, nbytes, first, last = [], [], [], []
    for storage, (start, end) in liveness(plan).items():
        blob = blobs[storage]
        devices.append(numbers[blob.device])
        nbytes.append(blob.nbytes(dims))
        first.append(-1 if storage in given else start)
        last.append(-1 if end >= count or storage in given else end)
    return Holdings(devices, nbytes, first, last)
