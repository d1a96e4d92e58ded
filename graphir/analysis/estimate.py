"""What a step of a plan would take: seconds of each lane and each link, and what they go into."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ..errors import GraphirError, counted
from ..ir.plan import Instruction, Plan
from ..ir.size import Dims
from ..ir.text import nbytes_text
from .cost import Cost, CostSource, operator_costs
from .element_types import refuse_element_types, without_figures
from .execution import Execution
from .overlap import Overlap, flows, overlap_of
from .profiles import Profile
from .refused import refused_at
from .schedule import Crossing, Schedule, schedule
from .simulation import ISSUED, WORKER
from .tables import cut, seconds_text, spoken_of, table
from .topology import Topology

__all__ = [
    "Estimate",
    "IssueUse",
    "LaneUse",
    "LinkUse",
    "ModuleTime",
    "OperatorCost",
    "PathStep",
    "SourceTime",
    "estimated",
]

Cause: TypeAlias = Literal["start", "worker", "event", "link", "issue"]
"""What a step of the critical path began after: the *start* of the step; its *worker*'s instruction before; an *event*
of another lane; the copy that had the *link* before; or that the host had come to *issue* it."""

_MOST_PRINTED: Final = 10
_NAME: Final = 26
_WIDTH: Final = 80


class LaneUse(NamedTuple):
    """Seconds of a lane in a step.

    Attributes:
        lane: its name.
        busy: with its own instructions.
        idle: the rest of the step.
        share: the busy share.
        unissued: of the idle seconds, those in which it could go on and the host thread had not issued what comes next.
    """

    lane: str
    busy: float
    idle: float
    share: float
    unissued: float = 0.0


class IssueUse(NamedTuple):
    """What one host thread does to issue a step to CUDA streams: the *seconds* in all, and :class:`.Calls`."""

    seconds: float
    kernels: int
    copies: int
    records: int
    waits: int
    switches: int
    views: int
    replays: int

    def __str__(self) -> str:
        nouns = ("kernel", "copy", "record", "wait", "stream switch", "view", "graph replay")
        plurals = {"copy": "copies", "stream switch": "stream switches"}
        said = [
            f"{count:,} {noun if count == 1 else plurals.get(noun, noun + 's')}"
            for noun, count in zip(nouns, self[1:], strict=True)
            if count
        ]
        return f"issued by one host thread in {seconds_text(self.seconds)}: {', '.join(said)}"

    def lines(self, width: int) -> list[str]:
        """The text in lines, none of which ends between a number and what it counts."""
        parts = str(self).replace(", ", ",\n").replace(" ", "\N{NO-BREAK SPACE}")
        return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap(parts, width, subsequent_indent="  ")]


class LinkUse(NamedTuple):
    """What crosses a directed link.

    Attributes:
        source: the device that is read.
        destination: the one that is written.
        copies: how many copies and parts of collectives bring something.
        nbytes: what they bring.
        seconds: what that takes.
    """

    source: str
    destination: str
    copies: int
    nbytes: int
    seconds: float


class PathStep(NamedTuple):
    """An instruction of the critical path: what the next one waited for.

    Attributes:
        instruction: its position in the plan; -1 of ``issue``.
        kind: ``run``, ``copy`` or ``collective``; ``issue`` stands for all that the host thread has issued until then.
        lane: what executes it.
        blob: the first that it makes; its type where it makes none.
        type: of the operator.
        module: of the operator.
        start: seconds since the step began.
        seconds: what it takes.
        cause: why it began then and not before.
        event: of a wait that it began after, as plans print it.
        delay: seconds from the end of what it began after to its start, as for a thread that is woken.
    """

    instruction: int
    kind: str
    lane: str
    blob: str
    type: str
    module: str
    start: float
    seconds: float
    cause: Cause
    event: str = ""
    delay: float = 0.0


class ModuleTime(NamedTuple):
    """Instructions of the critical path that belong to a module, and their seconds; copies and collectives stand under
    those words."""

    module: str
    instructions: int
    seconds: float


class SourceTime(NamedTuple):
    """How many instructions have their seconds from a source, and how many seconds that is in all."""

    source: CostSource
    instructions: int
    seconds: float


class OperatorCost(NamedTuple):
    """What an operator takes each time that an instruction executes it, beside nothing else; and whence that is
    known."""

    blob: str
    type: str
    module: str
    seconds: float
    source: CostSource


@dataclass(frozen=True)
class Estimate:
    """What a step would take. Prints as tables.

    Attributes:
        name: of the plan.
        topology: the name of the machine.
        machine: the same, with whence its figures are, as reports say it.
        measured: the date of these figures; empty where they were not measured.
        executor: what would execute it.
        dims: the value of each dimension.
        seconds: of a step.
        lanes: in the plan's order.
        links: those that something crosses.
        path: the critical path, in order of time: no step can be shorter than what these take one after the other.
        modules: those of the critical path, the longest first.
        sources: where seconds come from.
        operators: in the order of the plan's step.
        overlap: which micro-batch each device works on, and when; None where the step has one, or one device.
        schedule: when each instruction would be executed.
        issue: what the host thread that issues the step does; None where threads of the host execute it.
        refused: why no session runs a step at these dimensions; empty where one does.
        caveats: for which devices and element types the machine has no figures, and others are taken.
    """

    name: str
    topology: str
    machine: str
    measured: str
    executor: str
    dims: Mapping[str, int]
    seconds: float
    lanes: tuple[LaneUse, ...]
    links: tuple[LinkUse, ...]
    path: tuple[PathStep, ...] = field(repr=False)
    modules: tuple[ModuleTime, ...]
    sources: tuple[SourceTime, ...]
    operators: tuple[OperatorCost, ...] = field(repr=False)
    overlap: Overlap | None = field(repr=False)
    schedule: Schedule = field(repr=False, compare=False)
    issue: IssueUse | None = None
    refused: str = ""
    caveats: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The whole estimate, without the schedule, as JSON text."""
        lists = {
            name: [entry._asdict() for entry in getattr(self, name)]
            for name in ("lanes", "links", "path", "modules", "sources", "operators")
        }
        about = {name: getattr(self, name) for name in ("name", "topology", "machine", "measured", "executor")}
        about["dims"] = dict(self.dims)
        flow = None if self.overlap is None else self.overlap.to_dict()
        figures = {
            **about,
            "refused": self.refused,
            "caveats": self.caveats,
            "seconds": self.seconds,
            "issue": None if self.issue is None else self.issue._asdict(),
            **lists,
            "overlap": flow,
        }
        return json.dumps(figures, ensure_ascii=False)

    def __str__(self) -> str:
        head = f"estimate of {cut(self.name, _NAME)!r}: {seconds_text(self.seconds)} a step"
        lines = [spoken_of(self.machine), head, f"  executor {self.executor}"]
        lines += [f"  no session runs this step: {self.refused}"] if self.refused else []
        lines += [f"  but {caveat}" for caveat in self.caveats]
        lanes = [(u.lane, seconds_text(u.busy), seconds_text(u.idle), f"{u.share:.1%}") for u in self.lanes]
        if self.issue is None:
            lines += table(("lane", "busy", "idle", "share"), lanes)
        else:
            lines += [f"  {line}" for line in self.issue.lines(_WIDTH - 2)]
            waits = [(*row, seconds_text(u.unissued)) for row, u in zip(lanes, self.lanes, strict=True)]
            lines += table(("lane", "busy", "idle", "share", "not issued"), waits)
        if self.overlap is not None:
            lines += self.overlap.lines("  micro-batches")
        links = [
            (f"{u.source} -> {u.destination}", str(u.copies), nbytes_text(u.nbytes), seconds_text(u.seconds))
            for u in self.links
        ]
        lines += table(("link", "copies", "bytes", "time"), links)
        whence = [(s.source, str(s.instructions), seconds_text(s.seconds)) for s in self.sources]
        lines += table(("seconds from", "number", "time"), whence)
        lines.append(f"  critical path: {counted(len(self.path), 'instruction')}, by module")
        modules = [(cut(m.module, _NAME), str(m.instructions), seconds_text(m.seconds)) for m in self.modules]
        lines += table(("module", "number", "time"), modules[:_MOST_PRINTED])
        lines += _more(len(modules))
        lines += self._longest()
        return "\n".join(lines)

    def _longest(self) -> Iterator[str]:
        """The longest instructions of the critical path, in order of time."""
        longest = sorted(self.path, key=lambda step: -step.seconds)[:_MOST_PRINTED]
        rows = []
        for step in sorted(longest, key=lambda step: step.start):
            what = cut(f"{step.kind} {step.blob}", _NAME)
            rows.append((what, step.lane, step.cause, seconds_text(step.start), seconds_text(step.seconds)))
        yield from table(("its longest", "lane", "began after", "at", "time"), rows, left=3)
        yield from _more(len(self.path))


