"""The invariants of a plan's instructions; :mod:`.program` and :mod:`.net` have those of its program.

22. Instructions of an operator are of the kind that its type asks for. Their order is program order, or another order
    that respects the hazards: an operator comes after the operators that make its inputs, and a write of a storage
    comes after the reads and writes of that storage that it follows in the program.
23. Every operator is issued exactly once; a collective once for each result.
24. An instruction is on the lane that it belongs to (:func:`graphir.ir.plan.issued_on`).
25. A record is of a version that its own lane has made or read.
26. A wait comes after a record of its event.
27. A storage is freed at most once, after it was made and after its last use. State that lives from step to step and
    external outputs are never freed.
28. A receive buffer is for storages that a copy makes and the step frees. Each storage of a buffer is freed before the
    next one is made.
29. The plan has a size for every dimension of its program.
33. An instruction sets the fields of its kind alone: an operator and its part, an event, or a storage.

Whether lanes that run at the same time wait for each other wherever they must is not checked here, but by
:func:`graphir.runtime.check`.
"""

from __future__ import annotations

from typing import Final

from ..blob import STATE_ROLES
from ..net import Net
from ..operator import Operator
from ..plan import Event, Instruction, Plan, issued_as, issued_on, parts_of
from .problems import Problem

__all__ = ["plan_problems"]

_FIELDS: Final = {"record": ("event",), "wait": ("event",), "free": ("storage",)}
"""The fields that an instruction sets beside its kind and lane; all other kinds set ``op`` and ``part``."""


def plan_problems(plan: Plan) -> list[Problem]:
    """Every invariant that the plan's instructions break. Its program must be sound."""
    issue = _Issue(plan)
    for dim in plan.program.dims:
        if dim not in plan.dims:
            issue.report(f"the plan has no size for dimension {dim!r}")
    for position, instruction in enumerate(plan.instructions):
        issue.position = position
        issue.fields(instruction)
        if instruction.kind in ("run", "copy", "collective"):
            issue.execute(instruction)
        elif instruction.kind == "free":
            issue.free(instruction)
        else:
            issue.event(instruction)
    issue.finish()
    return issue.problems


