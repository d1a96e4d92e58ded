"""What devices are reckoned to hold where modules are cut and what some save is stored otherwise: byte for byte what
:func:`graphir.memory` says of one device, and a guess of several and of what is recomputed, good enough to say which
plans are worth emitting.

::

    live     ▁▃▅▇▇▅▃▁        by operator, all that is kept
    gaps       ▃▅▅▃          of what is freed in the forward and there again in the backward
    held     ▁▃▂▂▂▂▃▁        the difference; its largest value, with state, is a device's peak
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphir.ir.device import Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batch_of
from graphir.ir.touches import Flags, Numbers

from ..trips import Clock, Trip, toll, two_at_a_time
from .outcome import buffers
from .reductions import collective, lives
from .step import Step

__all__ = ["Gaps", "Holding", "Placed", "joined"]


class Gaps(NamedTuple):
    """When storages are not there: from the operator *start* to the one before *end*."""

    storage: Numbers
    start: Numbers
    end: Numbers


def joined(gaps: Sequence[Gaps]) -> Gaps:
    """Several gaps as one, in their order."""
    none = np.zeros(0, np.int64)
    storage, start, end = [np.concatenate(column) for column in zip(*gaps, strict=True)] or [none] * 3
    return Gaps(storage, start, end)


class Placed(NamedTuple):
    """What devices hold that have parts of a model.

    Attributes:
        at: by operator, the number of its device.
        part: by operator, its part of the model, of which one comes after the other.
        home: by storage, the number of its device.
        until: by storage, the operator before which its device frees it.
        state: by device, bytes of state.
        live: by device and operator, bytes of all else, where everything is kept.
        crossing: by replica and pair of devices, bytes that go from the first to the second.
        copies: how many copies bring them.
    """

    at: Numbers
    part: Numbers
    home: Numbers
    until: Numbers
    state: Numbers
    live: NDArray[np.int64]
    crossing: NDArray[np.int64]
    copies: int = 0

    @property
    def peaks(self) -> Numbers:
        """By device, the most bytes."""
        found: Numbers = self.state + self.live.max(1)
        return found


class Holding:
    """What devices hold that have the parts of a step.

    Args:
        step: as columns.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.count = step, len(step.net.ops)
        self.clocks: dict[tuple[int, bytes], Clock] = {}
        self.early = step.last(step.forward[step.op])
        blobs = step.net.blobs
        self.on_gpu = np.array([not blobs[name].device.is_host for name in step.names], np.bool_)

    @cached_property
    def modules(self) -> tuple[list[str], Numbers]:
        """The modules of operators, and by operator the number of its own; a reduction has that of what it reduces,
        and what else has none goes with the operator before."""
        numbers: dict[str, int] = {}
        found: list[int] = []
        step, last = self.step, ""
        for i, op in enumerate(step.net.ops):
            made = step.makers[step.read(i)[0]] if op.phase == "reduce" and op.inputs else -1
            last = (step.net.ops[made].module if made >= 0 else op.module) or last
            found.append(numbers.setdefault(last, len(numbers)))
        return list(numbers), np.array(found or [0], np.int64)

    @cached_property
    def replicas(self) -> tuple[int, Numbers, Numbers]:
        """How many gpus the step is on, a replica on each; the number of each operator's, and of each storage's. What
        is on the host counts as of the first."""
        step, blobs = self.step, self.step.net.blobs
        gpus = [device for device in step.devices if not device.is_host]
        numbers = {device: number for number, device in enumerate(gpus)}
        of_device = np.array([numbers.get(device, 0) for device in step.devices] or [0], np.int64)
        of_storage = [numbers.get(blobs[name].device, 0) for name in step.names]
        return max(len(gpus), 1), of_device[step.at], np.array(of_storage, np.int64)

    @cached_property
    def collective(self) -> Flags:
        """By operator, whether each device reads its own operand, and gets its own result."""
        return collective(self.step)

    def placed(self, part_of: Mapping[str, int], table: Sequence[Sequence[int]], devices: int) -> Placed:
        """What devices hold where everything is kept.

        Args:
            part_of: by module, its part; a module that it lacks is where the one is that it is in, or else the operator
                before, or in the first part.
            table: by part and replica, the number of the device.
            devices: how many there are.
        """
        step, known = self.step, dict[str, int]()

        def part(module: str) -> int:
            if module not in known:
                known[module] = next((part_of[path] for path in reversed(lineage(module)) if path in part_of), -1)
            return known[module]

        names, module_of = self.modules
        own = np.array([part(module) for module in names] or [0], np.int64)[module_of]
        own = np.maximum(own[np.maximum.accumulate(np.where(own >= 0, np.arange(len(own)), 0))], 0)
        _, of_op, of_storage = self.replicas
        places = np.array(table, np.int64)
        at = places[own[: len(of_op)], of_op]
        first = np.where(step.made >= 0, step.made, step.first(np.ones(len(step.op), np.bool_)))
        home = places[own[np.maximum(first, 0)], of_storage]
        state, sizes = np.zeros(devices, np.int64), step.nbytes
        for k, module in step.owners.items():
            home[k] = places[max(part(module), 0), of_storage[k]]
            state[home[k]] += sizes[k] * self.on_gpu[k]
        return self.summed(at, own[: len(of_op)], home, state, devices)

    def now(self, *, alike: bool) -> Placed:
        """What the devices of a step hold where it is; their numbers are those of :attr:`.Step.devices`.

        Args:
            alike: whether each has a replica; else each has a part.
        """
        step = self.step
        number = {device: i for i, device in enumerate(step.devices)}
        home = np.array([number.get(step.net.blobs[name].device, 0) for name in step.names], np.int64)
        state = np.zeros(len(step.devices), np.int64)
        np.add.at(state, home[step.is_state], step.nbytes[step.is_state])
        return self.summed(step.at, np.zeros_like(step.at) if alike else step.at, home, state, len(step.devices))

    def summed(self, at: Numbers, part: Numbers, home: Numbers, state: Numbers, devices: int) -> Placed:
        """What devices hold with what is where."""
        until = self.until(at, home)
        change = self.own(at, home, until, devices)
        crossing, copies = np.zeros((self.replicas[0], devices, devices), np.int64), 0
        if devices > 1:
            copies = self.cross(change, crossing, at, home)
        return Placed(at, part, home, until, state, change.cumsum(1)[:, : self.count], crossing, copies)

    def until(self, at: Numbers, home: Numbers) -> Numbers:
        """By storage, the operator before which its device frees it: one behind its last reader there, and behind the
        first elsewhere, which has a copy."""
        step, apart = self.step, self.apart(at, home)
        found = self.lives[1].copy()
        leaves = np.zeros(len(found), np.bool_)
        leaves[step.storage[apart]] = True
        leaves &= self.leaves
        here, away = np.full(len(found), -1, np.int64), np.full(len(found), self.count, np.int64)
        np.maximum.at(here, step.storage[~apart], step.op[~apart])
        np.minimum.at(away, step.storage[apart], step.op[apart])
        found[leaves] = np.maximum(here, away)[leaves] + 1
        return found

    @cached_property
    def lives(self) -> tuple[Numbers, Numbers]:
        """By storage, the operator at which it is there first, and the one before which it is freed, where everything
        is on the devices where it is."""
        return lives(self.step)

    @cached_property
    def leaves(self) -> Flags:
        """By storage, whether a device frees it that others read later: what is given to the step, or handed back,
        stays."""
        return (self.step.made >= 0) & ~self.step.lasting & ~self.step.is_state

    def own(self, at: Numbers, home: Numbers, until: Numbers, devices: int) -> NDArray[np.int64]:
        """By device and operator, by how many bytes what its own operators make and hold grows; without state."""
        step = self.step
        spans, change = step.spans, np.zeros((devices, self.count + 1), np.int64)
        storages = np.flatnonzero(~step.is_state)
        inside = spans.start[len(storages) :]
        where = np.concatenate([home[storages], at[inside]])
        nbytes = spans.nbytes * np.concatenate([self.on_gpu[storages], ~step.on_host[inside]])
        start = np.concatenate([self.lives[0][storages], inside])
        np.add.at(change, (where, start), nbytes)
        np.subtract.at(change, (where, np.concatenate([until[storages], spans.end[len(storages) :]])), nbytes)
        return change

    def apart(self, at: Numbers, home: Numbers) -> Flags:
        """By touch, whether it is of what another device has."""
        step = self.step
        found: Flags = (at[step.op] != home[step.storage]) & self.on_gpu[step.storage]
        return found & ~(step.on_host | self.collective)[step.op]

    def cross(self, change: NDArray[np.int64], crossing: NDArray[np.int64], at: Numbers, home: Numbers) -> int:
        """Add the buffers of devices for what others make, and the bytes that come; return in how many copies."""
        step, sizes = self.step, self.step.nbytes
        apart = self.apart(at, home)
        ops = step.op[apart]
        keys = step.storage[apart] * len(change) + at[ops]
        copies, first = np.unique(keys, return_index=True)
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        storage, to = np.divmod(copies, len(change))
        for device in np.unique(to).tolist():
            there = to == device
            change[device, 0] += self.buffers(storage[there], ops[first[there]], ops[last[there]])
        np.add.at(crossing, (self.replicas[2][storage], home[storage], to), sizes[storage])
        return len(copies)

    def buffers(self, storages: Numbers, first: Numbers, last: Numbers) -> int:
        """The bytes of the buffers that one device keeps for copies of some storages, each there from its first reader
        to its last."""
        order = np.argsort(first, kind="stable")
        rows = zip(first[order].tolist(), last[order].tolist(), self.step.nbytes[storages[order]].tolist(), strict=True)
        return buffers(list(rows))

    def gaps(self, storages: Sequence[str], *, together: bool, ahead: int = 0) -> Gaps:
        """When storages are not there that are stored otherwise.

        Args:
            storages: their names.
            together: whether the first of them that is read brings back all of one micro-batch.
            ahead: how many operators late a storage is freed, and early it is back.
        """
        step = self.step
        numbers = np.array([step.number[name] for name in storages], np.int64)
        end = step.late[numbers]
        if together and len(numbers):
            parts = np.array([micro_batch_of(name) or 0 for name in storages], np.int64)
            first = np.full(parts.max() + 1, self.count, np.int64)
            np.minimum.at(first, parts, end)
            end = first[parts]
        start = self.early[numbers] + 1 + ahead
        return Gaps(numbers, start, np.maximum(end - ahead, start))

    def between_updates(self, placed: Placed, states: Sequence[int], away: Device, *, there: bool) -> Gaps:
        """When state is not there that is parked.

        Args:
            placed: what devices hold where everything is kept.
            states: the numbers of the storages.
            away: where they are parked.
            there: whether their updates run where they are parked: they never come home, and gradients leave as soon as
                they are made.
        """
        numbers = np.array(states, np.int64)
        begin, end = np.zeros(len(numbers), np.int64), np.full(len(numbers), self.count, np.int64)
        if there or not states:
            gradients = np.array(sorted({k for state in states for k in self.gradients.get(state, ())}), np.int64)
            leaves = self.step.made[gradients] + 1
            both = np.concatenate
            return Gaps(
                both([numbers, gradients]),
                both([begin, leaves]),
                both([end, np.maximum(self.touched[1][gradients] + 1, leaves)]),
            )
        first, last = self.touched
        names, sizes = self.step.names, self.step.nbytes
        arrives = end.copy()
        at = {k: i for i, k in enumerate(states)}
        for device in np.unique(placed.home[numbers]).tolist():
            mine = numbers[placed.home[numbers] == device].tolist()
            trips = [Trip(names[k], int(first[k]), 0, int(last[k]) + 1) for k in mine]
            costs = [int(sizes[k]) * toll(away) for k in mine]
            coming = self.clock(placed, device).latest(trips, costs, None)
            for trip, position in two_at_a_time(coming, lambda name: int(sizes[self.step.number[name]])):
                arrives[at[self.step.number[trip.storage]]] = position
        both = np.concatenate
        return Gaps(both([numbers, numbers]), both([begin, last[numbers] + 1]), both([arrives, end]))

    @cached_property
    def gradients(self) -> dict[int, list[int]]:
        """By storage of state, what its updates read that the step makes."""
        step, found = self.step, dict[int, list[int]]()
        for i, op in enumerate(step.net.ops):
            if op.phase == "update":
                read = step.read(i)
                made = [k for k in read if step.made[k] >= 0 and self.on_gpu[k]]
                found.update({k: made for k in read if step.updated[k]})
        return found

    @cached_property
    def touched(self) -> tuple[Numbers, Numbers]:
        """By storage, the first and the last operator that touches it."""
        every = np.ones(len(self.step.op), np.bool_)
        return self.step.first(every), self.step.last(every)

    def clock(self, placed: Placed, device: int) -> Clock:
        """The clock of a device."""
        key = device, placed.at.tobytes()
        if key not in self.clocks:
            here = np.flatnonzero((placed.at == device) & self.computes)
            self.clocks[key] = Clock(here.tolist(), self.touches[here].tolist())
        return self.clocks[key]

    @cached_property
    def computes(self) -> Flags:
        """By operator, whether it is none that only shows a part of what is there."""
        return np.array([not op.effects.shows for op in self.step.net.ops], np.bool_)

    @cached_property
    def touches(self) -> Numbers:
        """By operator, the bytes that it reads and writes."""
        return np.array([work.nbytes for work in self.step.works], np.int64)

    def peaks(self, placed: Placed, gaps: Sequence[tuple[Gaps, Sequence[int]]]) -> Numbers:
        """By device, the most bytes.

        Args:
            placed: what devices hold where everything is kept.
            gaps: what is stored otherwise, with the number of the device that has it meanwhile, by the device that it
                is from; -1: none.
        """
        if not gaps:
            return placed.peaks
        change = np.zeros((len(placed.state), self.count + 1), np.int64)
        sizes = self.step.nbytes
        for (storage, start, end), to in gaps:
            nbytes, where, until = sizes[storage], placed.home[storage], placed.until[storage]
            start, end = np.minimum(start, until), np.minimum(end, until)
            np.subtract.at(change, (where, start), nbytes)
            np.add.at(change, (where, end), nbytes)
            there = np.array(to, np.int64)[where]
            some = there >= 0
            np.add.at(change, (there[some], start[some]), nbytes[some])
            np.subtract.at(change, (there[some], end[some]), nbytes[some])
        found: Numbers = placed.state + (placed.live + change.cumsum(1)[:, : self.count]).max(1)
        return found

    def peak(self, placed: Placed, device: int, gaps: Gaps, count: int) -> int:
        """The most bytes of one device with the first so many of some gaps."""
        storage, start, end = (column[:count] for column in gaps)
        there = placed.home[storage] == device
        away = self.away(placed, Gaps(storage[there], start[there], end[there]))
        return int(placed.state[device] + (placed.live[device] + away).max())

    def away(self, placed: Placed, gaps: Gaps) -> NDArray[np.int64]:
        """By operator, the bytes of storages that are not there, below 0."""
        storage, start, end = gaps
        change, nbytes = np.zeros(self.count + 1, np.int64), self.step.nbytes[storage]
        np.subtract.at(change, np.minimum(start, placed.until[storage]), nbytes)
        np.add.at(change, np.minimum(end, placed.until[storage]), nbytes)
        return change.cumsum()[: self.count]
