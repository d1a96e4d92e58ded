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
    """What parts of a model hold, each on a device of its own.

    Attributes:
        at: by operator, its part.
        home: by storage, its part.
        state: by part, bytes of state.
        live: by part and operator, bytes of all else, where everything is kept.
        crossing: bytes that go from one part to another.
        copies: how many copies bring them.
    """

    at: Numbers
    home: Numbers
    state: Numbers
    live: NDArray[np.int64]
    crossing: int = 0
    copies: int = 0

    @property
    def peaks(self) -> Numbers:
        """By part, the most bytes."""
        found: Numbers = self.state + self.live.max(1)
        return found


class Holding:
    """What the parts of a step hold.

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
        """The modules of operators, and by operator the number of its own; what has none goes with the operator
        before."""
        numbers: dict[str, int] = {}
        found, last = [], ""
        for op in self.step.net.ops:
            last = op.module or last
            found.append(numbers.setdefault(last, len(numbers)))
        return list(numbers), np.array(found or [0], np.int64)

    def placed(self, part_of: Mapping[str, int], parts: int) -> Placed:
        """What the parts hold where everything is kept.

        Args:
            part_of: by module, its part; a module that it lacks is where the one is that it is in, or else the operator
                before.
            parts: how many there are.
        """
        step, known = self.step, dict[str, int]()

        def part(module: str) -> int:
            if module not in known:
                known[module] = next((part_of[path] for path in reversed(lineage(module)) if path in part_of), -1)
            return known[module]

        names, module_of = self.modules
        at = np.array([part(module) for module in names] or [0], np.int64)[module_of]
        at = at[np.maximum.accumulate(np.where(at >= 0, np.arange(len(at)), 0))]
        at = np.maximum(at, 0)
        first = at[np.maximum(step.first(np.ones(len(step.op), np.bool_)), 0)]
        home = np.where(step.made >= 0, at[np.maximum(step.made, 0)], first)
        state, sizes = np.zeros(parts, np.int64), step.nbytes
        for k, module in step.owners.items():
            home[k] = max(part(module), 0)
            state[home[k]] += sizes[k] * self.on_gpu[k]
        return self.summed(at, home, state, parts)

    def now(self) -> Placed:
        """What the devices of a step hold where it is, and the parts are numbers of :attr:`.Step.devices`."""
        step = self.step
        number = {device: i for i, device in enumerate(step.devices)}
        home = np.array([number.get(step.net.blobs[name].device, 0) for name in step.names], np.int64)
        state = np.zeros(len(step.devices), np.int64)
        np.add.at(state, home[step.is_state], step.nbytes[step.is_state])
        return self.summed(step.at, home, state, len(step.devices))

    def summed(self, at: Numbers, home: Numbers, state: Numbers, parts: int) -> Placed:
        """What parts hold with what is where."""
        step = self.step
        spans, change = step.spans, np.zeros((parts, self.count + 1), np.int64)
        storages = np.flatnonzero(~step.is_state)
        inside = spans.start[len(storages) :]
        where = np.concatenate([home[storages], at[inside]])
        nbytes = spans.nbytes * np.concatenate([self.on_gpu[storages], ~step.on_host[inside]])
        np.add.at(change, (where, spans.start), nbytes)
        np.subtract.at(change, (where, spans.end), nbytes)
        crossed = self.cross(change, at, home) if parts > 1 else (0, 0)
        return Placed(at, home, state, change.cumsum(1)[:, : self.count], *crossed)

    def cross(self, change: NDArray[np.int64], at: Numbers, home: Numbers) -> tuple[int, int]:
        """Add what parts hold that others make; the bytes of it, and in how many copies they come."""
        step, sizes = self.step, self.step.nbytes
        apart = (at[step.op] != home[step.storage]) & self.on_gpu[step.storage] & ~step.on_host[step.op]
        ops = step.op[apart]
        keys = step.storage[apart] * len(change) + at[ops]
        copies, first = np.unique(keys, return_index=True)
        last = len(keys) - 1 - np.unique(keys[::-1], return_index=True)[1]
        storage, part = np.divmod(copies, len(change))
        np.add.at(change, (part, ops[first]), sizes[storage])
        np.subtract.at(change, (part, ops[last] + 1), sizes[storage])
        return int(sizes[storage].sum()), len(copies)

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
            placed: what the parts hold where everything is kept.
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
        for part in np.unique(placed.home[numbers]).tolist():
            mine = numbers[placed.home[numbers] == part].tolist()
            trips = [Trip(names[k], int(first[k]), 0, int(last[k]) + 1) for k in mine]
            costs = [int(sizes[k]) * toll(away) for k in mine]
            coming = self.clock(placed, part).latest(trips, costs, None)
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

    def clock(self, placed: Placed, part: int) -> Clock:
        """The clock of a part."""
        key = part, placed.at.tobytes()
        if key not in self.clocks:
            here = np.flatnonzero((placed.at == part) & self.computes)
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

    def peaks(self, placed: Placed, gaps: Sequence[tuple[Gaps, int]]) -> Numbers:
        """By part, the most bytes.

        Args:
            placed: what the parts hold where everything is kept.
            gaps: what is stored otherwise, with the part that has it meanwhile; -1: none.
        """
        if not gaps:
            return placed.peaks
        change = np.zeros((len(placed.state), self.count + 1), np.int64)
        sizes = self.step.nbytes
        for (storage, start, end), to in gaps:
            nbytes, where = sizes[storage], placed.home[storage]
            np.subtract.at(change, (where, start), nbytes)
            np.add.at(change, (where, end), nbytes)
            if to >= 0:
                np.add.at(change[to], start, nbytes)
                np.subtract.at(change[to], end, nbytes)
        found: Numbers = placed.state + (placed.live + change.cumsum(1)[:, : self.count]).max(1)
        return found

    def peak(self, placed: Placed, part: int, gaps: Gaps, count: int) -> int:
        """The most bytes of one part with the first so many of some gaps."""
        storage, start, end = (column[:count] for column in gaps)
        there = placed.home[storage] == part
        return int(placed.state[part] + (placed.live[part] + self.away(storage[there], start[there], end[there])).max())

    def away(self, storage: Numbers, start: Numbers, end: Numbers) -> NDArray[np.int64]:
        """By operator, the bytes of storages that are not there, below 0."""
        change, nbytes = np.zeros(self.count + 1, np.int64), self.step.nbytes[storage]
        np.subtract.at(change, start, nbytes)
        np.add.at(change, end, nbytes)
        return change.cumsum()[: self.count]
