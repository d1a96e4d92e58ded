"""What steps took: seconds of each instruction, and the bytes that each device held.

Counting bytes takes time of its own, so the first step that is measured counts them, and those after it are timed;
where there is only one, it does both. That first step also is the one that pays for what is made on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from graphir.analysis.schedule import Interval
from graphir.ir.blob import dense_nbytes
from graphir.ir.device import Device
from graphir.ir.plan import Plan
from graphir.ir.size import Dims

from ..executor import Feedable, Kept, Setting
from .probes import Clock, Probe

__all__ = ["Ledger", "Measurement", "Timed", "Timer"]

_NUMBER_BYTES = 8
"""Of a learning rate, which is handed over as a number."""


class Timer:
    """A probe that notes when each instruction begins and ends.

    Args:
        plan: what is executed.
        clock: of the executor.
    """

    def __init__(self, plan: Plan, clock: Clock) -> None:
        self.lanes = [instruction.lane for instruction in plan.instructions]
        self.clock = clock
        self.begun: list[Any] = [None] * len(self.lanes)
        self.ended: list[Any] = [None] * len(self.lanes)

    def begin(self, position: int) -> None:
        """See :class:`.probes.Probe`."""
        self.begun[position] = self.clock.mark(self.lanes[position])

    def end(self, position: int, reads: Sequence[Feedable], makes: Sequence[Tensor]) -> None:
        """See :class:`.probes.Probe`."""
        self.ended[position] = self.clock.mark(self.lanes[position])

    def intervals(self) -> dict[int, Interval]:
        """By position in the plan, for what was executed; once the step is finished."""
        positions = [position for position, mark in enumerate(self.ended) if mark is not None]
        seconds = self.clock.seconds([marks[position] for position in positions for marks in (self.begun, self.ended)])
        zero = min(seconds, default=0.0)
        pairs = zip(seconds[::2], seconds[1::2], strict=True)
        return {p: Interval(start - zero, end - zero) for p, (start, end) in zip(positions, pairs, strict=True)}


class Ledger:
    """A probe that counts the bytes of the storages that are alive on each device, as the step's tensors show them.

    State and arguments count too, from the beginning to the end, and so do the receive buffers that are kept, with the
    bytes that they have when the step is finished: a buffer gives no memory back before it is filled again. What a
    kernel allocates for itself while it runs does not.

    Args:
        setting: what is executed.
        given: the step's inputs by blob.
        received: the storages that lie in receive buffers.

    Attributes:
        state: by device, the bytes of state.
        live: those of everything that is alive.
        peak: the most that there were.
    """

    def __init__(self, setting: Setting, given: Mapping[str, Feedable], received: Collection[str] = ()) -> None:
        self.plan, self.blobs, self.received = setting.plan, setting.plan.step.blobs, received
        self.lock = threading.Lock()
        self.known: dict[int, StorageWeakRef] = {}
        self.made: dict[str, list[tuple[int, int]]] = {}
        self.late: dict[Device, list[tuple[int, int]]] = {device: [] for device in self.plan.devices}
        self.state: dict[Device, int] = dict.fromkeys(self.plan.devices, 0)
        for name, tensor in setting.state.items():
            self.state[self.blobs[name].device] += self.note(tensor)[1]
        self.live = dict(self.state)
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.note(value)
            # A share is a view of the whole batch: what counts is the share.
            self.live[self.blobs[name].device] += value.nbytes if isinstance(value, Tensor) else _NUMBER_BYTES
        self.peak = dict(self.live)

    def note(self, tensor: Tensor) -> tuple[int, int]:
        """A storage's key and its bytes, 0 where it was noted before."""
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        if ref.cdata in self.known:
            return ref.cdata, 0
        self.known[ref.cdata] = ref
        return ref.cdata, storage.nbytes()

    def begin(self, position: int) -> None:
        """See :class:`.probes.Probe`."""

    def end(self, position: int, reads: Sequence[Feedable], makes: Sequence[Tensor]) -> None:
        """See :class:`.probes.Probe`."""
        instruction = self.plan.instructions[position]
        names = () if instruction.op < 0 else instruction.makes(self.plan.step.ops[instruction.op].outputs)
        in_buffer = instruction.kind == "copy" and names[0] in self.received
        with self.lock:
            if instruction.kind == "free":
                self.drop(instruction.storage)
            for name, tensor in zip(names, makes, strict=True):
                key, nbytes = self.note(tensor)
                if nbytes and not in_buffer:
                    device = self.blobs[name].device
                    self.made.setdefault(self.blobs[name].storage, []).append((key, nbytes))
                    self.live[device] += nbytes
                    self.peak[device] = max(self.peak[device], self.live[device])

    def keep(self, nbytes: Mapping[Device, int]) -> None:
        """Add what is there throughout, by device."""
        for device, kept in nbytes.items():
            self.live[device] += kept
            self.peak[device] += kept

    def drop(self, storage: str) -> None:
        """Subtract the bytes of a freed storage that are alive no longer, and those of storages freed before that
        something still held then."""
        device = self.blobs[storage].device
        freed = [*self.made.pop(storage, ()), *self.late[device]]
        self.late[device] = []
        for key, nbytes in freed:
            if self.known[key].expired():
                del self.known[key]
                self.live[device] -= nbytes
            else:
                self.late[device].append((key, nbytes))