def _more(count: int) -> list[str]:
    return [f"  and {count - _MOST_PRINTED} more"] if count > _MOST_PRINTED else []


def estimated(
    plan: Plan, topology: Topology, execution: Execution, dims: Dims, profile: Profile | None = None, threads: int = 1
) -> Estimate:
    """What a step of *plan* would take.

    Args:
        plan: what is executed.
        topology: where.
        execution: how.
        dims: the value of each dimension.
        profile: what was measured of calls, on that machine.
        threads: how many threads one kernel uses.

    Raises:
        GraphirError: the topology does not have a device of the plan, a link that a copy needs, or the arithmetic of
            an element type; or the plan is not well-formed.
    """
    for device in plan.step.devices:
        topology.speed(device)
    refuse_element_types(plan.step, topology, plan.step.devices)
    try:
        costs = operator_costs(plan.step, dims, lambda device: topology.speed(device).rates(), profile, threads)
        found = schedule(plan, dims, costs, execution, topology)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        what = f"the time of {plan.name!r} cannot be computed: {type(e).__name__}: {e}"
        raise GraphirError(what, fix="verify it: it is not well-formed") from None
    path = tuple(_path(found))
    return Estimate(
        name=plan.name,
        topology=topology.name,
        machine=topology.about,
        measured=topology.measured,
        executor=execution.executor,
        dims=dict(dims),
        seconds=found.times.seconds,
        lanes=_lanes(found),
        links=_links(found),
        path=path,
        modules=_modules(path),
        sources=_sources(found, costs),
        operators=_operators(found, costs),
        overlap=overlap_of(plan, found.intervals()) if flows(plan) else None,
        schedule=found,
        issue=_issue(found),
        refused=refused_at(plan.program, dims),
        caveats=tuple(without_figures(plan.step, topology)),
    )