class _Issue:
    """A walk through a plan's instructions in their total order, which collects broken invariants."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.position = plan, 0
        self.problems: list[Problem] = []
        self.issued: dict[int, set[int]] = {}
        self.writes_before = _writes_before(plan.step)
        self.writes: dict[str, int] = {}
        self.values = {(name, 0) for name in plan.step.external_inputs}
        self.touched: set[Event] = set()
        self.recorded: set[Event] = set()
        self.freed: dict[str, int] = {}
        self.held: dict[tuple[str, int], str] = {}
        blobs = plan.step.blobs
        self.made = {blobs[name].storage for name in plan.step.external_inputs}
        self.kept = {blobs[name].storage for name in plan.step.external_outputs}
        self.kept |= {blobs[n].storage for n in plan.step.external_inputs if blobs[n].role in STATE_ROLES}

    def report(self, what: str, instruction: Instruction | None = None) -> None:
        if instruction is None:
            self.problems.append(Problem(what))
        elif 0 <= instruction.op < len(self.plan.step.ops):
            self.problems.append(Problem(what, self.plan.step.ops[instruction.op], self.plan.step))
        else:
            self.problems.append(Problem(what, instruction=f"{self.position} {_text(instruction)}"))

    def fields(self, instruction: Instruction) -> None:
        """Invariant 33. The text form shows no field of another kind."""
        own = _FIELDS.get(instruction.kind, ("op", "part"))
        for name, default in Instruction._field_defaults.items():
            if name not in own and (found := getattr(instruction, name)) != default:
                what = f"a {instruction.kind} has no {name}, and this one has {found!r}"
                self.problems.append(Problem(what, instruction=f"{self.position} {_text(instruction)}"))

    def execute(self, instruction: Instruction) -> None:
        ops = self.plan.step.ops
        if not 0 <= instruction.op < len(ops):
            self.report(f"there is no operator {instruction.op}", instruction)
            return
        op = ops[instruction.op]
        kind = issued_as(op)
        if instruction.kind != kind:
            self.report(f"{op.type} is issued as {instruction.kind}, not as {kind}", instruction)
        parts = self.issued.setdefault(instruction.op, set())
        if instruction.part in parts:
            self.report("the operator is issued twice", instruction)
        parts.add(instruction.part)
        if instruction.part >= parts_of(op):
            self.report(f"the operator has no part {instruction.part}", instruction)
            return
        wanted = issued_on(op, self.plan.step.blobs, instruction.part)
        if instruction.lane != wanted:
            self.report(f"the operator is issued on {instruction.lane}, not on {wanted}", instruction)
        self.touch(op, instruction)

    def touch(self, op: Operator, instruction: Instruction) -> None:
        """An instruction uses its operands: they must exist, and this lane may record them from now on."""
        blobs, at = self.plan.step.blobs, instruction.lane
        makes = instruction.makes(tuple(op.makes))
        for name, version in op.reads:
            if (name, version) not in self.values:
                self.report(f"{name!r};{version} is read before it is made", instruction)
        wanted = self.writes_before[instruction.op]
        for storage in dict.fromkeys([blobs[name].storage for name, _ in (*op.reads, *makes)]):
            if storage in self.freed:
                self.report(f"storage {storage!r} is used after it is freed", instruction)
            elif self.writes.get(storage, 0) < wanted[storage]:
                self.report(f"storage {storage!r} is used before a write that comes first in the program", instruction)
            elif self.writes.get(storage, 0) > wanted[storage]:
                self.report(f"storage {storage!r} is used after a write that comes later in the program", instruction)
        for name, version in (*op.reads, *makes):
            self.touched.add(Event(name, version, at))
        views = _views(op)
        for name, _ in [made for made in makes if made not in views]:
            self.writes[blobs[name].storage] = self.writes.get(blobs[name].storage, 0) + 1
        for name, version in makes:
            self.values.add((name, version))
            self.made.add(blobs[name].storage)
            if issued_as(op) == "copy" and version == 0 and name in self.plan.buffers:
                self.receive(name, instruction)

    def receive(self, storage: str, instruction: Instruction) -> None:
        """Invariant 28: when a buffer is filled, the storage that it held is freed."""
        blobs = self.plan.step.blobs
        buffer = (blobs[storage].device, self.plan.buffers[storage])
        earlier = self.held.get(buffer)
        self.held[buffer] = storage
        if earlier is not None and earlier not in self.freed:
            self.report(f"buffer {buffer[1]} of {buffer[0]} takes {storage!r} while it holds {earlier!r}", instruction)

    def event(self, instruction: Instruction) -> None:
        event = instruction.event
        if event is None:
            self.report(f"a {instruction.kind} has no event", instruction)
        elif instruction.kind == "wait":
            if event not in self.recorded:
                self.report("the event is waited for before it is recorded", instruction)
        else:
            if event.lane != instruction.lane:
                self.report(f"an event of {event.lane} is recorded on {instruction.lane}", instruction)
            elif event not in self.touched:
                self.report(f"{event.lane} has neither made nor read {event.blob!r};{event.version}", instruction)
            self.recorded.add(event)

    def free(self, instruction: Instruction) -> None:
        storage = instruction.storage
        blob = self.plan.step.blobs.get(storage)
        if blob is None or blob.is_view:
            self.report(f"{storage!r} is freed, but it is not a storage", instruction)
        elif storage in self.kept:
            self.report(f"storage {storage!r} is freed, but it is still needed after the step", instruction)
        elif storage in self.freed:
            self.report(f"storage {storage!r} is freed twice", instruction)
        elif storage not in self.made:
            self.report(f"storage {storage!r} is freed before it is made", instruction)
        self.freed[storage] = self.position

    def finish(self) -> None:
        copied = {op.outputs[0] for op in self.plan.step.ops if issued_as(op) == "copy"}
        for storage in self.plan.buffers:
            if storage not in copied or storage not in self.freed:
                self.report(f"{storage!r} has a receive buffer, but no copy makes it or nothing frees it")
        for position, op in enumerate(self.plan.step.ops):
            parts = parts_of(op)
            missing = parts - len(self.issued.get(position, ()))
            if missing > 0:
                what = "the operator is never issued" if parts == 1 else f"{missing} parts are never issued"
                self.problems.append(Problem(what, op, self.plan.step))


def _views(op: Operator) -> frozenset[tuple[str, int]]:
    """The values that an operator makes as views of its operands."""
    if not op.effects.views:
        return frozenset()
    makes = list(op.makes)
    return frozenset([makes[output] for output in op.effects.viewing])


def _writes_before(net: Net) -> list[dict[str, int]]:
    """For each operator, how often the storages that it touches are written before it in the program."""
    writes: dict[str, int] = {}
    found = []
    for op in net.ops:
        touched = [net.blobs[name].storage for name in (*op.inputs, *op.outputs)]
        found.append({storage: writes.get(storage, 0) for storage in touched})
        views = _views(op)
        for made in op.makes:
            if made not in views:
                storage = net.blobs[made[0]].storage
                writes[storage] = writes.get(storage, 0) + 1
    return found


def _text(instruction: Instruction) -> str:
    event = instruction.event
    what = instruction.storage if event is None else f"{event.blob};{event.version} by {event.lane}"
    return f"{instruction.lane}: {instruction.kind} {what}"
