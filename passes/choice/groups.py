"""From a program to a problem: which operators are placed as a whole, and what they hand on.

A *unit* is a module that has parameters, on one device: what runs in it, and what runs behind it until the next such
module begins, such as activations and additions of containers. It is what :func:`.shift_modules.shift_modules` moves.
Operators of the backward go with the operator whose gradients they compute, updates with their parameters. Where there
are many units, neighbours between which the most bytes cross are one group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

from graphir.analysis.cost import operator_costs, work
from graphir.analysis.memory import StorageUse, memory
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.operator import Operator
from graphir.ir.opset import ACCUMULATES
from graphir.ir.program import Program

from ..module_patterns import module_paths
from ..recompute import repeated_alone
from ..saved import Use, uses_of
from .problem import AGAIN, KEEP, Group, Problem, Task, Value

__all__ = ["Grouped", "Wanted", "grouped"]

Unit: TypeAlias = "tuple[Device, str]"
"""A module with parameters, and the device where it is."""

MOST_GROUPS: Final = 48


class Wanted(NamedTuple):
    """What a caller says of a placement.

    Attributes:
        limits: by device, the most bytes that it may hold.
        devices: that may be used.
        options: of ``shift``, ``park`` and ``recompute``.
        pins: by module, the device where it has to be.
        whole: by module, the pattern of modules that are not taken apart, and which one of these it is in.
        dims: the sizes.
    """

    limits: Mapping[Device, int]
    devices: tuple[Device, ...]
    options: tuple[str, ...]
    pins: Mapping[str, Device]
    whole: Mapping[str, str]
    dims: Mapping[str, int]


@dataclass
class Grouped:
    """A problem, and what its groups stand for in the program.

    Attributes:
        problem: what is to be placed.
        units: by group, its units.
        parks: by group, the storages that are parked with it.
        again: by group, those that are computed again with it.
        of_op: by operator of the forward, its group.
    """

    problem: Problem
    units: list[list[Unit]]
    of_op: dict[int, int]
    parks: list[list[str]] = field(default_factory=list)
    again: list[list[str]] = field(default_factory=list)


def grouped(program: Program, wanted: Wanted, topology: Topology, profile: Profile | None, threads: int) -> Grouped:
    """The problem of placing a program.

    Args:
        program: captured, or replicated; before :func:`.copies.inject_copies`.
        wanted: limits and devices, which the topology has.
        topology: how fast devices and links are.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.

    Raises:
        PassError: no module of the program has parameters.
    """
    return _Grouping(program, wanted, topology, profile, threads).run()


class _Grouping:
    """The steps from operators to tasks and values."""

    def __init__(
        self, program: Program, wanted: Wanted, topology: Topology, profile: Profile | None, threads: int
    ) -> None:
        self.program, self.net, self.wanted, self.topology = program, program.step, wanted, topology
        self.uses = uses_of(self.net)
        self.memory = memory(program, dims=wanted.dims or None, profile=profile, threads=threads)
        self.profile, self.threads = profile, threads
        self.dims = dict(self.memory.dims)
        state = [base_name(name).rpartition(".")[0] for name in program.interface.module_state]
        containers = {path.rpartition(".")[0] for path in module_paths(program)}
        self.weighted = {path for path in state if path and path not in containers}
        self.at: dict[Unit, int] = {}
        self.unit_of_op: list[Unit | None] = [None] * len(self.net.ops)
        self.unit_of_state: dict[str, Unit] = {}

    def run(self) -> Grouped:
        order = self.place_forward()
        if not order:
            raise PassError(
                f"no module of program {self.program.name!r} has parameters of its own, so nothing can be moved",
                fix="give the model's layers as modules",
            )
        self.at = {unit: i for i, unit in enumerate(order)}
        self.place_rest()
        numbers, units = self.merge(order)
        return self.problem(numbers, units)

    def place_forward(self) -> list[Unit]:
        """The units of the forward's operators, in the order in which they begin."""
        now: dict[str, Unit] = {}
        waiting: list[tuple[int, str]] = []
        order: dict[Unit, None] = {}
        for i, op in enumerate(self.net.ops):
            if op.phase != "forward" or op.device.is_host:
                continue
            key = str(op.device)
            if op.module in self.weighted:
                now[key] = (op.device, op.module)
                order[now[key]] = None
            if key in now:
                self.unit_of_op[i] = now[key]
            else:
                waiting.append((i, key))
        first: dict[str, Unit] = {}
        for unit in order:
            first.setdefault(str(unit[0]), unit)
        for i, key in waiting:
            self.unit_of_op[i] = first.get(key)
        return list(order)

    def place_rest(self) -> None:
        """The units of state, and of the operators behind the forward."""
        blobs, ops = self.net.blobs, self.net.ops
        units = dict.fromkeys(unit for unit in self.unit_of_op if unit is not None)
        for name in self.net.external_inputs:
            blob = blobs[name]
            owner = (blob.device, base_name(name).rpartition(".")[0])
            if blob.role in STATE_ROLES and owner in units:
                self.unit_of_state[blob.storage] = owner
        for i, op in enumerate(ops):
            if op.phase == "forward" or op.device.is_host:
                continue
            self.unit_of_op[i] = self.unit_behind(op) or next(
                (self.unit_of_op[k] for k in range(i - 1, -1, -1) if ops[k].device == op.device and self.unit_of_op[k]),
                None,
            )
            unit = self.unit_of_op[i]
            if op.phase == "update" and unit is not None:
                for name in op.inputs:
                    if blobs[name].role in STATE_ROLES and blobs[name].device == op.device:
                        self.unit_of_state.setdefault(blobs[name].storage, unit)

    def unit_behind(self, op: Operator) -> Unit | None:
        """The unit that an operator of the backward, a reduction or an update goes with."""
        blobs = self.net.blobs
        if op.phase == "update":
            for _, source in op.effects.writes:
                storage = blobs[op.inputs[source]].storage
                if storage in self.unit_of_state:
                    return self.unit_of_state[storage]
        if op.type == ACCUMULATES and (op.device, op.module) in self.at:
            return op.device, op.module  # the reader's, beside what it adds
        names = [op.of] if op.of else list(op.inputs)
        for name in names:
            storage = blobs[name].storage
            if storage in self.unit_of_state and not op.of:
                return self.unit_of_state[storage]
            made = self.uses[storage].made if storage in self.uses else -1
            if made >= 0 and (unit := self.unit_of_op[made]) is not None and unit[0] == op.device:
                return unit
        return None

    def merge(self, order: Sequence[Unit]) -> tuple[dict[Unit, int], list[list[Unit]]]:
        """The number of each unit's group, and the units of each group: at most so many groups as a search can take.

        Neighbours on one device are merged where the most bytes cross, as long as what they save together is a small
        part of all; never where a caller wants them on different devices, always where a caller wants them as a whole.
        """
        at = self.at
        crossing, saved = self.crossing(at)
        chains = [[unit for unit in order if unit[0] == d] for d in dict.fromkeys(unit[0] for unit in order)]
        share = max(MOST_GROUPS // len(chains), 2)
        groups: list[list[Unit]] = []
        for chain in chains:
            total = sum(saved[at[unit]] for unit in chain)
            merged = self.joined(chain, saved, total / (4 * share)) if len(chain) > 8 * share else [[u] for u in chain]
            sizes = [sum(saved[at[unit]] for unit in group) for group in merged]
            while len(merged) > 1:
                pairs = [i for i in range(len(merged) - 1) if self.may_merge(merged[i], merged[i + 1])]
                whole = [i for i in pairs if self.is_whole(merged[i], merged[i + 1])]
                if not whole and (len(merged) <= share or not pairs):
                    break
                ranked = [
                    (_rank(sizes[i] + sizes[i + 1], 1.5 * total / share, crossing[at[merged[i][-1]]]), i) for i in pairs
                ]
                best = whole[0] if whole else max(ranked)[1]
                merged[best : best + 2] = [merged[best] + merged[best + 1]]
                sizes[best : best + 2] = [sizes[best] + sizes[best + 1]]
            groups += merged
        return {unit: number for number, group in enumerate(groups) for unit in group}, groups

    def joined(self, chain: Sequence[Unit], saved: Sequence[int], most: float) -> list[list[Unit]]:
        """Neighbours of a long chain together, as long as they save at most so much: what is left can be compared
        pair by pair."""
        found: list[list[Unit]] = []
        nbytes, units = 0, len(chain) / (8 * MOST_GROUPS)
        for unit in chain:
            more = saved[self.at[unit]]
            if found and nbytes + more <= most and len(found[-1]) < units and self.may_merge(found[-1], [unit]):
                found[-1].append(unit)
                nbytes += more
            else:
                found.append([unit])
                nbytes = more
        return found

    def crossing(self, at: Mapping[Unit, int]) -> tuple[list[int], list[int]]:
        """By unit, in order, the bytes that later units of the forward read of what it and earlier ones make; and the
        bytes that it saves for the backward."""
        change, saved = [0] * (len(at) + 1), [0] * len(at)
        last: dict[str, int] = {}
        for i, op in enumerate(self.net.ops):
            unit = self.unit_of_op[i]
            if op.phase != "forward" or unit is None:
                continue
            for name in op.inputs:
                storage = self.net.blobs[name].storage
                last[storage] = max(last.get(storage, -1), at[unit])
        for storage, reader in last.items():
            made = self.uses[storage].made
            unit = self.unit_of_op[made] if made >= 0 else None
            if unit is not None and at[unit] < reader:
                nbytes = self.net.blobs[storage].nbytes(self.dims)
                change[at[unit]] += nbytes
                change[reader] -= nbytes
        for storage, use in self.uses.items():
            unit = self.unit_of_op[use.made] if use.made >= 0 else None
            if unit is not None and unit in at and use.late >= 0:
                saved[at[unit]] += self.net.blobs[storage].nbytes(self.dims)
        return list(accumulate(change)), saved

    def may_merge(self, a: Sequence[Unit], b: Sequence[Unit]) -> bool:
        return self.wanted.pins.get(a[0][1]) == self.wanted.pins.get(b[0][1])

    def is_whole(self, a: Sequence[Unit], b: Sequence[Unit]) -> bool:
        whole = self.wanted.whole
        return a[-1][1] in whole and whole[a[-1][1]] == whole.get(b[0][1])

    def problem(self, numbers: Mapping[Unit, int], units: list[list[Unit]]) -> Grouped:
        """The problem of placing these groups."""
        names, tasks = self.devices(), _Tasks(self, numbers)
        hosted = [Device.parse("cpu")] if Device.parse("cpu") not in names else []
        names += hosted
        seconds = tasks.seconds(names)
        values, found = tasks.values(len(units))
        limits = tuple([self.wanted.limits.get(name) for name in names])
        usable = [i for i, name in enumerate(names) if name in self.wanted.devices]
        latency, pace = self.links(names)
        host = len(names) - 1
        groups = []
        for number, members in enumerate(units):
            now = names.index(members[0][0])
            pin = self.wanted.pins.get(members[0][1])
            on = usable if "shift" in self.wanted.options else [now]
            on = on if pin is None else [names.index(pin)]
            stored = [KEEP]
            if "recompute" in self.wanted.options and found.again[number]:
                stored.append(AGAIN)
            if "park" in self.wanted.options and found.parks[number]:
                stored += [k for k in (*usable, host) if any(latency[d][k] + latency[k][d] < 1e9 for d in on if d != k)]
            groups.append(
                Group(
                    name=members[0][1] if len(members) == 1 else f"{members[0][1]} to {members[-1][1]}",
                    state=tasks.state[number],
                    devices=tuple(dict.fromkeys([now, *on] if pin is None else on)),
                    stored=tuple(dict.fromkeys(stored)),
                    now=now,
                    again=tuple([found.again_seconds[number][name] for name in names]) if AGAIN in stored else (),
                    again_at=found.again_at[number],
                    again_room=found.again_room[number],
                )
            )
        problem = Problem(
            devices=tuple(map(str, names)),
            limits=limits,
            held=tuple([tasks.held.get(name, 0) for name in names]),
            latency=latency,
            pace=pace,
            groups=tuple(groups),
            tasks=tuple(
                [
                    Task(run.group, tuple(spent), room, *tasks.counted(run))
                    for run, spent, room in zip(tasks.runs, seconds, tasks.rooms(values), strict=True)
                ]
            ),
            values=tuple(values),
        )
        of_op = {i: g for i, g in enumerate(tasks.group_of_op) if g >= 0 and self.net.ops[i].phase == "forward"}
        return Grouped(problem, units, of_op, found.parks, found.again)

    def devices(self) -> list[Device]:
        """The devices that are used or may be."""
        found = [device for device in self.program.devices if not device.is_host]
        return list(dict.fromkeys([*found, *self.wanted.devices]))

    def links(self, names: Sequence[Device]) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
        """Latency and pace between devices."""
        known = {(link.source, link.destination): link for link in self.topology.links}
        latency, pace = [], []
        for source in names:
            found = [known.get((str(source), str(to))) for to in names]
            far = [0.0 if source == to else float("inf") for to in names]
            latency.append(tuple([d if link is None else link.latency for link, d in zip(found, far, strict=True)]))
            pace.append(tuple([0.0 if link is None else 1 / link.bytes_per_second for link in found]))
        return tuple(latency), tuple(pace)


def _rank(nbytes: int, most: float, crossing: int) -> tuple[bool, float, int]:
    """How good it is to merge two groups that save so many bytes together, where so many cross between them."""
    return (True, crossing, -nbytes) if nbytes <= most else (False, -nbytes, 0)


class _Run:
    """Operators of one group that follow each other in one phase: a task."""

    __slots__ = ("group", "ops", "phase")

    def __init__(self, group: int, phase: str) -> None:
        self.group, self.phase, self.ops = group, phase, list[int]()


@dataclass
class _Found:
    """By group, what can be parked and computed again."""

    parks: list[list[str]]
    again: list[list[str]]
    again_at: list[int]
    again_room: list[int]
    again_seconds: list[dict[Device, float]]


class _Tasks:
    """The tasks of a step, and what they hand on.

    Attributes:
        runs: the tasks.
        of_op: by operator, its task; -1 of those on the host.
        state: by group, bytes of state.
        held: by device, bytes that are there whatever is chosen.
    """

    def __init__(self, grouping: _Grouping, numbers: Mapping[Unit, int]) -> None:
        self.grouping, self.net = grouping, grouping.net
        self.group_of_op = [-1 if unit is None else numbers[unit] for unit in grouping.unit_of_op]
        self.runs: list[_Run] = []
        self.of_op = [-1] * len(self.net.ops)
        self.costs: dict[Device, list[float]] = {}
        self.split()
        self.state = [0] * (max(numbers.values()) + 1)
        self.held: dict[Device, int] = defaultdict(int)
        self.home: dict[str, int] = {}
        for name in self.net.external_inputs:
            blob = self.net.blobs[name]
            if blob.role not in STATE_ROLES or blob.is_view:
                continue
            unit = grouping.unit_of_state.get(blob.storage)
            if unit is None:
                self.held[blob.device] += blob.nbytes(grouping.dims)
            else:
                self.home[blob.storage] = numbers[unit]
                self.state[numbers[unit]] += blob.nbytes(grouping.dims)

    def split(self) -> None:
        """Cut the step into tasks. A group's backward is cut behind the last operator that other groups wait for, since
        what comes after it, gradients of weights, delays nobody but its own device."""
        ops, last = self.net.ops, self.last_readers()
        open_at: dict[Device, _Run] = {}
        for i, op in enumerate(ops):
            group = self.group_of_op[i]
            if group < 0:
                continue
            run = open_at.get(op.device)
            if run is None or run.group != group or run.phase != op.phase:
                run = open_at[op.device] = _Run(group, op.phase)
                self.runs.append(run)
            run.ops.append(i)
        pieces: list[_Run] = []
        for run in self.runs:
            awaited = [
                k
                for k, i in enumerate(run.ops)
                if any(last.get(name, -1) not in (-1, run.group) for name in ops[i].outputs)
            ]
            cut = awaited[-1] + 1 if run.phase == "backward" and awaited else len(run.ops)
            for part in (run.ops[:cut], run.ops[cut:]):
                if part:
                    piece = _Run(run.group, run.phase)
                    piece.ops = part
                    pieces.append(piece)
        self.runs = sorted(pieces, key=lambda run: run.ops[0])
        for number, run in enumerate(self.runs):
            for i in run.ops:
                self.of_op[i] = number

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

    def seconds(self, names: Sequence[Device]) -> list[list[float]]:
        """By task and device, what it takes."""
        grouping = self.grouping
        by_speed: dict[str, list[float]] = {}
        for name in names:
            speed = grouping.topology.speed(str(names[0] if name.is_host else name))  # the host computes nothing here
            key = speed.model_dump_json()
            if key not in by_speed:
                rates = dict.fromkeys([op.device for op in self.net.ops], speed.rates())
                found = operator_costs(self.net, grouping.dims, rates.__getitem__, grouping.profile, grouping.threads)
                by_speed[key] = [cost.seconds for cost in found]
            self.costs[name] = by_speed[key]
        return [[sum(self.costs[name][i] for i in run.ops) for name in names] for run in self.runs]

    def counted(self, run: _Run) -> tuple[int, int]:
        """How many operators a task is, and the bytes that they touch."""
        ops = [self.net.ops[i] for i in run.ops]
        touched = sum(work(op, self.net, self.grouping.dims).nbytes for op in ops if not op.effects.shows)
        return len(ops), touched

    def values(self, groups: int) -> tuple[list[Value], _Found]:
        """What tasks hand on, like values together; and what can be parked and computed again."""
        net, of_op, runs = self.net, self.of_op, self.runs
        blobs, uses = net.blobs, self.grouping.uses
        reads: dict[str, dict[int, None]] = defaultdict(dict)
        for i, op in enumerate(net.ops):
            if of_op[i] >= 0:
                for name in (*op.inputs, *op.outputs):
                    reads[blobs[name].storage][of_op[i]] = None
        lasting = {blobs[name].storage for name in net.external_outputs}
        again = _Again(self, groups, lasting)
        found = _Found(
            [[] for _ in range(groups)], again.storages, [-1] * groups, [0] * groups, [{} for _ in range(groups)]
        )
        merged: dict[tuple[object, ...], int] = defaultdict(int)
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
            is_again = storage in again.of
            key = (
                made,
                readers,
                late,
                group,
                lasts,
                not state,
                saved,
                is_again,
                tuple(again.rebuilds.get(storage, ())),
            )
            merged[key] += blob.nbytes(self.grouping.dims)
            if is_again:
                found.again_at[group] = min(task for task in readers if runs[task].phase != "forward")
        for storage in again.of:
            group = again.of[storage]
            at = min(task for task in reads[storage] if runs[task].phase != "forward")
            found.again_at[group] = at if found.again_at[group] < 0 else min(found.again_at[group], at)
        for group in range(groups):
            found.again_seconds[group] = {
                name: sum(costs[i] for i in again.ops[group]) for name, costs in self.costs.items()
            }
        values = [
            Value(nbytes, made, readers, late, group, lasts, counted, parks, repeated, rebuilds)  # type: ignore[arg-type]
            for (made, readers, late, group, lasts, counted, parks, repeated, rebuilds), nbytes in merged.items()
        ]
        self.found = found
        return sorted(values, key=lambda value: (value.made, value.reads)), found

    def rooms(self, values: Sequence[Value]) -> list[int]:
        """By task, what its device holds beyond values."""
        memory, runs = self.grouping.memory, self.runs
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


class _Again:
    """What can be computed again with its group.

    Attributes:
        storages: by group.
        of: by storage, its group.
        ops: by group, the operators that are repeated.
        rebuilds: by storage that is read by these, the groups of them.
    """

    def __init__(self, tasks: _Tasks, groups: int, lasting: set[str]) -> None:
        self.tasks, self.net = tasks, tasks.net
        self.storages: list[list[str]] = [[] for _ in range(groups)]
        self.of: dict[str, int] = {}
        self.ops: list[list[int]] = [[] for _ in range(groups)]
        self.rebuilds: dict[str, list[int]] = {}
        uses, group_of = tasks.grouping.uses, tasks.group_of_op
        elsewhere = self.read_elsewhere()
        repeatable = repeated_alone(tasks.grouping.program, uses)
        for storage, use in uses.items():
            if use.made < 0 or use.late < 0 or use.written >= 0 or storage in lasting or storage in elsewhere:
                continue
            group = group_of[use.made]
            if group >= 0 and self.net.ops[use.made].phase == "forward" and use.made in repeatable:
                self.of[storage] = group
        self.chains(uses, repeatable)

    def read_elsewhere(self) -> set[str]:
        """Storages that another group's operator reads than makes."""
        blobs, uses, group_of = self.net.blobs, self.tasks.grouping.uses, self.tasks.group_of_op
        found = set()
        for i, op in enumerate(self.net.ops):
            for name in op.inputs:
                storage = blobs[name].storage
                made = uses[storage].made
                if made >= 0 and group_of[made] != group_of[i]:
                    found.add(storage)
        return found

    def chains(self, uses: Mapping[str, Use], repeatable: Mapping[int, None]) -> None:
        """Find the operators that are repeated, from what is kept on; what depends on others is kept itself."""
        blobs, ops, group_of = self.net.blobs, self.net.ops, self.tasks.group_of_op
        needed: dict[int, None] = {}
        sound: dict[int, bool] = {}
        for storage in list(self.of):
            group = self.of[storage]
            left, chain = [uses[storage].made], dict[int, None]()
            fine = True
            while left and fine:
                made = left.pop()
                if made in chain or made in needed:
                    continue
                if sound.get(made) is False or made not in repeatable or group_of[made] != group:
                    fine = False
                    break
                chain[made] = None
                for name in ops[made].inputs:
                    source = blobs[name].storage
                    use = uses[source]
                    if use.made < 0 or (use.late >= 0 and source not in self.of):
                        continue
                    left.append(use.made)
            if fine:
                needed.update(chain)
            else:
                sound[uses[storage].made] = False
                del self.of[storage]
        for storage, group in self.of.items():
            self.storages[group].append(storage)
        for made in sorted(needed):
            group = group_of[made]
            self.ops[group].append(made)
            for name in ops[made].inputs:
                source = blobs[name].storage
                if source not in self.of:
                    found = self.rebuilds.setdefault(source, [])
                    if group not in found:
                        found.append(group)
