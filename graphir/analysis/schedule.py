"""When each instruction of a plan would be executed, from what its operators cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from ..collector import collector_paused
from ..errors import GraphirError
from ..ir.blob import dense_nbytes
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.plan import Event, Instruction, Plan
from ..ir.size import Dims
from ..ir.text import operator_text
from .cost import Cost
from .execution import Execution
from .issuing import Calls, Issuing, issuing
from .simulation import Sharing, Tasks, Times, shared, simulate
from .topology import Host, Link, Topology

__all__ = ["Crossing", "Interval", "Issued", "Schedule", "crossed", "schedule"]


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
        seconds: what that takes when it has the link to itself; of a part of a collective on a host, whose threads read
            operands where they are, without the latency of a copy.
    """

    link: int
    nbytes: int
    seconds: float


class Issued(NamedTuple):
    """What one host thread does to issue a step.

    Attributes:
        seconds: by instruction; what is called before the first one and after the last one that takes time is with
            these.
        calls: in all.
    """

    seconds: Sequence[float]
    calls: Calls


@dataclass(frozen=True)
class Schedule:
    """When each instruction of a plan is executed, by its position.

    Attributes:
        plan: what is executed.
        tasks: its instructions: those of operators take time, records and frees none, waits until their event.
        times: when.
        crossings: what copies and parts of collectives bring over links; of others nothing.
        by_link: those whose seconds are a link's, and not the operator's.
        links: the directed links, as pairs of devices.
        issued: what one host thread does to issue them; None where workers are threads.
    """

    plan: Plan
    tasks: Tasks
    times: Times
    crossings: Mapping[int, tuple[Crossing, ...]]
    by_link: Set[int]
    links: tuple[tuple[str, str], ...]
    issued: Issued | None = None

    def intervals(self) -> dict[int, Interval]:
        """The interval of each instruction; that of a wait begins when its worker comes to it."""
        free, starts, ends, _ = self.times
        return {
            position: Interval(free[position] if instruction.kind == "wait" else starts[position], ends[position])
            for position, instruction in enumerate(self.plan.instructions)
        }


def schedule(
    plan: Plan,
    dims: Dims,
    costs: Sequence[Cost],
    execution: Execution,
    topology: Topology | None = None,
) -> Schedule:
    """A list schedule: each worker executes its lanes' instructions in issue order, each as early as it can.

    Args:
        plan: what is executed.
        dims: the value of each dimension.
        costs: of an instruction of each operator, by the operator's position in the step; of what crosses a link of the
            *topology*, the link says the seconds.
        execution: who executes a lane.
        topology: the links, and what threads of a host take from each other; None: copies take the seconds of their
            *costs*, and nothing queues or is shared.

    Raises:
        GraphirError: the topology lacks a link that a copy needs.
    """
    routes = _Routes(plan.step, dims, topology)
    with collector_paused():
        tasks = _tasks(plan, [cost.seconds for cost in costs], execution, routes)
        issued = None if execution.issue is None else _issued(plan, dims, costs, execution, tasks.seconds)
        issue = () if issued is None else issued.seconds
        times = simulate(tasks, execution.wake, execution.patience, issue)
        if topology is not None and topology.host is not None and max(tasks.workers, default=0):
            sharing = _sharing(plan, execution, topology.host, costs)
            tasks = tasks._replace(seconds=shared(tasks, times, sharing))
            times = simulate(tasks, execution.wake, execution.patience, issue)
    return Schedule(plan, tasks, times, routes.crossings, routes.by_link, tuple(routes.numbers), issued)


def _issued(plan: Plan, dims: Dims, costs: Sequence[Cost], execution: Execution, seconds: Sequence[float]) -> Issued:
    """What one host thread does to issue a plan, whose instructions take *seconds*."""
    each = execution.issue
    assert each is not None
    begin, calls, end = issuing(plan, dims, graph=execution.graph)
    known: dict[Calls, float] = {}
    taken: list[float] = []
    counted: list[Calls] = []
    executing = 0.0  # by this thread itself, which issues nothing meanwhile
    for instruction, made, spent in zip(plan.instructions, calls, seconds, strict=True):
        cost = costs[instruction.op] if instruction.kind == "run" and made.kernels else None
        if cost is not None and cost.issue is not None:
            taken.append(executing + cost.issue + each.of(made._replace(kernels=0)))
            counted.append(made if cost.launches is None else made._replace(kernels=cost.launches))
        else:
            if made not in known:
                known[made] = each.of(made)
            taken.append(executing + known[made])
            counted.append(made)
        executing = spent if instruction.lane.startswith("cpu") else 0.0
    if taken:
        taken[0] += each.of(begin)
        # The step ends when its last calls are made: they count with the last instruction that takes time.
        last = max([position for position, spent in enumerate(seconds) if spent], default=0)
        taken[last] += sum(taken[last + 1 :]) + each.of(end)
        taken[last + 1 :] = [0.0] * (len(taken) - last - 1)
    return Issued(taken, Issuing(begin, counted, end).total)


def _sharing(plan: Plan, execution: Execution, host: Host, costs: Sequence[Cost]) -> Sharing:
    """What the instructions of a plan take from each other."""
    slowdown = [host.slowdown if cost.slowdown is None else cost.slowdown for cost in costs]
    of_ops = [instruction.op for instruction in plan.instructions]
    return Sharing(
        host.cores,
        [slowdown[op] if op >= 0 else 1.0 for op in of_ops],
        [execution.lock if op >= 0 else 0.0 for op in of_ops],
    )


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
            taken[position] = routes.seconds(position, kind, seconds[op]) if found else seconds[op]
    return Tasks(workers, taken, after, links)


def crossed(topology: Topology, source: str, destination: str, op: Operator, net: Net) -> Link:
    """The link that an operator needs.

    Raises:
        GraphirError: the topology does not have it; says which operator needs it.
    """
    try:
        return topology.link(source, destination)
    except GraphirError as e:
        raise GraphirError(e.what, at=operator_text(op, net), fix=e.fix) from None


class _Routes:
    """What instructions bring over links."""

    def __init__(self, net: Net, dims: Dims, topology: Topology | None) -> None:
        self.net, self.dims, self.topology = net, dims, topology
        self.numbers: dict[tuple[str, str], int] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.crossings: dict[int, tuple[Crossing, ...]] = {}
        self.by_link: set[int] = set()
        self.on_host = topology is not None and topology.host is not None

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
                link = self.links[pair] = crossed(self.topology, *pair, op, self.net)
                self.numbers[pair] = len(self.numbers)
            nbytes = dense_nbytes(blob, self.dims)
            in_place = self.on_host and instruction.kind == "collective"
            seconds = nbytes / link.bytes_per_second if in_place else link.seconds(nbytes)
            found.append(Crossing(self.numbers[pair], nbytes, seconds))
        self.crossings[position] = tuple(found)
        return self.crossings[position]

    def seconds(self, position: int, kind: str, spent: float) -> float:
        """What an instruction takes that brings something: a copy that alone. A part of a collective brings one operand
        after the other and adds them; threads of a host read them where they are, while they add."""
        brought = sum([crossing.seconds for crossing in self.crossings[position]])
        if kind == "collective" and self.on_host and brought <= spent:
            return spent
        self.by_link.add(position)
        return brought if kind == "copy" or self.on_host else spent + brought
