"""The tasks of a step, and the values that they hand on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphir.analysis.cost import operator_costs, works
from graphir.analysis.memory import Memory, StorageUse
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import micro_batch_of, micro_batches

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
    again_room: list[int]
    again_issued: list[int]
    again_seconds: list[dict[Device, float]]


class Tasks:
    """The tasks of a step, and what they hand on.

    Attributes:
        runs: the tasks.
        of_op: by operator, its task; -1 of those on the host.
        parts: how many micro-batches there are.
        state: by group, bytes of state.
        held: by device, bytes that are there whatever is chosen.
    """

    def __init__(self, units: Units, numbers: Mapping[Unit, int], memory: Memory) -> None:
        self.units, self.net, self.dims, self.memory = units, units.net, units.dims, memory
        self.group_of_op = [-1 if unit is None else numbers[unit] for unit in units.of_op]
        self.runs: list[Run] = []
        self.of_op = [-1] * len(self.net.ops)
        self.works = works(self.net, self.dims)
        self.parts = micro_batches(self.net.blobs)
        self.costs: dict[Device, list[float]] = {}
        self.split()
        self.state = [0] * (max(numbers.values()) + 1)
        self.held: dict[Device, int] = defaultdict(int)
        self.home: dict[str, int] = {}
        for name in self.net.external_inputs:
            blob = self.net.blobs[name]
            if blob.role not in STATE_ROLES or blob.is_view:
                continue
            unit = units.of_state.get(blob.storage)
            if unit is None:
                self.held[blob.device] += blob.nbytes(self.dims)
            else:
                self.home[blob.storage] = numbers[unit]
                self.state[numbers[unit]] += blob.nbytes(self.dims)

    def split(self) -> None:
        """Cut the step into tasks. None reads what a later one makes, as one would that goes on behind a visit to
        another device. A group's backward is cut behind each operator that other groups wait for: what comes after
        it, gradients of weights, delays nobody but its own device."""
        ops, last, blobs = self.net.ops, self.last_readers(), self.net.blobs
        open_at: dict[Device, Run] = {}
        maker: dict[str, int] = {}  # by storage, the number of the run that wrote it last
        at: dict[Run, int] = {}
        for i, op in enumerate(ops):
            group = self.group_of_op[i]
            if group < 0:
                continue
            run = open_at.get(op.device)
            read = max([maker.get(blobs[name].storage, -1) for name in op.inputs], default=-1)
            if run is None or run.group != group or run.phase != op.phase or read > at[run]:
                run = open_at[op.device] = Run(group, op.phase)
                at[run] = len(self.runs)
                self.runs.append(run)
            run.ops.append(i)
            maker.update([(blobs[name].storage, at[run]) for name in op.outputs])
        pieces: list[Run] = []
        for run in self.runs:
            pieces += self.pieces(run, last) if run.phase == "backward" else [run]
        self.runs = sorted(pieces, key=lambda run: run.ops[0])
        for number, run in enumerate(self.runs):
            for i in run.ops:
                self.of_op[i] = number

    def pieces(self, run: Run, last: Mapping[str, int]) -> Iterator[Run]:
        """Parts of a run; each but the last one ends with an operator that other groups wait for."""
        begin, ops = 0, self.net.ops
        for k, i in enumerate(run.ops):
            awaited = any(last.get(name, -1) not in (-1, run.group) for name in ops[i].outputs)
            if awaited or k + 1 == len(run.ops):
                piece = Run(run.group, run.phase, awaited)
                piece.ops = run.ops[begin : k + 1]
                begin = k + 1
                yield piece

    def last_readers(self) -> dict[str, int]:
        """Of each blob, the group of an operator of another group that reads it, where there is one."""
        blobs, found = self.net.blobs, dict[str, int]()
        makers: dict[str, int] = {}
        for i, op in enumerate(self.net.ops):
            group = self.group_of_op[i]
            for name in op.inputs:
                storage = blobs[name].storage
                if group >= 0 and makers.get(storage, group) != group:
                    found[storage] = group
            for name in op.outputs:
                makers.setdefault(blobs[name].storage, group)
        return found

    def seconds(
        self, names: Sequence[Device], topology: Topology, profile: Profile | None, threads: int
    ) -> list[list[float]]:
        """By task and device, what it takes."""
        by_speed: dict[str, list[float]] = {}
        for name in names:
            speed = topology.speed(str(names[0] if name.is_host else name))  # the host computes nothing here
            key = speed.model_dump_json()
            if key not in by_speed:
                rates = dict.fromkeys([op.device for op in self.net.ops], speed.rates())
                found = operator_costs(self.net, self.dims, rates.__getitem__, profile, threads, self.works)
                by_speed[key] = [cost.seconds for cost in found]
            self.costs[name] = by_speed[key]
        return [[sum(self.costs[name][i] for i in run.ops) for name in names] for run in self.runs]

    def task(self, run: Run, seconds: Sequence[float], room: int) -> Task:
        """A task with the seconds that it takes by device, and the room."""
        nbytes = sum(self.works[i].nbytes for i in run.ops)
        return Task(
            run.group, tuple(seconds), room, len(run.ops), nbytes, run.kind, self.part(run), self.issued(run.ops)
        )

    def issued(self, ops: Sequence[int]) -> int:
        """How many of these operators take time on their device."""
        return sum(self.works[i].nbytes > 0 for i in ops)

    def part(self, run: Run) -> int:
        """The micro-batch of a task; their number where it is of none."""
        if run.kind == UPDATE:
            return self.parts
        named = [micro_batch_of(name) for i in run.ops for name in self.net.ops[i].outputs]
        return max([part for part in named if part is not None], default=0)

    def values(self, groups: int) -> tuple[list[Value], Found]:
        """What tasks hand on, like values together; and what can be parked and computed again."""
        net, of_op, runs = self.net, self.of_op, self.runs
        blobs, uses = net.blobs, self.units.uses
        reads: dict[str, dict[int, None]] = defaultdict(dict)
        for i, op in enumerate(net.ops):
            if of_op[i] >= 0:
                for name in (*op.inputs, *op.outputs):
                    reads[blobs[name].storage][of_op[i]] = None
        lasting = {blobs[name].storage for name in net.external_outputs}
        again = Again(self.units, self.group_of_op, groups, lasting)
        found = Found(
            [[] for _ in range(groups)],
            again.storages,
            [-1] * groups,
            [0] * groups,
            [self.issued(ops) for ops in again.ops],
            [{} for _ in range(groups)],
        )
        merged: dict[Value, int] = defaultdict(int)
        for storage, touching in reads.items():
            blob, use = blobs[storage], uses.get(storage)
            if blob.device.is_host or use is None:
                continue
            made = of_op[use.made] if use.made >= 0 else -1
            if use.made >= 0 and made < 0:
                continue
            readers = tuple(sorted(task for task in touching if task != made))
            state = blob.role in STATE_ROLES
            group = (
                self.home.get(storage, -1) if state else runs[made].group if made >= 0 else runs[min(touching)].group
            )
            if state:
                readers = tuple([task for task in readers if runs[task].group != group])
                if group < 0 or not readers:
                    continue
            lasts = storage in lasting or blob.role == "input"
            if not readers and not lasts:
                continue
            late = sum(runs[task].phase == "forward" for task in readers)
            saved = made >= 0 and runs[made].phase == "forward" and use.late >= 0 and use.written < 0 and not lasts
            if saved:
                found.parks[group].append(storage)
            rebuilds = tuple(again.rebuilds.get(storage, ()))
            like = Value(0, made, readers, late, group, lasts, not state, saved, storage in again.of, rebuilds)
            merged[like] += blob.nbytes(self.dims)
        for storage, group in again.of.items():
            at = min(task for task in reads[storage] if runs[task].phase != "forward")
            found.again_at[group] = at if found.again_at[group] < 0 else min(found.again_at[group], at)
        for group in range(groups):
            found.again_seconds[group] = {
                name: sum(costs[i] for i in again.ops[group]) for name, costs in self.costs.items()
            }
        values = [like._replace(nbytes=nbytes) for like, nbytes in merged.items()]
        self.found = found
        return sorted(values, key=lambda value: (value.made, value.reads)), found

    def rooms(self, values: Sequence[Value]) -> list[int]:
        """By task, what its device holds beyond values."""
        memory, runs = self.memory, self.runs
        peaks = self.peaks(memory.uses, memory.positions)
        device_of = [self.net.ops[run.ops[0]].device for run in runs]
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
        rooms = [peaks[t] - live.get(device, empty)[t] for t, device in enumerate(device_of)]
        self.again_rooms(rooms, memory.uses)
        return rooms

    def peaks(self, uses: Sequence[StorageUse], positions: int) -> list[int]:
        """By task, the most bytes on its device while it runs, without state."""
        rows: dict[Device, list[int]] = defaultdict(lambda: [0] * (positions + 1))
        states = {
            self.net.blobs[name].storage
            for name in self.net.external_inputs
            if self.net.blobs[name].role in STATE_ROLES
        }
        for use in uses:
            if use.blob not in states or use.category == "scratch":
                rows[use.device][use.start] += use.nbytes
                rows[use.device][use.end] -= use.nbytes
        live = {device: list(accumulate(row)) for device, row in rows.items()}
        found = []
        for run in self.runs:
            row = live.get(self.net.ops[run.ops[0]].device)
            found.append(max([row[i] for i in run.ops]) if row else 0)
        return found

    def again_rooms(self, rooms: Sequence[int], uses: Sequence[StorageUse]) -> None:
        """What computing again takes beyond the task before which it stands: what its operators hold only for a
        moment."""
        inside: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for use in uses:
            if use.start < len(self.of_op) and self.of_op[use.start] >= 0:
                task = self.of_op[use.start]
                run = self.runs[task]
                if run.phase == "forward" and use.end <= run.ops[-1] + 1:
                    inside[task].append((use.start, use.end, use.nbytes))
        most: dict[int, int] = defaultdict(int)
        for task, spans in inside.items():
            events = sorted([(start, n) for start, _, n in spans] + [(end, -n) for _, end, n in spans])
            most[self.runs[task].group] = max(most[self.runs[task].group], max(accumulate(n for _, n in events)))
        for group, at in enumerate(self.found.again_at):
            if at >= 0:
                self.found.again_room[group] = max(most[group] - rooms[at], 0)
