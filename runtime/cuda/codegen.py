"""Straight-line Python that issues a plan to CUDA streams: the lines of :mod:`graphir.runtime.codegen`, and between
them the streams.

One function issues all lanes in the plan's order, so that a wait always finds its record before it::

    e0()                         # the stream of gpu:0.compute is current from here on
    v0 = c0(s1, i0, s0)          # run fc1 = aten.addmm(fc1.bias, x, fc1.weight.t)
    e1()                         # record fc1
    e2()                         # gpu:1.copy_in: wait fc1 by gpu:0.compute
    e3(); e4(); v1 = c1(v0)      # copy fc1_gpu_1 <- fc1, its streams on both devices current

Each lane has a stream of its own. Torch executes a copy between two real devices on the *source's* current stream. It
lets this stream wait for the destination's current stream before the copy, and the destination's for the source's after
it. So the lane of a copy has a companion stream on each device that it copies from.

A lane of the host has no stream: what it does is done when it is issued. A wait of such a lane does not stop the host:
it is remembered, and whoever waits for the lane waits for that too. The host stops only where it touches memory that a
stream still writes or reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from graphir.analysis.joint import are_incomplete, grouped
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.plan import Instruction, Plan, lane, lane_device

from ..codegen.handoffs import Handoffs, Handover, handoffs
from ..codegen.statements import Statements
from ..codegen.values import Values
from ..codegen.writer import ThreadCode, Writer
from ..executor import Setting
from ..kernels.buffers import Buffer, Buffers
from .receive import Anew, JointReduction, NativeReduction, Owner, PageLocked, Reduction
from .streams import Event, Machine, Stream, wait_for

__all__ = ["Lanes", "StreamStatements", "StreamWriter", "generate_streams", "is_taken_anew"]


class Lanes:
    """The streams of a plan, made once.

    Args:
        plan: whose lanes.
        places: the real device of each logical one.
        machine: makes the streams.

    Attributes:
        streams: every lane's, and then the companions.
    """

    def __init__(self, plan: Plan, places: Mapping[Device, torch.device], machine: Machine) -> None:
        self.places, self.machine = places, machine
        self.streams: dict[str, Stream] = {}
        for device in plan.devices:
            if places[device].type == "cuda":
                self.streams[lane(device, "compute")] = machine.stream(places[device])
        for name in plan.lanes:
            if name not in self.streams and self.place(name).type == "cuda":
                self.streams[name] = machine.stream(self.place(name))
        self.companions: dict[tuple[str, torch.device], Stream] = {}

    def place(self, name: str) -> torch.device:
        """The real device of a lane."""
        return self.places[lane_device(name)]

    def companion(self, name: str, place: torch.device) -> Stream:
        """The stream on *place* that copies from there for a lane."""
        if place == self.place(name):
            return self.streams[name]
        key = name, place
        if key not in self.companions:
            self.companions[key] = self.streams[f"{name} from {place}"] = self.machine.stream(place)
        return self.companions[key]

    def rest(self, deadline: float | None) -> None:
        """Wait for all streams."""
        for stream in self.streams.values():
            wait_for(stream, deadline)

    def owner(self, name: str, device: Device) -> Owner:
        """Who takes memory on *device* for a lane."""
        return Owner(
            self.machine, self.places[device], self.streams.get(lane(device, "compute")), self.streams.get(name)
        )


class StreamWriter(Writer):
    """Puts before each line what makes its streams current.

    Attributes:
        beside: companions that the next line needs.
    """

    def __init__(
        self,
        kept: Sequence[Tensor],
        plan: Plan,
        lanes: Lanes,
        observed: bool = False,
        consumed: Collection[str] = (),
    ) -> None:
        super().__init__(kept, observed, consumed)
        self.plan, self.lanes = plan, lanes
        self.beside: list[Stream] = []
        self.current: dict[torch.device, Stream] = {}
        self.device: torch.device | None = None

    def line(self, position: int, statements: Sequence[str]) -> None:
        """See :class:`.codegen.writer.Writer`."""
        instruction, beside = self.plan.instructions[position], self.beside
        self.beside = []
        if statements and instruction.op >= 0:
            own = self.lanes.streams.get(instruction.lane)
            needed = beside if own is None else [*beside, own]
            statements = [*[text for stream in needed for text in self.switch(stream)], *statements]
        super().line(position, statements)

    def switch(self, stream: Stream) -> list[str]:
        if self.current.get(stream.device) is stream and self.device == stream.device:
            return []
        self.current[stream.device], self.device = stream, stream.device
        return [self.called(partial(self.lanes.machine.use, stream), ("use", id(stream)))]

    def called(self, function: Callable[[], object], key: object) -> str:
        return f"{self.bind(function, 'e', key)}()"


class _Recorded(NamedTuple):
    """An event of a stream, and the position of the record."""

    position: int
    event: Event


class StreamStatements(Statements):
    """Each instruction's statements.

    Args:
        setting: what is run; its devices are those that tensors name.
        writer: of the lines.
        values: of the variables.
        lanes: of the plan.
        buffers: of the copies; those that are missing are added.
        native: whether NCCL reduces.
        handover: of values, where a part of the plan is in another function; its events are not.

    Attributes:
        pending: for each lane of the host, the last event of every lane that it has waited for.
        recorded: for each record, what a wait for it waits for, by lane.
        latest: for each lane, an event recorded behind all that was issued to it so far, which further records share.
        arriving: for each storage of the host, the copy that still writes it.
        leaving: for each buffer of the host, the copies that still read it.
        behind: records that come behind the collectives that are held back.
    """

    def __init__(
        self,
        setting: Setting,
        writer: StreamWriter,
        values: Values,
        lanes: Lanes,
        buffers: Buffers,
        native: bool = False,
        handover: Handover | None = None,
    ) -> None:
        super().__init__(setting, writer, values, handover, 0, buffers)
        self.lines, self.lanes, self.native = writer, lanes, native
        plan = setting.plan
        self.found: Handoffs = handoffs(plan, {name: i for i, name in enumerate(plan.lanes)})
        self.source = {taken: record for record, given in self.found.given.items() for taken in given}
        self.numbers: Mapping[str, int] = plan.buffers
        self.pending: dict[str, dict[str, _Recorded]] = {}
        self.recorded: dict[int, dict[str, _Recorded]] = {}
        self.latest: dict[str, _Recorded] = {}
        self.arriving: dict[str, Event] = {}
        self.leaving: dict[str, list[Event]] = {}
        self.behind: list[int] = []

    def add(self, position: int, instruction: Instruction) -> None:
        """See :class:`.codegen.statements.Statements`."""
        if instruction.kind == "wait" or instruction.op >= 0:
            self.latest.pop(instruction.lane, None)
        # A record between parts of a collective comes behind all of them, and a wait before.
        if instruction.kind in ("record", "wait") and are_incomplete(self.reductions):
            if instruction.kind == "record":
                self.behind.append(position)
                return
            if self.source.get(self.found.taken.get(position, -1)) not in self.behind:
                self.lines.line(position, self.event(position))
                return
        super().add(position, instruction)

    def place(self, name: str) -> torch.device:
        """The real device of a blob."""
        return self.lanes.places[self.net.blobs[name].device]

    def event(self, position: int) -> list[str]:
        """A record puts an event into its lane's stream, a wait stops its lane's stream."""
        at = self.setting.plan.instructions[position].lane
        stream, taken = self.lanes.streams.get(at), self.found.taken.get(position)
        if position in self.found.given:
            if stream is None:
                self.recorded[position] = dict(self.pending.get(at, {}))
                return []
            if at in self.latest:
                self.recorded[position] = {at: self.latest[at]}
                return []
            event = self.lanes.machine.event()
            self.latest[at] = _Recorded(position, event)
            self.recorded[position] = {at: self.latest[at]}
            return [self.lines.called(partial(event.record, stream), ("record", position))]
        if taken is None:
            return []
        events = self.recorded[self.source[taken]]
        if stream is None:
            self.remember(at, events)
            return []
        return [self.wait(recorded.event, stream) for name, recorded in events.items() if name != at]

    def wait(self, event: Event, stream: Stream) -> str:
        return self.lines.called(partial(event.wait, stream), ("wait", id(event), id(stream)))

    def remember(self, at: str, events: Mapping[str, _Recorded]) -> None:
        known = self.pending.setdefault(at, {})
        for name, recorded in events.items():
            if name not in known or known[name].position < recorded.position:
                known[name] = recorded

    def hold(self, position: int, op: Operator, part: int) -> None:
        """See :class:`.codegen.statements.Statements`; what is observed, on the host or NCCL's is done part by part."""
        joint = len(op.inputs) == len(op.outputs) and not (self.native or self.lines.observed)
        if joint and all(self.place(name).type == "cuda" for name in (*op.inputs, *op.outputs)):
            super().hold(position, op, part)
            return
        self.flush()
        instruction = self.setting.plan.instructions[position]
        self.writer.line(position, self.observed(self.reduce(position, instruction), position))

    def flush(self) -> None:
        """See :class:`.codegen.statements.Statements`."""
        held, self.reductions = self.reductions, []
        self.reduced.clear()
        apart, groups = grouped(held, self.net, self.setting.state)
        for position, _ in apart:
            self.lines.line(position, self.reduce(position, self.setting.plan.instructions[position]))
        for group in groups:
            self.lines.line(group[0][0], self.reduce_jointly([op for _, op in group]))
            self.lines.current.clear()
        behind, self.behind = self.behind, []
        for position in behind:
            self.lines.line(position, self.event(position))
        super().flush()

    def of(self, position: int, instruction: Instruction) -> list[str]:
        """The statements of an instruction."""
        if instruction.kind == "copy":
            return self.copy(position, instruction.lane, self.net.ops[instruction.op])
        return super().of(position, instruction)

    def call(self, op: Operator) -> list[str]:
        """See :class:`.codegen.statements.Statements`; the host stops for what it reads or overwrites itself."""
        return [*self.settled(op), *super().call(op)]

    def update(self, ops: Sequence[Operator]) -> list[str]:
        """See :class:`.codegen.statements.Statements`."""
        return [*[text for op in ops for text in self.settled(op)], *super().update(ops)]

    def settled(self, op: Operator) -> list[str]:
        """What stops the host until no stream writes what *op* touches on the host, or reads what it overwrites."""
        blobs = self.net.blobs
        events = [self.arriving.pop(s, None) for s in dict.fromkeys(blobs[name].storage for name in op.inputs)]
        for position, _ in op.effects.writes:
            events += self.leaving.pop(blobs[op.outputs[position]].storage, [])
        return [self.stop(event) for event in events if event is not None]

    def copy(self, position: int, at: str, op: Operator) -> list[str]:
        """A copy into its buffer, or into state."""
        source, made = op.inputs[0], op.outputs[0]
        places = self.place(source), self.place(made)
        if all(place.type == "cpu" for place in places):
            return self.call(op)
        read = self.read(*next(iter(op.reads)))
        before, stream = self.streams_of(at, places)
        if made in self.setting.state:
            statements = [self.store(*next(iter(op.makes)), f"{read}, True")]
        else:
            receives = Anew(self.lanes.owner(at, op.device)) if is_taken_anew(op, places[1]) else self.buffer(at, made)
            received = self.writer.bind(receives.receive, "c", ("receive", self.number(made)))
            statements = self.assign(*next(iter(op.makes)), f"{received}({read})")
        return [*before, *statements, *self.watched(position, at, op, stream)]

    def streams_of(self, at: str, places: Sequence[torch.device]) -> tuple[list[str], Stream]:
        """What a copy's streams wait for beforehand, and the stream that does it."""
        own = self.lanes.streams.get(at)
        beside = [self.lanes.companion(at, place) for place in places if place.type == "cuda"]
        beside = [stream for stream in beside if stream is not own]
        self.lines.beside += beside
        if own is not None:
            return [], own
        events = self.pending.get(at, {}).values()
        return [self.wait(recorded.event, stream) for stream in beside for recorded in events], beside[0]

    def watched(self, position: int, at: str, op: Operator, stream: Stream) -> list[str]:
        """Note a copy that the host, or a lane that waits for a lane of the host, may have to wait for."""
        source, made = (self.net.blobs[name].storage for name in (op.inputs[0], op.outputs[0]))
        if self.in_buffer(source):
            return self.leave(position, stream, [source])
        if self.place(made).type == "cuda":
            return []
        event = self.lanes.machine.event()
        statements = [self.lines.called(partial(event.record, stream), ("copied", position))]
        if at not in self.lanes.streams:
            self.remember(at, {f"{at} copies": _Recorded(position, event)})
        if self.lines.observed:  # the probe reads it
            return [*statements, self.stop(event)]
        self.arriving[made] = event
        return statements

    def leave(self, position: int, stream: Stream, storages: Sequence[str]) -> list[str]:
        """Note that a stream reads buffers of the host: the host waits for it before it overwrites them."""
        event = self.lanes.machine.event()
        for storage in storages:
            self.leaving.setdefault(storage, []).append(event)
        return [self.lines.called(partial(event.record, stream), ("copied", position))]

    def stop(self, event: Event) -> str:
        return self.lines.called(partial(self.arrived, event), ("stop", id(event)))

    def arrived(self, event: Event) -> None:
        """Wait for an event; the error names the lanes that have work to do."""
        try:
            wait_for(event, self.setting.deadline)
        except TimeoutError as e:
            busy = [name for name, stream in self.lanes.streams.items() if not stream.query()]
            raise TimeoutError(f"{e}: {', '.join(busy)}") from None

    def number(self, name: str) -> tuple[Device, object]:
        blob = self.net.blobs[name]
        return blob.device, self.numbers.get(blob.storage, blob.storage)

    def in_buffer(self, storage: str) -> bool:
        """Whether it lies in a buffer of the host, from which streams copy while the host goes on."""
        return self.place(storage).type == "cpu" and self.number(storage) in self.buffers

    def buffer_of(self, storage: str) -> Buffer | None:
        """None: what one lane of the host copies to another takes new memory, since streams may still read the old
        one."""
        return None

    def buffer(self, at: str, made: str) -> Buffer:
        number = self.number(made)
        if number not in self.buffers:
            on_host = self.place(made).type == "cpu"
            rest = partial(self.lanes.rest, self.setting.deadline)
            owner = PageLocked(self.lanes.machine, rest) if on_host else self.lanes.owner(at, number[0])
            self.buffers[number] = Buffer(owner.room)
        return self.buffers[number]

    def reduce(self, position: int, instruction: Instruction) -> list[str]:
        """One part of a collective; where NCCL reduces, all parts in place of the first."""
        op, makes = self.net.ops[instruction.op], list(self.net.ops[instruction.op].makes)
        if self.native:
            return self.reduce_natively(op, makes) if makes[0] not in self.values.variables else []
        at, (name, version) = instruction.lane, makes[instruction.part]
        places = [self.place(read) for read in op.inputs]
        before: list[str] = []
        if any(place.type == "cuda" for place in (self.place(name), *places)):
            before, _ = self.streams_of(at, list(dict.fromkeys(places)))
        part = self.part(at, name, places)
        inputs = ", ".join([self.read(*read) for read in op.reads])
        reduced = f"{self.writer.bind(part.reduce, 'c')}(({inputs},), *{self.scaling(op)})"
        statements = [*before, *self.settled(op), *self.assign(name, version, reduced)]
        held = [storage for read in op.inputs if self.in_buffer(storage := self.net.blobs[read].storage)]
        if at in self.lanes.streams and held:
            statements += self.leave(position, self.lanes.streams[at], held)
        return statements

    def part(self, at: str, name: str, places: Sequence[torch.device]) -> Reduction:
        device = self.net.blobs[name].device
        elsewhere = [place != self.place(name) for place in places]
        return Reduction(self.lanes.owner(at, device), elsewhere)

    def reduce_jointly(self, ops: Sequence[Operator]) -> list[str]:
        """One call for all parts of collectives that are alike and among the same devices."""
        lanes = [lane(self.net.blobs[name].device, "copy_in") for name in ops[0].outputs]
        places = [self.place(name) for name in ops[0].inputs]
        parts = [self.part(at, name, places) for at, name in zip(lanes, ops[0].outputs, strict=True)]
        streams = [self.lanes.streams[at] for at in lanes]
        read = [[self.read(*value) for value in op.reads] for op in ops]
        inputs = ", ".join([f"({''.join([f'{item}, ' for item in items])})" for items in zip(*read, strict=True)])
        text = f"{self.writer.bind(JointReduction(parts, streams).reduce, 'c')}(({inputs},), *{self.scaling(ops[0])})"
        makes = [list(op.makes)[part] for part in range(len(lanes)) for op in ops]
        self.lines.beside += streams[1:]
        variables = [self.values.fresh() for _ in makes]
        statements = [f"{', '.join(variables)}, = {text}"]
        for made, variable in zip(makes, variables, strict=True):
            statements += self.define(*made, variable)
        return statements

    def reduce_natively(self, op: Operator, makes: Sequence[tuple[str, int]]) -> list[str]:
        lanes = [lane(self.net.blobs[name].device, "copy_in") for name, _ in makes]
        parts = [self.part(at, name, []) for at, (name, _) in zip(lanes, makes, strict=True)]
        reduction = NativeReduction(parts, [self.lanes.streams[at] for at in lanes])
        inputs = ", ".join([self.read(*read) for read in op.reads])
        results = self.values.fresh()
        statements = [f"{results} = {self.writer.bind(reduction.reduce, 'c')}(({inputs},), *{self.scaling(op)})"]
        for i, made in enumerate(makes):
            statements += self.assign(*made, f"{results}[{i}]")
        self.lines.beside += [self.lanes.streams[at] for at in lanes[1:]]  # they stay current on their devices
        return [*statements, f"del {results}"]

    def finish(self) -> None:
        """Write what is left: the host stops for results and state that are still on their way to it.

        Where a copy ends in memory that is not page-locked, CUDA promises neither that it has ended when the call
        returns nor that it has not.
        """
        self.flush()
        blobs = self.net.blobs
        ways = [
            self.arriving.pop(blobs[name].storage, None) for name in (*self.net.external_outputs, *self.setting.state)
        ]
        stops = [self.stop(event) for event in ways if event is not None]
        self.lines.line(len(self.setting.plan.instructions) - 1, stops)


def is_taken_anew(op: Operator, place: torch.device) -> bool:
    """Whether a copy to a *place* takes memory in each step, not a buffer that is kept: see :mod:`.receive`."""
    return op.received == "fresh" and place.type == "cuda"


def generate_streams(
    setting: Setting, lanes: Lanes, buffers: Buffers, *, native: bool = False, observed: bool = False
) -> ThreadCode:
    """The function that issues a plan's step.

    Args:
        setting: what it runs.
        lanes: the streams.
        buffers: of the copies; those that are missing are added.
        native: whether NCCL reduces.
        observed: whether it takes the methods of a probe, see :func:`.codegen.statements.generate`.
    """
    values = Values(setting, dict.fromkeys(setting.plan.lanes, 0), observed)
    writer = StreamWriter(values.kept, setting.plan, lanes, observed, values.consumed.values())
    statements = StreamStatements(setting, writer, values, lanes, buffers, native)
    for position, instruction in enumerate(setting.plan.instructions):
        statements.add(position, instruction)
    statements.finish()
    for index, name in enumerate(setting.plan.step.external_outputs):
        writer.returns(index, values.last(name)[1])
    return writer.finish()