def _lanes(found: Schedule) -> tuple[LaneUse, ...]:
    busy, unissued = dict.fromkeys(found.plan.lanes, 0.0), dict.fromkeys(found.plan.lanes, 0.0)
    for position, (instruction, seconds) in enumerate(zip(found.plan.instructions, found.tasks.seconds, strict=True)):
        busy[instruction.lane] += seconds
        if found.times.causes[position] == ISSUED:
            unissued[instruction.lane] += found.times.starts[position] - found.times.free[position]
    step = found.times.seconds
    return tuple(
        [LaneUse(lane, b, max(step - b, 0.0), b / step if step else 0.0, unissued[lane]) for lane, b in busy.items()]
    )


def _issue(found: Schedule) -> IssueUse | None:
    issued = found.issued
    return None if issued is None else IssueUse(sum(issued.seconds), *issued.calls)


def _links(found: Schedule) -> tuple[LinkUse, ...]:
    over: list[list[Crossing]] = [[] for _ in found.links]
    for crossings in found.crossings.values():
        for crossing in crossings:
            over[crossing.link].append(crossing)
    return tuple(
        [
            LinkUse(*pair, len(o), sum(c.nbytes for c in o), sum(c.seconds for c in o))
            for pair, o in zip(found.links, over, strict=True)
        ]
    )


