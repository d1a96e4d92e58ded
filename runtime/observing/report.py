"""What the measured steps of a session took, against what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from graphir.analysis.estimate import Estimate
from graphir.analysis.memory import Memory
from graphir.analysis.overlap import Overlap, flows, overlap_of
from graphir.analysis.tables import cut, seconds_text, table
from graphir.errors import counted
from graphir.ir.device import Device
from graphir.ir.plan import Plan
from graphir.ir.text import nbytes_text

from ..executor import Held
from .measurement import Measurement, Timed

__all__ = ["AllocatorUse", "CopyUse", "DeviceBytes", "LaneTime", "OperatorTime", "Report", "report"]

_MACHINE: Final = 44
_MOST_PRINTED: Final = 10


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class LaneTime(_Entry):
    """Seconds of a lane in a mean step.

    Attributes:
        lane: its name.
        busy: executing operators, copies, parts of collectives and frees.
        waiting: for the events of other lanes.
        idle: the rest of the step, as when it has nothing to do, or its thread is busy with another of its lanes.
        predicted: the busy seconds that :func:`graphir.estimate` says; None where the speed of the devices is unknown.
    """

    lane: str
    busy: float
    waiting: float
    idle: float
    predicted: float | None = None


class DeviceBytes(_Entry):
    """Bytes of a device.

    Attributes:
        device: the logical one.
        place: the real one.
        state: of parameters, buffers, optimizer state and constants.
        peak: the most at once, state and arguments included.
        predicted_state: what :func:`graphir.memory` says of the plan at the step's sizes.
        predicted_peak: likewise.
    """

    device: str
    place: str
    state: int
    peak: int
    predicted_state: int
    predicted_peak: int


class AllocatorUse(_Entry):
    """What PyTorch's allocator says of a real device, whoever else uses it.

    Attributes:
        place: the real device.
        devices: the logical ones that are bound to it.
        predicted_peak: the most that the plan holds there at once, as :func:`graphir.memory` says.
        received: bytes of the buffers for incoming copies, which are kept from step to step.
        allocated: bytes in tensors now.
        allocated_peak: the most so far; ``torch.cuda.reset_peak_memory_stats`` begins anew.
        reserved_peak: the most that it has taken from the device so far.
        shortages: how often it had none left.
    """

    place: str
    devices: tuple[str, ...]
    predicted_peak: int
    received: int
    allocated: int
    allocated_peak: int
    reserved_peak: int
    shortages: int


class CopyUse(_Entry):
    """The copies from one device to another in a mean step.

    Attributes:
        source: the device that they read.
        destination: the device that they write.
        copies: how many there are.
        nbytes: what they move.
        seconds: what they take, one after the other.
        bytes_per_second: the bandwidth that follows.
    """

    source: str
    destination: str
    copies: int
    nbytes: float
    seconds: float
    bytes_per_second: float


class OperatorTime(_Entry):
    """The operators of one type in a module, in a mean step.

    Updates that are made in one call stand with the module of the first.
    """

    module: str
    type: str
    calls: int
    seconds: float


class Report(_Entry):
    """What measured steps took. Prints as a table.

    Attributes:
        name: of the plan.
        executor: what executed it.
        reason: why this one.
        steps: how many steps the times are the mean of.
        seconds: of a step, from the beginning of its first instruction to the end of its last one.
        predicted: the same, as :func:`graphir.estimate` says; None where the speed of the devices is unknown.
        machine: of which that is predicted, with whence its figures are; empty without a prediction.
        measured: the date of these figures.
        overlap: which micro-batch each device worked on in the last of them, and when; None where the step has one, or
            one device.
        lanes: in the plan's order.
        devices: in the plan's order; bytes of the first measured step.
        allocators: of the CUDA devices.
        copies: by their devices.
        operators: slowest first.
    """

    name: str
    executor: str
    reason: str
    steps: int
    seconds: float
    lanes: tuple[LaneTime, ...]
    devices: tuple[DeviceBytes, ...]
    allocators: tuple[AllocatorUse, ...]
    copies: tuple[CopyUse, ...]
    operators: tuple[OperatorTime, ...]
    predicted: float | None = None
    machine: str = ""
    measured: str = ""
    overlap: Overlap | None = None

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return self.model_dump_json()

    def __str__(self) -> str:
        lines = [f"report of {self.name!r}: {seconds_text(self.seconds)} a step, mean of {counted(self.steps, 'step')}"]
        lines.append(f"  executor {self.executor}: {self.reason}")
        if self.predicted is not None:
            share = f", {self.predicted / self.seconds:.0%}" if self.seconds else ""
            lines.append(f"  predicted on {cut(self.machine, _MACHINE)}: {seconds_text(self.predicted)} a step{share}")
        lines += self._lanes()
        if self.overlap is not None:
            lines += self.overlap.lines("  micro-batches")
        lines += table(
            ("device", "on", "state", "predicted", "peak", "predicted"),
            [
                (d.device, d.place, *map(nbytes_text, (d.state, d.predicted_state, d.peak, d.predicted_peak)))
                for d in self.devices
            ],
        )
        allocators = []
        for a in self.allocators:
            sizes = a.predicted_peak, a.received, a.allocated, a.allocated_peak, a.reserved_peak
            allocators.append((a.place, *map(nbytes_text, sizes), str(a.shortages)))
        lines += table(("allocator", "predicted", "buffers", "allocated", "peak", "reserved", "shortages"), allocators)
        copies = []
        for c in self.copies:
            nbytes, rate = nbytes_text(round(c.nbytes)), f"{nbytes_text(round(c.bytes_per_second))}/s"
            copies.append((f"{c.source} -> {c.destination}", str(c.copies), nbytes, seconds_text(c.seconds), rate))
        lines += table(("copies", "number", "bytes", "time", "bandwidth"), copies)
        shown = self.operators[:_MOST_PRINTED]
        slowest = [(o.module or "-", o.type, str(o.calls), seconds_text(o.seconds)) for o in shown]
        lines += table(("module", "operator", "calls", "time"), slowest, left=2)
        if len(self.operators) > len(shown):
            lines.append(f"  and {len(self.operators) - len(shown)} more")
        return "\n".join(lines)

    def _lanes(self) -> list[str]:
        """The table of lanes, with the prediction where there is one."""
        head = ("lane", "busy", "predicted", "waiting", "idle")
        rows = [
            (t.lane, *("-" if s is None else seconds_text(s) for s in (t.busy, t.predicted, t.waiting, t.idle)))
            for t in self.lanes
        ]
        if self.predicted is not None:
            return table(head, rows)
        return table((*head[:2], *head[3:]), [(*row[:2], *row[3:]) for row in rows])


def report(
    measurement: Measurement,
    binding: Mapping[Device, torch.device],
    executor: str,
    reason: str,
    held: Mapping[Device, Held],
    predicted: Estimate | None = None,
) -> Report:
    """The report of what was measured.

    Args:
        measurement: of at least one step.
        binding: the real device of each logical one.
        executor: what executed the steps.
        reason: why this one.
        held: what the executor says that its devices hold; nothing on the host.
        predicted: what the step was predicted to take, if anybody knows how fast the devices are.
    """
    plan, timed = measurement.setting.plan, measurement.timed
    memory = measurement.buffers.predicted(plan, measurement.dims)
    return Report(
        name=plan.name,
        executor=executor,
        reason=reason,
        steps=timed.steps,
        seconds=timed.seconds / timed.steps,
        lanes=tuple(_lanes(plan, timed, predicted)),
        devices=tuple(_devices(measurement, memory, binding)),
        allocators=tuple(_allocators(memory, held)),
        copies=tuple(_copies(plan, timed)),
        operators=tuple(_operators(plan, timed)),
        predicted=None if predicted is None else predicted.seconds,
        machine="" if predicted is None else predicted.machine,
        measured="" if predicted is None else predicted.measured,
        overlap=overlap_of(plan, timed.intervals) if flows(plan) else None,
    )


def _lanes(plan: Plan, timed: Timed, predicted: Estimate | None) -> list[LaneTime]:
    expected = {} if predicted is None else {use.lane: use.busy for use in predicted.lanes}
    busy = dict.fromkeys(plan.lanes, 0.0)
    waiting = dict.fromkeys(plan.lanes, 0.0)
    for position, seconds in timed.totals.items():
        instruction = plan.instructions[position]
        spent = waiting if instruction.kind == "wait" else busy
        spent[instruction.lane] += seconds / timed.steps
    step = timed.seconds / timed.steps
    return [
        LaneTime(
            lane=lane,
            busy=busy[lane],
            waiting=waiting[lane],
            idle=max(step - busy[lane] - waiting[lane], 0.0),
            predicted=expected.get(lane),
        )
        for lane in plan.lanes
    ]


def _devices(measurement: Measurement, predicted: Memory, binding: Mapping[Device, torch.device]) -> list[DeviceBytes]:
    plan, ledger = measurement.setting.plan, measurement.ledger
    assert ledger is not None
    return [
        DeviceBytes(
            device=device,
            place=str(binding[device]),
            state=ledger.state[device],
            peak=ledger.peak[device],
            predicted_state=predicted.state.get(device, 0),
            predicted_peak=predicted.peak_of_storages(device),
        )
        for device in plan.devices
    ]


def _allocators(predicted: Memory, held: Mapping[Device, Held]) -> Iterator[AllocatorUse]:
    for place in dict.fromkeys(one.place for one in held.values() if one.allocator):
        there = [device for device, one in held.items() if one.place == place]
        figures = held[there[0]].allocator
        yield AllocatorUse(
            place=str(place),
            devices=tuple(there),
            predicted_peak=int(np.sum([predicted.timeline(device) for device in there], axis=0).max()),
            received=sum(held[device].received for device in there),
            allocated=figures["allocated_bytes.all.current"],
            allocated_peak=figures["allocated_bytes.all.peak"],
            reserved_peak=figures["reserved_bytes.all.peak"],
            shortages=figures["num_ooms"],
        )


def _copies(plan: Plan, timed: Timed) -> list[CopyUse]:
    found: dict[tuple[str, str], list[int]] = {}
    for position in timed.copied:
        op = plan.step.ops[plan.instructions[position].op]
        link = plan.step.blobs[op.inputs[0]].device, plan.step.blobs[op.outputs[0]].device
        found.setdefault(link, []).append(position)
    uses = []
    for (source, destination), positions in sorted(found.items()):
        nbytes = sum(timed.copied[position] for position in positions) / timed.steps
        seconds = sum(timed.totals.get(position, 0.0) for position in positions) / timed.steps
        uses.append(
            CopyUse(
                source=source,
                destination=destination,
                copies=len(positions),
                nbytes=nbytes,
                seconds=seconds,
                bytes_per_second=nbytes / seconds if seconds else 0.0,
            )
        )
    return uses


def _operators(plan: Plan, timed: Timed) -> list[OperatorTime]:
    found: dict[tuple[str, str], list[float]] = {}
    for position, seconds in timed.totals.items():
        instruction = plan.instructions[position]
        if instruction.op >= 0:
            op = plan.step.ops[instruction.op]
            found.setdefault((op.module, op.type), []).append(seconds / timed.steps)
    times = [
        OperatorTime(module=module, type=type, calls=len(seconds), seconds=sum(seconds))
        for (module, type), seconds in found.items()
    ]
    return sorted(times, key=lambda time: -time.seconds)
