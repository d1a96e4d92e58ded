"""What one host thread calls to issue a step to CUDA streams: kernels, copies, and what orders streams.

Calls are counted as the executor ``cuda`` makes them, instruction by instruction, once its buffers are there::

    wait a by gpu:0.compute     1 wait
    copy a_gpu_1 <- a           2 switches: to its streams on both devices; 1 copy
    record a_gpu_1              1 record; none if nothing was issued to the lane since its last one
    collective w_grad, v_grad   one call of reductions side by side: each participant's tensors are packed; of each pair
                                a copy of a pack, and an addition; for each, a division, and memory of the compute
                                stream for the lane: 2 switches, 1 record, 1 wait
    run sgd w, run sgd v        one call of updates that follow each other

Before a step, its streams come after the caller's, and after it the caller's come after them (:data:`Issuing.step`).
Each logical device is taken to be a card of its own, and the host to be none: what runs there is executed by the thread
that issues. Not counted is what a library does inside of a call, as torch's copies between cards do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import add
from typing import Final, NamedTuple

from ..ir.blob import STATE_ROLES
from ..ir.device import Device
from ..ir.net import Net
from ..ir.operator import Operator, bind_arg, leaves
from ..ir.optypes.sized import SizedOperator
from ..ir.optypes.table import operator_type
from ..ir.plan import Event, Instruction, Plan, issued_as, lane, lane_device
from ..ir.size import Dims, Polynomial
from .formulas.launches import LAUNCHES, ONE, Launches
from .joint import Held, are_alike, are_incomplete, grouped, joins
from .scratch import is_called
from .views import uncalled_views

__all__ = ["CROSSING", "Calls", "Issuing", "around", "calls_of", "issuing"]


class Calls(NamedTuple):
    """How often a host thread calls what, to issue something.

    Attributes:
        kernels: operators of torch's that launch one.
        copies: asynchronous copies, within a device too.
        records: of events.
        waits: of streams for events.
        switches: of the current stream.
        views: operators that make views, and launch nothing.
        replays: of CUDA graphs.
    """

    kernels: int = 0
    copies: int = 0
    records: int = 0
    waits: int = 0
    switches: int = 0
    views: int = 0
    replays: int = 0

    def plus(self, other: Calls) -> Calls:
        """Both."""
        return Calls(*map(add, self, other))


class Issuing(NamedTuple):
    """What is called to issue a step.

    Attributes:
        begin: before its first instruction.
        calls: by instruction.
        end: after its last one.
    """

    begin: Calls
    calls: Sequence[Calls]
    end: Calls

    @property
    def total(self) -> Calls:
        """Of the whole step."""
        return Calls(*map(sum, zip(self.begin, *self.calls, self.end, strict=True)))


def issuing(plan: Plan, dims: Dims, *, graph: bool = False) -> Issuing:
    """What the executor ``cuda`` calls to issue a step of *plan*, and where it replays a *graph*, around that."""
    found = _Issuer(plan, dims).run()
    return _around_graph(plan, found) if graph else found


def _around_graph(plan: Plan, issued: Issuing) -> Issuing:
    """What is called around a graph of one card: its inputs are copied to where it reads them, and what reads numbers
    of the host is issued behind it, to the same stream."""
    net, blobs = plan.step, plan.step.blobs
    calls = [_NOTHING] * len(issued.calls)
    read: set[str] = set()
    for position, instruction in enumerate(plan.instructions):
        if instruction.op < 0:
            continue
        op = net.ops[instruction.op]
        used = (*op.inputs, *op.outputs)
        if operator_type(op.type).joined or any(blobs[name].device.is_host for name in used):
            calls[position] = issued.calls[position]._replace(switches=0)
        else:
            read.update(op.inputs)
    given = [name for name in net.external_inputs if blobs[name].role not in STATE_ROLES and name in read]
    begin = Calls(records=1, waits=1, switches=1, copies=len(given), replays=1)
    return Issuing(begin, calls, Calls(records=1, waits=1))


def _launches(op: Operator, net: Net, dims: Dims) -> Launches:
    """How many kernels an operator that is no view launches."""
    formula = LAUNCHES.get(op.type)
    return ONE if formula is None else formula(SizedOperator(op, net.blobs, dims, 1))


_NOTHING: Final = Calls()
_KERNEL: Final = Calls(kernels=1)
_SWITCHED: Final = Calls(kernels=1, switches=1)
_RECORD: Final = Calls(records=1)
_TAKEN: Final = Calls(records=1, waits=1, switches=2)
"""Memory of the compute stream is taken for another lane."""


CROSSING: Final = Calls(copies=1, records=2, waits=2, switches=3)
"""What a copy to another card takes, with the events before and behind it."""


def around(cards: int, streams: int) -> tuple[Calls, Calls]:
    """What is called before and after a step: its streams come after the caller's of each card, and then these after
    them, by way of one more stream."""
    waits = cards + streams
    return Calls(records=cards + 1, waits=waits), Calls(records=streams + 1, waits=waits)


def calls_of(op: Operator, net: Net, dims: Dims) -> Calls:
    """What is called to issue all of an operator that is no copy, wherever it stands in a plan: without the events that
    order it. Of a reduction each participant's tensor is on another card; of updates made in one call, what is called
    once counts nothing; and transposed matrices, most of which are left out, count nothing."""
    if issued_as(op) == "collective":
        count, brought = len(op.outputs), len(op.inputs) - 1
        one = Calls(kernels=_added(op, dims), copies=1 + brought, switches=brought + 1).plus(_TAKEN)
        return Calls(*[count * number for number in one])
    if op.outputs and not is_called(op):
        return _NOTHING if op.type == "aten.t.default" else Calls(views=1)
    return Calls(kernels=_launches(op, net, dims).each)


class _Issuer:
    """One sweep over a plan's instructions.

    Attributes:
        current: by device, the lane or companion whose stream is current; and the last one that was switched to.
        latest: for each lane, the newest record behind all that was issued to it.
        pending: for each lane of the host, the records that whoever waits for it waits for.
        updates: held back, to be made in one call: their positions and operators.
        reductions: the parts of those held back, to be made in one call.
        behind: records that come behind these.
    """

    def __init__(self, plan: Plan, dims: Dims) -> None:
        self.plan, self.net, self.dims = plan, plan.step, dims
        blobs = self.net.blobs
        self.state = {name for name in self.net.external_inputs if blobs[name].role in STATE_ROLES}
        self.calls: list[Calls] = [_NOTHING] * len(plan.instructions)
        self.uncalled = uncalled_views(plan, dict.fromkeys(plan.lanes, 0), ())
        self.kept = {(name, 0) for name in self.state}
        self.on_host = {name: lane_device(name).startswith("cpu") for name in plan.lanes}
        self.device_of = {name: Device.parse(lane_device(name)) for name in plan.lanes}
        cards = [device for device in plan.devices if not device.is_host]
        self.cards = len(cards)
        self.streams = {(lane(device, "compute"), device) for device in cards}
        self.streams |= {(name, self.device_of[name]) for name in plan.lanes if not self.on_host[name]}
        self.current: dict[Device, str] = {}
        self.newest: Device | None = None
        self.latest: set[str] = set()
        self.pending: dict[str, set[str]] = {}
        self.recorded: dict[Event, int | set[str]] = {}
        self.received: set[object] = set()
        self.updates: list[tuple[int, Operator]] = []
        self.updated: set[str] = set()
        self.reductions: list[Held] = []
        self.reduced: set[str] = set()
        self.behind: list[int] = []

    def run(self) -> Issuing:
        for position, instruction in enumerate(self.plan.instructions):
            kind, at = instruction.kind, instruction.lane
            if kind not in ("record", "free"):
                self.latest.discard(at)
            if kind == "collective":
                self.hold_reduction(position, self.net.ops[instruction.op], instruction.part)
                continue
            if kind in ("record", "wait") and are_incomplete(self.reductions):
                if kind == "record":
                    self.behind.append(position)
                    continue
                if instruction.event not in [self.plan.instructions[record].event for record in self.behind]:
                    self.wait(position, instruction)
                    continue
            if self.reductions:
                self.flush()
            if kind == "record":
                if self.record(position, instruction):
                    self.flush()
            elif kind == "wait":
                self.wait(position, instruction)
            elif kind != "free":
                op = self.net.ops[instruction.op]
                if kind == "run" and operator_type(op.type).joined:
                    self.hold(position, op)
                    continue
                self.flush()
                if kind == "copy":
                    self.copy(position, at, op)
                else:
                    self.calls[position] = self.called(op)
        self.flush()
        begin, end = around(self.cards, len(self.streams))
        return Issuing(begin, self.calls, end)

    def switch(self, name: str, device: Device) -> int:
        """Make the stream of a lane on a device current; how many calls that takes."""
        self.streams.add((name, device))
        if self.newest == device and self.current.get(device) == name:
            return 0
        self.current[device], self.newest = name, device
        return 1

    def record(self, position: int, instruction: Instruction) -> bool:
        """Whether a record is a call of its own."""
        at = instruction.lane
        assert instruction.event is not None
        if self.on_host[at]:
            self.recorded[instruction.event] = set(self.pending.get(at, ()))
            return False
        self.recorded[instruction.event] = 1
        if at in self.latest:
            return False
        self.latest.add(at)
        self.calls[position] = _RECORD
        return True

    def wait(self, position: int, instruction: Instruction) -> None:
        at, event = instruction.lane, instruction.event
        assert event is not None
        found = self.recorded[event]
        if self.on_host[at]:
            self.pending.setdefault(at, set()).update({event.lane} if isinstance(found, int) else found)
        else:
            self.calls[position] = Calls(waits=found if isinstance(found, int) else len(found - {at}))

    def hold(self, position: int, op: Operator) -> None:
        """Hold an update back, with others that are made in the same call."""
        if self.updates and not joins(op, self.updates[0][1], self.net, self.updated):
            self.flush()
        self.updates.append((position, op))
        self.updated.update([self.net.blobs[name].storage for name in op.outputs])

    def hold_reduction(self, position: int, op: Operator, part: int) -> None:
        """Hold back a part of a reduction among cards, with others that are made in the same call."""
        blobs = self.net.blobs
        on_cards = not any(blobs[name].device.is_host for name in (*op.inputs, *op.outputs))
        if not on_cards or len(op.inputs) != len(op.outputs):
            self.flush()
            self.collective(position, self.plan.instructions[position], op)
            return
        unlike = self.reductions and not are_alike(op, self.reductions[0][1], self.state)
        if self.updates or unlike or not self.reduced.isdisjoint(op.inputs):
            self.flush()
        self.reductions.append((position, op, part))
        self.reduced.update(op.outputs)

    def reduce(self) -> None:
        """Issue the reductions that are held back, and the records behind them."""
        held, self.reductions = self.reductions, []
        self.reduced.clear()
        apart, groups = grouped(held, self.net, self.state)
        for position, op in apart:
            self.collective(position, self.plan.instructions[position], op)
        for group in groups:
            self.reduce_jointly(group[0][0], group[0][1], len(group))
            self.current.clear()
        behind, self.behind = self.behind, []
        for position in behind:
            self.record(position, self.plan.instructions[position])

    def reduce_jointly(self, position: int, op: Operator, tensors: int) -> None:
        """One call for so many reductions like *op*: each participant's tensors are packed, and packs cross."""
        devices = [self.net.blobs[name].device for name in op.outputs]
        count, weighted = len(devices), _weighted(op, self.dims)
        lanes = [lane(device, "copy_in") for device in devices]
        order = [*range(1, count), 0]
        switches = sum([self.switch(lanes[i], devices[i]) for i in order])
        visited = [*(devices if tensors > 1 else ()), *devices]
        switches += sum([here != before for before, here in pairwise([devices[0], *visited])])
        packed = count if tensors > 1 else 0
        kernels = count * (count + (count if weighted else 0)) - (count - 1) + packed
        kernels += count if op.args.get("reduction") == "mean" else 0
        found = Calls(kernels=kernels, copies=count * (count - 1), switches=switches)
        for _ in devices:
            found = found.plus(_TAKEN)
        self.calls[position] = found

    def flush(self) -> None:
        """Issue what is held back: reductions, then updates."""
        if self.reductions:
            self.reduce()
        if not self.updates:
            return
        first, op = self.updates[0]
        if not op.device.is_host:
            once = 0
            for position, update in self.updates:
                each, once = _launches(update, self.net, self.dims)
                self.calls[position] = Calls(kernels=each)
            switches = self.switch(lane(op.device, "compute"), op.device)
            self.calls[first] = self.calls[first].plus(Calls(kernels=once, switches=switches))
        self.updates = []
        self.updated = set()

    def called(self, op: Operator) -> Calls:
        """The calls of an operator that is neither update nor copy."""
        effects = op.effects
        if effects.views and len(effects.views) == len(op.outputs) and not effects.writes:
            if self.needs_no_call(op):
                return _NOTHING
            found = Calls(views=1)
        else:
            each = _launches(op, self.net, self.dims).each
            found = _KERNEL if each == 1 else Calls(kernels=each)
        if op.device.is_host:
            return _NOTHING
        stored = 0
        if not self.state.isdisjoint(op.outputs):
            overwritten = {output for output, _ in effects.writes}
            stored = sum(name in self.state and i not in overwritten for i, name in enumerate(op.outputs))
        switches = self.switch(lane(op.device, "compute"), op.device)
        if found is _KERNEL and switches and not stored:
            return _SWITCHED
        return found._replace(copies=stored, switches=switches) if stored or switches else found

    def needs_no_call(self, op: Operator) -> bool:
        """Whether views are left out, or are those of state, which are taken once."""
        same, unread, _ = self.uncalled
        makes = list(op.makes)
        if all(made in same or made in unread for made in makes):
            return True
        sized = any(isinstance(leaf, Polynomial) for arg in op.args.values() for leaf in leaves(arg))
        if sized or not op.inputs or not self.kept.issuperset(op.reads):
            return False
        self.kept.update(makes)
        return True

    def copy(self, position: int, at: str, op: Operator) -> None:
        blobs, made = self.net.blobs, op.outputs[0]
        source, target = blobs[op.inputs[0]], blobs[made]
        if source.device.is_host and target.device.is_host:
            return
        switches = self.switched(at, (source.device, target.device))
        found = Calls(copies=1, switches=switches)
        if made not in self.state:
            if op.received == "fresh" and not target.device.is_host:
                found = found.plus(_TAKEN)
            else:
                self.received.add(self.buffer(made))
        if target.device.is_host or self.in_buffer(op.inputs[0]):
            found = found.plus(_RECORD)
        self.calls[position] = found

    def switched(self, at: str, devices: Sequence[Device]) -> int:
        """Make a lane's streams on some devices current, its own the last."""
        own = self.device_of[at]
        beside = [device for device in dict.fromkeys(devices) if not device.is_host and device != own]
        return sum([self.switch(at, device) for device in (*beside, *([] if self.on_host[at] else [own]))])

    def buffer(self, name: str) -> object:
        """What a copy receives into."""
        blob = self.net.blobs[name]
        return blob.device, self.plan.buffers.get(blob.storage, blob.storage)

    def in_buffer(self, name: str) -> bool:
        """Whether streams copy from a buffer of the host, which must not be overwritten meanwhile."""
        return self.net.blobs[name].device.is_host and self.buffer(name) in self.received

    def collective(self, position: int, instruction: Instruction, op: Operator) -> None:
        blobs, at = self.net.blobs, instruction.lane
        made = op.outputs[instruction.part]
        device = blobs[made].device
        places = [blobs[name].device for name in op.inputs]
        switches = waits = 0
        if not all(place.is_host for place in (device, *places)):
            switches = self.switched(at, places)
            if self.on_host[at]:
                waits = len(self.pending.get(at, ())) * len({place for place in places if not place.is_host})
        brought = sum([place != device for place in places])
        found = Calls(copies=brought, switches=switches, waits=waits)
        if not device.is_host:
            own = (places[0] == device) + (made in self.state)
            found = found.plus(_TAKEN).plus(Calls(kernels=_added(op, self.dims), copies=own))
            if any(self.in_buffer(name) for name in op.inputs):
                found = found.plus(_RECORD)
        self.calls[position] = found


def _added(op: Operator, dims: Dims) -> int:
    """How many kernels one participant's part of a reduction launches, beside copies."""
    count = len(op.inputs)
    found = count - 1
    if op.args.get("reduction") == "mean":
        found += 1 + (count if _weighted(op, dims) else 0)
    return found


def _weighted(op: Operator, dims: Dims) -> bool:
    """Whether a mean weighs its participants, whose shares are unlike."""
    shares: object = bind_arg(op.args.get("shares", ()), dims)
    return op.args.get("reduction") == "mean" and isinstance(shares, tuple) and len(set(shares)) > 1
