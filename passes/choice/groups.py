"""From a program to a problem: which operators are placed as a whole, and what they hand on.

The groups are units (:mod:`.units`), which :func:`.shift_modules.shift_modules` moves, or several (:mod:`.merging`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from graphir.analysis.execution import IssueSeconds
from graphir.analysis.issuing import CROSSING, around
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.ir.device import CPU, Device
from graphir.ir.program import Program

from .merging import Merging
from .problem import AGAIN, KEEP, Choice, Group, Problem
from .step import Step
from .tails import with_tails
from .tasks import Found, Tasks
from .units import Unit, Units

__all__ = ["Grouped", "Reading", "Wanted", "apart", "grouped", "host_memory"]


def host_memory(topology: Topology) -> int | None:
    """The bytes that the host of a topology has; None where the topology does not say. Logical devices of one host have
    parts of its memory, which all of them share."""
    memory = topology.speed(CPU).memory
    if topology.host is None or memory is None:
        return memory
    parts = [speed.memory or 0 for device, speed in topology.devices.items() if not Device.parse(device).is_host]
    return max(sum(parts), memory)


class Wanted(NamedTuple):
    """What a caller says of a placement.

    Attributes:
        limits: by device, the most bytes that it may hold.
        devices: that may be used.
        options: what may be done.
        pins: by module, the device where it has to be.
        whole: by module, the pattern of modules that are not taken apart, and which one of these it is in.
        hosts: whether modules may go to the host.
    """

    limits: Mapping[Device, int]
    devices: tuple[Device, ...]
    options: tuple[str, ...]
    pins: Mapping[str, Device]
    whole: Mapping[str, str]
    hosts: bool = False


@dataclass
class Grouped:
    """A problem, and what its groups stand for in the program.

    Attributes:
        problem: what is to be placed.
        units: by group, its units.
        parks: by group, the storages that are parked with it.
        again: by group, those that are computed again with it.
        updated: by group, those of its state that may be parked.
        of_op: by operator of the forward, its group.
        homes: by device and module that owns state and runs nothing, the group that its state goes with, or the device
            where it is pinned; None where several groups use it, each some.
    """

    problem: Problem
    units: list[list[Unit]]
    of_op: dict[int, int]
    parks: list[list[str]] = field(default_factory=list)
    again: list[list[str]] = field(default_factory=list)
    updated: list[list[str]] = field(default_factory=list)
    homes: dict[tuple[Device, str], int | Device | None] = field(default_factory=dict)


class Reading:
    """A program, read once for problems of several sizes.

    Args:
        program: captured, or replicated; before :func:`.copies.inject_copies`.
        wanted: limits and devices, which the topology has.
        topology: how fast devices and links are.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.
        issue: what one host thread takes to issue operators to any device; None where devices are threads.

    Raises:
        PassError: no module of the program has parameters.
    """

    def __init__(
        self,
        program: Program,
        wanted: Wanted,
        topology: Topology,
        profile: Profile | None,
        threads: int,
        issue: IssueSeconds | None = None,
    ) -> None:
        self.program, self.topology = program, topology
        cards = sum([not device.is_host for device in program.devices])
        self.issue = self.begun = 0.0
        if issue is not None:
            self.issue, self.begun = issue.of(CROSSING), sum(map(issue.of, around(cards, cards)))
        self.units = Units(Step(program, profile, threads, issue))
        pins, homes = wanted.pins, self.units.homes.items()
        carried = {unit.module: pins[module] for (_, module), units in homes if module in pins for unit in units}
        self.wanted = wanted._replace(pins={**carried, **pins})

    @cached_property
    def tailed(self) -> Units | None:
        """The units with tails apart that save much; None where there are none."""
        return with_tails(self.units)

    def grouped(self, most: int, *, tails: bool = False) -> Grouped:
        """The problem of placing the program in so many groups at most, with or without *tails* apart."""
        program, wanted, topology = self.program, self.wanted, self.topology
        units = (self.tailed if tails else None) or self.units
        numbers, members = Merging(units, most, wanted.pins, wanted.whole).run()
        tasks = Tasks(units, numbers)
        names = _devices(program, wanted)
        seconds = tasks.seconds(names, topology)
        values, found = tasks.values(len(members))
        latency, pace = _links(names, topology)
        rooms = tasks.rooms(values)
        rows = [tasks.task(*each) for each in zip(tasks.runs, seconds, rooms, strict=True)]
        if rows:
            rows[0] = rows[0]._replace(issued=rows[0].issued + self.begun)
        # Where all bytes of a step are fewer than the host has, the host has any number.
        memory, needed = host_memory(topology), sum([value.nbytes for value in values])
        if memory is not None and needed + sum(tasks.state) <= memory:
            memory = None
        problem = Problem(
            devices=tuple(map(str, names)),
            limits=tuple([wanted.limits.get(name, memory if name.is_host else None) for name in names]),
            held=tuple([tasks.held.get(name, 0) for name in names]),
            latency=latency,
            pace=pace,
            groups=tuple(
                [_group(i, modules, names, wanted, tasks, found, latency) for i, modules in enumerate(members)]
            ),
            tasks=tuple(rows),
            values=tuple(values),
            parts=tasks.parts,
            issue=self.issue,
        )
        forward = np.flatnonzero(units.step.forward & (tasks.group_of_op >= 0))
        of_op = dict(zip(forward.tolist(), tasks.group_of_op[forward].tolist(), strict=True))
        homes: dict[tuple[Device, str], int | Device | None] = {}
        for key, owners in units.homes.items():
            using = {numbers[unit] for unit in owners}
            homes[key] = wanted.pins.get(key[1], using.pop() if len(using) == 1 else None)
        updated = [[tasks.step.names[storage] for storage in of_group] for of_group in tasks.updated]
        return Grouped(problem, members, of_op, found.parks, found.again, updated, homes)


def grouped(
    program: Program,
    wanted: Wanted,
    topology: Topology,
    profile: Profile | None,
    threads: int,
    most: int,
    issue: IssueSeconds | None = None,
) -> Grouped:
    """The problem of placing a program in so many groups at most, as :class:`Reading` has it."""
    return Reading(program, wanted, topology, profile, threads, issue).grouped(most)


def apart(choice: Choice, of: Grouped, to: Grouped) -> Choice:
    """A choice for some groups as one for others of the same program: each goes where its first operator goes."""
    first: dict[int, int] = {}
    for i, group in to.of_op.items():
        first.setdefault(group, of.of_op[i])
    at = [first[group] for group in range(len(to.problem.groups))]
    rows = [tuple([row[g] for g in at]) if row else () for row in choice]
    return Choice(*rows)


def _group(
    number: int,
    modules: Sequence[Unit],
    names: Sequence[Device],
    wanted: Wanted,
    tasks: Tasks,
    found: Found,
    latency: Sequence[Sequence[float]],
) -> Group:
    """A group, with where it may be and what may become of what it saves."""
    usable = [i for i, name in enumerate(names) if name in wanted.devices]
    now, host, pin = names.index(modules[0][0]), len(names) - 1, wanted.pins.get(modules[0][1])
    on = usable if "shift" in wanted.options and all(unit.moves for unit in modules) else []
    devices = [now, *on] if pin is None else [names.index(pin)]
    reached = [
        k for k in (*usable, host) if any(math.isfinite(latency[d][k] + latency[k][d]) for d in devices if d != k)
    ]
    update = tasks.update(number)
    updated = tasks.updated[number] if "state" in wanted.options and update[0] >= 0 else []
    stored = [KEEP]
    if "recompute" in wanted.options and found.again[number]:
        stored.append(AGAIN)
    if "park" in wanted.options and found.parks[number]:
        stored += reached
    return Group(
        name=" to ".join(dict.fromkeys([str(modules[0]), str(modules[-1])])),
        state=tasks.state[number],
        devices=tuple(dict.fromkeys(devices)),
        stored=tuple(dict.fromkeys(stored)),
        now=now,
        again=tuple([found.again_seconds[number][name] for name in names]) if AGAIN in stored else (),
        again_at=found.again_at[number],
        again_issued=found.again_issued[number],
        update=update,
        updated=sum([int(tasks.step.nbytes[storage]) for storage in updated]),
        trips=tasks.trips(number),
        copies=len(updated),
        away=tuple(dict.fromkeys(reached)) if updated else (),
    )


def _devices(program: Program, wanted: Wanted) -> list[Device]:
    """The devices that are used or may be, and the host behind them."""
    found = [device for device in program.devices if not device.is_host]
    return [*dict.fromkeys([*found, *wanted.devices]), Device.parse("cpu")]


def _links(
    names: Sequence[Device], topology: Topology
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Latency and pace between devices."""
    known = {(link.source, link.destination): link for link in topology.links}
    latency, pace = [], []
    for source in names:
        found = [known.get((str(source), str(to))) for to in names]
        far = [0.0 if source == to else float("inf") for to in names]
        latency.append(tuple([d if link is None else link.latency for link, d in zip(found, far, strict=True)]))
        pace.append(tuple([0.0 if link is None else 1 / link.bytes_per_second for link in found]))
    return tuple(latency), tuple(pace)