def _path(found: Schedule) -> list[PathStep]:
    """The critical path, from the instruction that ends last back to the start."""
    plan, tasks, times = found.plan, found.tasks, found.times
    if not times.ends:
        return []
    before: list[int] = []
    last: dict[int, int] = {}
    for position, worker in enumerate(tasks.workers):
        before.append(last.get(worker, -1))
        last[worker] = position
    found_back: list[tuple[int, Cause, str]] = []
    position = max(range(len(times.ends)), key=times.ends.__getitem__)
    while position >= 0:
        if tasks.seconds[position]:
            found_back.append((position, "worker", ""))
        cause = times.causes[position]
        if cause != WORKER and found_back and found_back[-1][1] == "worker":
            # What came before stands where the instruction is, or at a wait that its worker came to before it.
            found_back[-1] = found_back[-1][0], *_edge(plan.instructions[position], cause)
        position = cause if cause >= 0 else before[position] if cause == WORKER else -1
    steps: list[PathStep] = []
    end = 0.0
    if found_back and found_back[-1][1] == "issue":
        first = found_back[-1][0]
        end = times.starts[first]
        count = sum([instruction.op >= 0 for instruction in plan.instructions[: first + 1]])
        steps.append(PathStep(-1, "issue", "host", counted(count, "instruction"), "issue", "", 0.0, end, "start"))
    for position, why, event in reversed(found_back):
        instruction = plan.instructions[position]
        op = plan.step.ops[instruction.op]
        blob = next(iter(instruction.makes(op.outputs)), op.type)
        what = position, instruction.kind, instruction.lane, blob, op.type, op.module
        start = times.starts[position]
        steps.append(PathStep(*what, start, tasks.seconds[position], why, event, max(start - end, 0.0)))
        end = times.ends[position]
    return steps


def _edge(instruction: Instruction, cause: int) -> tuple[Cause, str]:
    """Why an instruction began when it did, and the event that it waited for, if that is it."""
    if cause < 0:
        return ("issue" if cause == ISSUED else "start"), ""
    if instruction.event is None:
        return "link", ""
    return "event", f"{instruction.event.blob} by {instruction.event.lane}"


def _modules(path: tuple[PathStep, ...]) -> tuple[ModuleTime, ...]:
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for step in path:
        module = {"copy": "copies", "collective": "collectives", "issue": "issuing"}.get(step.kind, step.module or "-")
        counts[module] += 1
        seconds[module] = seconds.get(module, 0.0) + step.seconds
    found = [ModuleTime(module, counts[module], spent) for module, spent in seconds.items()]
    return tuple(sorted(found, key=lambda time: -time.seconds))


def _sources(found: Schedule, costs: list[Cost]) -> tuple[SourceTime, ...]:
    counts: Counter[CostSource] = Counter()
    seconds: dict[CostSource, float] = dict.fromkeys(get_args(CostSource), 0.0)
    for position, instruction in enumerate(found.plan.instructions):
        if instruction.op >= 0:
            source = _source(found, costs, position)
            counts[source] += 1
            seconds[source] += found.tasks.seconds[position]
    return tuple([SourceTime(source, counts[source], seconds[source]) for source in counts])


def _source(found: Schedule, costs: list[Cost], position: int) -> CostSource:
    return "link" if position in found.by_link else costs[found.plan.instructions[position].op].source


def _operators(found: Schedule, costs: list[Cost]) -> tuple[OperatorCost, ...]:
    crossing = {found.plan.instructions[position].op: position for position in found.by_link}
    rows = []
    for position, (op, cost) in enumerate(zip(found.plan.step.ops, costs, strict=True)):
        seconds, source = cost.seconds, cost.source
        if position in crossing:
            seconds, source = found.tasks.seconds[crossing[position]], "link"
        rows.append(OperatorCost(op.outputs[0] if op.outputs else op.type, op.type, op.module, seconds, source))
    return tuple(rows)
