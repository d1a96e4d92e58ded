"""The tasks of a step, and the values that they hand on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from itertools import accumulate
from typing import Any

import numpy as np

from graphir.analysis.topology import Topology
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import micro_batch_of
from graphir.ir.touches import Flags

from ..micro_work import FORWARD, INPUT, UPDATE, WEIGHT
from .problem import Task, Value
from .repeats import Again
from .units import Unit, Units

__all__ = ["Found", "Run", "Tasks"]


class Run:
    """Operators of one group that follow each other in one phase: a task. Other groups wait for its last operator where
    it is *awaited*."""

    __slots__ = ("awaited", "group", "ops", "phase")

    def __init__(self, group: int, phase: str, awaited: bool = False) -> None:
        self.group, self.phase, self.awaited, self.ops = group, phase, awaited, list[int]()

    @property
    def kind(self) -> int:
        """Of the kinds that a pipeline tells apart."""
        if self.phase == "forward":
            return FORWARD
        if self.phase != "backward":
            return UPDATE
        return INPUT if self.awaited else WEIGHT


@dataclass
class Found:
    """By group, what can be parked and computed again."""

    parks: list[list[str]]
    again: list[list[str]]
    again_at: list[int]
    again_issued: list[float]
    again_seconds: list[dict[Device, float]]


class Tasks:
    """The tasks of a step, and what they hand on.

    Attributes:
        runs: the tasks.
        of_op: by operator, its task; -1 of those on the host.
        parts: how many micro-batches there are.
        state: by group, bytes of state.
        updated: by group, the storages of it that the update alone touches.
        held: by device, bytes that are there whatever is chosen.
        home: by storage of state, its group; -1 of others.
    """

    def __init__(self, units: Units, numbers: Mapping[Unit, int]) -> None:
        self.units, self.step, self.net = units, units.step, units.net
        step = self.step
        of_unit = np.array([numbers[unit] for unit in units.at] or [-1], np.int64)
        rank = units.rank
        self.group_of_op = np.where(rank >= 0, of_unit[rank], -1)
        self.parts = units.parts
        self.costs: dict[Device, list[float]] = {}
        self.runs = self.split()
        self.of_op = np.full(len(self.net.ops), -1, np.int64)
        for number, run in enumerate(self.runs):
            self.of_op[run.ops] = number
        self.phases = [run.phase for run in self.runs]
        self.state = [0] * (max(numbers.values()) + 1)
        self.updated: list[list[int]] = [[] for _ in self.state]
        self.held: dict[Device, int] = defaultdict(int)
        self.home = np.full(len(step.names), -1, np.int64)
        sizes = step.nbytes.tolist()
        for name in self.net.external_inputs:
            blob = self.net.blobs[name]
            if blob.role not in STATE_ROLES or blob.is_view:
                continue
            storage = step.number[name]
            unit = units.of_state.get(storage)
            if unit is None:
                self.held[blob.device] += sizes[storage]
            else:
                self.home[storage] = numbers[unit]
                self.state[numbers[unit]] += sizes[storage]
                if step.updated[storage]:
                    self.updated[numbers[unit]].append(storage)

    def update(self, group: int) -> tuple[int, int]:
        """The first and the last task of a group's update; -1 where it has none."""
        at = [number for number, run in enumerate(self.runs) if run.group == group and run.phase == "update"]
        return (at[0], at[-1]) if at else (-1, -1)

    def trips(self, group: int) -> tuple[int, ...]:
        """The bytes of the two largest trips of a group's state to its updates, in order."""
        sizes, nbytes = self.step.nbytes, dict[int, int]()
        for storage in self.updated[group]:
            at = self.first_touch[storage]
            nbytes[at] = nbytes.get(at, 0) + int(sizes[storage])
        most = nlargest(2, nbytes, key=nbytes.__getitem__)
        return tuple([nbytes[at] for at in sorted(most)])

    @cached_property
    def first_touch(self) -> list[int]:
        """By storage, the first operator that touches it."""
        found: list[int] = self.step.first(np.ones(len(self.step.op), np.bool_)).tolist()
        return found

    def split(self) -> list[Run]:
        """The step cut into tasks. None reads what a later one makes, as one would that goes on behind a visit to
        another device. A group's backward is cut behind each operator that other groups wait for: what comes after
        it, gradients of weights, delays nobody but its own device."""
        ops, groups, awaited = self.net.ops, self.group_of_op.tolist(), self.awaited().tolist()
        open_at: dict[Device, Run] = {}
        runs: list[Run] = []
        number: dict[Run, int] = {}
        of_op: list[int] = [-1] * len(ops)  # the number of its run
        for i, op in enumerate(ops):
            group = groups[i]
            if group < 0:
                continue
            run = open_at.get(op.device)
            # What is open on one device alone is the last one, before which everything was made.
            if (
                run is None
                or run.group != group
                or run.phase != op.phase
                or (run is not runs[-1] and max([of_op[w] for w in self.writers(i)], default=-1) > number[run])
            ):
                run = open_at[op.device] = Run(group, op.phase)
                number[run] = len(runs)
                runs.append(run)
            run.ops.append(i)
            of_op[i] = number[run]
        pieces: list[Run] = []
        for run in runs:
            pieces += self.pieces(run, awaited) if run.phase == "backward" else [run]
        return sorted(pieces, key=lambda run: run.ops[0])

    def writers(self, i: int) -> list[int]:
        """The operators that have written last what an operator reads, each of a group."""
        begin, end = self.step.bounds[i]
        return [op for op in self.last_writers[begin:end] if op >= 0]

    @cached_property
    def last_writers(self) -> list[int]:
        """By touch, the last operator of a group before it that has made or overwritten the storage; -1 where there is
        none."""
        step, count = self.step, len(self.net.ops)
        writes = step.makes & (self.group_of_op >= 0)[step.op]
        keys = np.sort(step.storage[writes] * count + step.op[writes])
        at = np.searchsorted(keys, step.storage * count + step.op) - 1
        before = keys[np.maximum(at, 0)] if len(keys) else np.zeros(len(at), np.int64)
        found: list[int] = np.where((at >= 0) & (before // count == step.storage), before % count, -1).tolist()
        return found

    def awaited(self) -> Flags:
        """By operator, whether an operator of another group reads what it makes; the last such one counts."""
        step, group_of = self.step, self.group_of_op
        written = step.first(step.makes)
        maker, reader = written[step.storage], group_of[step.op]
        apart = ~step.makes & (reader >= 0) & (maker >= 0) & (maker < step.op) & (group_of[maker] != reader)
        readers = step.last(apart)
        last = np.where(readers >= 0, group_of[readers], -1)[step.storage]
        found = np.zeros(len(self.net.ops), np.bool_)
        found[step.op[step.makes & step.own & (last >= 0) & (last != reader)]] = True
        return found

    def pieces(self, run: Run, awaited: Sequence[bool]) -> Iterator[Run]:
        """Parts of a run; each but the last one ends with an operator that other groups wait for."""
        begin = 0
        for k, i in enumerate(run.ops):
            if awaited[i] or k + 1 == len(run.ops):
                piece = Run(run.group, run.phase, awaited[i])
                piece.ops = run.ops[begin : k + 1]
                begin = k + 1
                yield piece

    def seconds(self, names: Sequence[Device], topology: Topology) -> list[list[float]]:
        """By task and device, what it takes."""
        for name in names:
            self.costs[name] = self.step.seconds(names[0] if name.is_host else name, topology)  # the host computes none
        rows = {id(costs): costs for costs in self.costs.values()}
        spent = {key: [sum([costs[i] for i in run.ops]) for run in self.runs] for key, costs in rows.items()}
        return [list(row) for row in zip(*[spent[id(self.costs[name])] for name in names], strict=True)]

    def task(self, run: Run, seconds: Sequence[float], room: int) -> Task:
        """A task with the seconds that it takes by device, and the room."""
        works = self.step.works
        nbytes = sum([works[i].nbytes for i in run.ops])
        return Task(
            run.group, tuple(seconds), room, len(run.ops), nbytes, run.kind, self.part(run), self.issued(run.ops)
        )

    def issued(self, ops: Sequence[int]) -> float:
        """What one host thread takes to issue these operators."""
        issued = self.step.issued
        return sum([issued[i] for i in ops])

    def part(self, run: Run) -> int:
        """The micro-batch of a task; their number where it is of none."""
        if run.kind == UPDATE:
            return self.parts
        if self.parts == 1:
            return 0
        named = [micro_batch_of(name) for i in run.ops for name in self.net.ops[i].outputs]
        return max([part for part in named if part is not None], default=0)

    def values(self, groups: int) -> tuple[list[Value], Found]:
        """What tasks hand on, like values together; and what can be parked and computed again."""
        step, runs, phases = self.step, self.runs, self.phases
        blobs = self.net.blobs
        touching, order = self.touching()
        again = Again(step, self.group_of_op, groups)
        found = Found(
            [[] for _ in range(groups)],
            [[step.names[storage] for storage in of_group] for of_group in again.storages],
            [-1] * groups,
            [self.issued(ops) for ops in again.ops],
            [{} for _ in range(groups)],
        )
        makers, late_at, written = step.makers, step.late.tolist(), step.written.tolist()
        lasts_of, nbytes, of_op = step.lasting.tolist(), step.nbytes.tolist(), self.of_op.tolist()
        homes = self.home.tolist()
        merged: dict[tuple[object, ...], int] = defaultdict(int)
        for storage in order:
            tasks, maker, lasts = touching[storage], makers[storage], lasts_of[storage]
            made = of_op[maker] if maker >= 0 else -1
            if maker >= 0 and made < 0:
                continue
            blob = blobs[step.names[storage]]
            if blob.device.is_host:
                continue
            readers = tuple([task for task in tasks if task != made])
            state = blob.role in STATE_ROLES
            group = homes[storage] if state else runs[made].group if made >= 0 else runs[tasks[0]].group
            if state:
                readers = tuple([task for task in readers if runs[task].group != group])
                if group < 0 or not readers:
                    continue
            lasts = lasts or blob.role == "input"
            if not readers and not lasts:
                continue
            saved = made >= 0 and phases[made] == "forward" and late_at[storage] >= 0 and written[storage] < 0
            saved = saved and not lasts
            if saved:
                found.parks[group].append(step.names[storage])
            rebuilds = tuple(again.rebuilds.get(storage, ()))
            merged[made, readers, group, lasts, not state, saved, storage in again.of, rebuilds] += nbytes[storage]
        for storage, group in again.of.items():
            at = next(task for task in touching[storage] if phases[task] != "forward")
            found.again_at[group] = at if found.again_at[group] < 0 else min(found.again_at[group], at)
        for group in range(groups):
            found.again_seconds[group] = {
                name: sum(costs[i] for i in again.ops[group]) for name, costs in self.costs.items()
            }
        values = [self.value(size, *key) for key, size in merged.items()]  # type: ignore[arg-type]
        self.found = found
        return sorted(values, key=lambda value: (value.made, value.reads)), found

    def value(self, nbytes: int, made: int, readers: tuple[int, ...], *of: Any) -> Value:
        """A value with how many of its readers are in the forward."""
        return Value(nbytes, made, readers, sum(self.phases[task] == "forward" for task in readers), *of)

    def touching(self) -> tuple[dict[int, list[int]], list[int]]:
        """By storage, the tasks that touch it, ascending; and the storages that may be handed on, in the order in which
        tasks begin to touch them: not what one task makes and nobody else touches, nor state that stays at home."""
        step, count = self.step, len(self.runs)
        task = self.of_op[step.op]
        placed = task >= 0
        keys = np.sort(step.storage[placed] * count + task[placed])  # np.unique hashes, which takes ten times as long
        keys = keys[np.diff(keys, prepend=-1) != 0]
        storages, tasks = keys // count, keys % count
        abroad = np.zeros(len(step.names), np.bool_)
        abroad[storages[np.array([run.group for run in self.runs])[tasks] != self.home[storages]]] = True
        sizes = np.bincount(storages, minlength=len(step.names))
        bounds = [0, *sizes.cumsum().tolist()]
        some = np.flatnonzero(((sizes > 1) | ((sizes > 0) & ((step.made < 0) | step.lasting))) & abroad)
        each = tasks.tolist()
        found = {k: each[bounds[k] : bounds[k + 1]] for k in some.tolist()}
        begun = np.full(len(step.names), -1, np.int64)
        begun[step.storage[placed][::-1]] = np.flatnonzero(placed)[::-1]
        return found, some[np.argsort(begun[some], kind="stable")].tolist()

    def rooms(self, values: Sequence[Value]) -> list[int]:
        """By task, what its device holds beyond values."""
        runs, ops = self.runs, self.net.ops
        device_of = [ops[run.ops[0]].device for run in runs]
        group_device: dict[int, Device] = {}
        for run, device in zip(runs, device_of, strict=True):
            group_device.setdefault(run.group, device)
        change: dict[Device, list[int]] = defaultdict(lambda: [0] * (len(runs) + 1))
        for value in values:
            if value.counted:
                row = change[group_device[value.group]]
                end = len(runs) - 1 if value.lasts else max([value.made, *value.reads])
                row[max(value.made, 0)] += value.nbytes
                row[end + 1] -= value.nbytes
        live = {device: list(accumulate(row)) for device, row in change.items()}
        empty = [0] * (len(runs) + 1)
        peaks = self.peaks()
        return [peaks[t] - live.get(device, empty)[t] for t, device in enumerate(device_of)]

    def peaks(self) -> list[int]:
        """By task, the most bytes on its device while it runs, without state."""
        step = self.step
        held = step.live(np.ones(len(step.spans.start), np.bool_))[step.at, np.arange(len(self.of_op))]
        found = np.zeros(len(self.runs), np.int64)
        placed = self.of_op >= 0
        np.maximum.at(found, self.of_op[placed], held[placed])
        return found.tolist()