@dataclass
class Timed:
    """The times of some steps.

    Attributes:
        steps: how many.
        seconds: what they took together, from the first instruction's beginning to the last one's end.
        intervals: of the last one, by position in the plan.
        totals: the seconds of each instruction in all of them.
        copied: by position of a copy, the bytes that all of them moved.
    """

    steps: int = 0
    seconds: float = 0.0
    intervals: Mapping[int, Interval] = field(default_factory=dict)
    totals: dict[int, float] = field(default_factory=dict)
    copied: dict[int, int] = field(default_factory=dict)


class Measurement:
    """See :mod:`graphir.runtime.observing.measurement`.

    Args:
        setting: what is executed.
        clock: of the executor.
        kept: says what receive buffers the executor keeps.

    Attributes:
        ledger: of the first step that was finished; None before.
        dims: the sizes of that step.
        buffers: what was kept after it.
        timed: the times of the steps after it, or its own.
        last_dims: the sizes of the last step.
    """

    def __init__(self, setting: Setting, clock: Clock, kept: Callable[[], Kept] = Kept) -> None:
        self.setting, self.clock, self.kept = setting, clock, kept
        self.buffers = Kept()
        self.steps, self.timed = 0, Timed()
        self.ledger: Ledger | None = None
        self.dims: Dims = {}
        self.last_dims: Dims = {}
        self.copies = [i for i, instruction in enumerate(setting.plan.instructions) if instruction.kind == "copy"]
        self.current: tuple[Dims, Timer, Ledger | None] | None = None

    def start(self, dims: Dims, given: Mapping[str, Feedable]) -> list[Probe]:
        """The probes for a step, outermost first."""
        timer = Timer(self.setting.plan, self.clock)
        ledger = Ledger(self.setting, given, self.kept().buffers) if self.ledger is None else None
        self.current = dict(dims), timer, ledger
        return [timer] if ledger is None else [ledger, timer]

    def finish(self) -> None:
        """Take what the probes of the step have found."""
        assert self.current is not None
        dims, timer, ledger = self.current
        if ledger is not None:
            self.ledger, self.dims, self.buffers = ledger, dims, self.kept()
            ledger.keep(self.buffers.nbytes)
        elif self.steps == 1:
            self.timed = Timed()
        self.steps += 1
        self.last_dims = dims
        self.add(timer.intervals(), dims)
        self.current = None

    def add(self, intervals: Mapping[int, Interval], dims: Dims) -> None:
        """Add the times of a step."""
        timed, plan = self.timed, self.setting.plan
        timed.steps += 1
        timed.intervals = intervals
        timed.seconds += max((interval.end for interval in intervals.values()), default=0.0)
        for position, interval in intervals.items():
            timed.totals[position] = timed.totals.get(position, 0.0) + interval.seconds
        for position in self.copies:
            made = plan.step.blobs[plan.step.ops[plan.instructions[position].op].outputs[0]]
            timed.copied[position] = timed.copied.get(position, 0) + dense_nbytes(made, dims)
