"""The bytes and seconds that a person's placement is reckoned to take, before a plan is made of it.

By these the cheapest cut of a level is found (:mod:`.cuts`), and the fewest units that are recomputed or parked so that
devices keep within their limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, combinations
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphir.analysis.topology import Link, Topology
from graphir.ir.device import CPU, Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.touches import Numbers

from ..order import AHEAD
from .chains import Chain, Target, goes, is_alike, target
from .drafts import Way
from .groups import Wanted
from .holding import Gaps, Holding, Placed, joined
from .levels import Levels, Unit

__all__ = ["Added", "Cut", "Reckoning"]

Seconds: TypeAlias = "NDArray[np.float64]"

_EQUAL: Final = 1.05
"""How many times as dear as the cheapest a unit is that counts as equal: of equal units, the earlier one is first."""

_FEW: Final = 6
"""Of how many units the state of every selection is looked at."""

_PARKED: Final = 0.2
"""The part of the time of copies to where something is parked that a step is reckoned to be longer by, of copies that
may all run beside what is computed."""


class Cut(NamedTuple):
    """Where modules are.

    Attributes:
        moves: those that move, and where they go.
        devices: those of *placed*, by their numbers.
        placed: what devices hold.
    """

    moves: tuple[tuple[str, Target], ...]
    devices: tuple[Device, ...]
    placed: Placed


class Added(NamedTuple):
    """Seconds that what is stored otherwise adds to a step.

    Attributes:
        busy: what is computed again.
        issued: what one host thread issues for it.
        copied: what copies to where it is parked take, and as much again those back.
    """

    busy: float
    issued: float
    copied: float


class Reckoning:
    """Reckons cuts of one program, and what is stored otherwise.

    Args:
        program: to be placed.
        levels: of its modules.
        wanted: what the caller says of a placement.
        topology: how fast devices and links are.
        issue: seconds that one host thread takes to issue a copy.

    Attributes:
        sources: the gpus where the program is.
        alike: whether it is on one, or has a replica of its own on each.
        replicas: how many compute side by side.
    """

    def __init__(self, program: Program, levels: Levels, wanted: Wanted, topology: Topology, issue: float) -> None:
        self.levels, self.wanted, self.topology, self.issue = levels, wanted, topology, issue
        self.sources = [device for device in program.devices if not device.is_host]
        self.alike = is_alike(program, self.sources)
        self.replicas = len(self.sources) if self.alike else 1
        self.parts = micro_batches(program.step.blobs)
        self.gaps: dict[tuple[Unit, bool, bool], Gaps] = {}
        self.joined: dict[tuple[Way, bool], Gaps] = {}
        self.between: dict[tuple[tuple[tuple[str, Target], ...], tuple[Device, ...], Way], Gaps] = {}
        self.plains: dict[tuple[tuple[tuple[str, Target], ...], tuple[Device, ...]], tuple[float, float]] = {}
        self.repeats: dict[Way, tuple[Numbers, Numbers]] = {}
        self.parked: dict[Way, Added] = {}
        self.speeds: dict[Device, Seconds] = {}
        self.order: dict[tuple[tuple[Unit, ...], Target | None], list[Unit]] = {}

    def now(self) -> Cut:
        """The program as it is."""
        return Cut((), self.levels.step.devices, self.holding.now(alike=self.alike))

    def cut_into(self, part_of: Mapping[str, int], chain: Chain) -> Cut:
        """Modules on the devices of their parts; what is pinned to one of these, there."""
        numbers = {device: number for number, device in enumerate(chain.devices)}
        table = [tuple([numbers[device] for device in column]) for column in chain.columns]
        found = dict(part_of)
        for path, device in self.wanted.pins.items():
            if path in found and device in numbers:
                row = (numbers[device],) * len(chain.rows)
                table += [row] if row not in table else []
                found[path] = table.index(row)
        to = [self.target([chain.devices[number] for number in row]) for row in table]
        moves = [(path, there) for path, part in found.items() if (there := to[part]) is not None]
        return Cut(tuple(moves), chain.devices, self.holding.placed(found, table, len(numbers)))

    def target(self, devices: Sequence[Device]) -> Target | None:
        """Where a module goes that each replica has on one of some devices; None if it stays."""
        going = {source: device for source, device in zip(self.sources, devices, strict=True) if source != device}
        if not going:
            return None
        return devices[0] if len(set(devices)) == 1 else target(going)

    def cost(self, cut: Cut, ways: Sequence[Way]) -> float:
        """Seconds that a step is reckoned to take: what is computed, copied and issued, one after the other; where
        micro-batches flow, one of them does, and the others go on as fast as the busiest device lets them."""
        busy, issued = self.plain(cut)
        return self.total(busy, issued, [self.added(way, cut) for way in ways])

    def plain(self, cut: Cut) -> tuple[float, float]:
        """Seconds of a cut with everything kept: what is computed and copied, and what one host thread issues. Replicas
        compute side by side; one part after the other, and as long as the device with the most of it."""
        key = cut.moves, cut.devices
        if key not in self.plains:
            placed, count = cut.placed, len(cut.devices)
            spent = np.zeros((int(placed.part.max(initial=0)) + 1, count))
            for number, device in enumerate(cut.devices):
                here = placed.at == number
                np.add.at(spent[:, number], placed.part[here], self.spent(device)[here])
            busy = float((spent.max(1).sum() + (self.parts - 1) * spent.sum(0).max()) / self.parts)
            self.plains[key] = busy + self.crossed(cut), self.issued + self.issue * placed.copies
        return self.plains[key]

    def crossed(self, cut: Cut) -> float:
        """Seconds of the copies between devices, of the replica with the longest."""
        found = np.zeros(len(cut.placed.crossing))
        for replica, here, there in zip(*np.nonzero(cut.placed.crossing), strict=True):
            pace = self.pace(cut.devices[here], cut.devices[there])
            found[replica] += cut.placed.crossing[replica, here, there] / pace
        return float(found.max())

    def pace(self, here: Device, there: Device) -> float:
        """Bytes a second between two devices."""
        return self.topology.link(str(here), str(there)).bytes_per_second

    def total(self, busy: float, issued: float, added: Sequence[Added]) -> float:
        """Seconds of a step with what is stored otherwise on top. Copies of what is parked run beside the forward, and
        back beside the backward."""
        copied = sum([one.copied for one in added])
        behind = self.whole - self.ahead
        longer = max(copied - self.ahead, 0.0) + max(copied - behind, 0.0) + _PARKED * min(copied, self.ahead)
        return max(busy + sum([one.busy for one in added]) + longer, issued + sum([one.issued for one in added]))

    def added(self, way: Way, cut: Cut) -> Added:
        """What a way adds to a step."""
        if way.to is None:
            ops, units = self.repeated(way)
            at, spent = cut.placed.at[ops], np.zeros((len(way.units), len(cut.devices)))
            seconds = np.array([self.spent(device) for device in cut.devices])[at, ops]
            np.add.at(spent, (units, at), seconds)
            return Added(float(spent.max(1).sum()), sum(map(self.levels.issued, way.units)), 0.0)
        if way not in self.parked:
            if way.what != "saved":
                trips = sum([len(self.states(unit)) for unit in way.units])
                self.parked[way] = Added(self.waited(way, trips), 2 * self.issue * trips, 0.0)
            else:
                levels = self.levels
                copies = 2 * sum([len(self.gap(unit, again=False).storage) for unit in way.units])
                nbytes = sum([levels.parts[path].saved for unit in way.units for path in unit]) * self.parts
                link = self.link(way, (*self.sources, *self.wanted.devices))
                copied = nbytes / self.replicas / link.bytes_per_second if link is not None else 0.0
                self.parked[way] = Added(0.0, self.issue * copies, copied)
        return self.parked[way]

    def repeated(self, way: Way) -> tuple[Numbers, Numbers]:
        """The operators that a way repeats, and of each the number of its unit."""
        if way not in self.repeats:
            found = [self.levels.repeated(unit) for unit in way.units]
            units = np.repeat(np.arange(len(found)), list(map(len, found)))
            self.repeats[way] = np.array([i for ops in found for i in ops], np.int64), units
        return self.repeats[way]

    def waited(self, way: Way, trips: int) -> float:
        """Seconds that a step waits for state that is parked: what comes in and what goes out pass each other."""
        link = self.link(way, self.sources)
        if link is None:
            return 0.0
        nbytes = sum(map(self.updated, way.units))
        return (nbytes / link.bytes_per_second + trips * link.latency) / self.replicas

    def link(self, way: Way, sources: Sequence[Device]) -> Link | None:
        """What leads to where something is parked, from the first of some devices that it leaves."""
        pairs = [(source, there) for source in sources if (there := goes(way.to, source)) is not None]
        return self.topology.link(str(pairs[0][0]), str(pairs[0][1])) if pairs else None

    @cached_property
    def holding(self) -> Holding:
        """What reckons what devices hold."""
        return Holding(self.levels.step)

    def peaks(self, cut: Cut, ways: Sequence[Way], *, hopes: bool = False) -> Numbers:
        """By device of a cut, the most bytes that it is reckoned to hold; who *hopes* takes what is parked to be
        nowhere meanwhile, which is so where it is away while the others hold little."""
        return self.holding.peaks(
            cut.placed, [(self.gaps_of(cut, way, hopes=hopes), self.receiving(cut, way, hopes=hopes)) for way in ways]
        )

    def receiving(self, cut: Cut, way: Way, *, hopes: bool = False) -> list[int]:
        """By device of a cut, the number of the one that has meanwhile what is stored otherwise; -1: none."""
        if way.to is None or hopes:
            return [-1] * len(cut.devices)
        numbers = {device: number for number, device in enumerate(cut.devices)}
        return [numbers.get(goes(way.to, device) or device, -1) for device in cut.devices]

    def gaps_of(self, cut: Cut, way: Way, *, hopes: bool = False) -> Gaps:
        """When the storages of a way are away where modules are cut."""
        if way.what == "saved" or way.to is None:
            return self.gap_of(way, hopes=hopes)
        key = cut.moves, cut.devices, way
        if key not in self.between:
            states = [k for unit in way.units for k in self.states(unit)]
            away = way.to if isinstance(way.to, Device) else way.to[0][1]
            self.between[key] = self.holding.between_updates(cut.placed, states, away, there=way.what == "updates")
        return self.between[key]

    def gap_of(self, way: Way, *, hopes: bool = False) -> Gaps:
        """When the storages of a way are away."""
        key = way, hopes
        if key not in self.joined:
            found = [self.gap(unit, again=way.to is None, hopes=hopes) for unit in way.units]
            self.joined[key] = joined(found)
        return self.joined[key]

    def gap(self, unit: Unit, *, again: bool, hopes: bool = False) -> Gaps:
        """When the storages of a unit are away that are computed *again* or parked; *hopes* as for :meth:`peaks`."""
        key = unit, again, hopes
        if key not in self.gaps:
            storages = self.levels.storages(unit) if again else self.levels.saved(unit)
            ahead = 0 if again or hopes else AHEAD * self.replicas  # whose operators take turns
            self.gaps[key] = self.holding.gaps(storages, together=again, ahead=ahead)
        return self.gaps[key]

    def states(self, unit: Unit) -> list[int]:
        """The numbers of a unit's state that the update alone touches."""
        return [self.levels.step.number[name] for path in unit for name in self.levels.states[path]]

    def limits(self, cut: Cut, more: Mapping[Device, int]) -> Numbers:
        """By device of a cut, the most bytes that it may be reckoned to hold."""
        limits = [self.wanted.limits.get(device, 1 << 62) - more.get(device, 0) for device in cut.devices]
        return np.array(limits, np.int64)

    def fewest(self, cut: Cut, way: Way, more: Mapping[Device, int], beside: Sequence[Way] = ()) -> tuple[Way, int]:
        """As few units of a way as are reckoned to keep devices within their limits, and the bytes by which limits are
        exceeded all the same: where all units do not do, those with which a device holds the least.

        Args:
            cut: where modules are.
            way: all units.
            more: by device, what a plan was found to hold beyond what is reckoned.
            beside: what else is stored otherwise.
        """
        limits = self.limits(cut, more)
        over = self.peaks(cut, beside) > limits
        chosen: set[Unit] = set()
        for device in np.flatnonzero(over).tolist():
            away = way.to is None or goes(way.to, cut.devices[device]) is not None
            units = tuple([unit for unit in way.units if away and device in self.at(cut, unit, way)])
            least = self.least_saved if way.what == "saved" else self.least_state
            chosen.update(least(cut, way, units, device, int(limits[device]), beside))
        some = way._replace(units=tuple([unit for unit in way.units if unit in chosen]))
        held = self.peaks(cut, [*beside, some] if some.units else beside)
        return some, int(np.maximum(held - limits, 0).sum())

    def at(self, cut: Cut, unit: Unit, way: Way) -> set[int]:
        """The numbers of the devices where a unit is in some replica, or its state."""
        if way.what == "saved":
            return set(cut.placed.at[list(self.levels.parts[unit[0]].firsts)].tolist())
        return set(cut.placed.home[self.states(unit)].tolist())

    def least_saved(
        self, cut: Cut, way: Way, units: tuple[Unit, ...], device: int, limit: int, beside: Sequence[Way]
    ) -> Sequence[Unit]:
        """The fewest units of a device whose saved values are stored otherwise so that its limit is kept; all that help
        where even these do not do. A device holds the less, the more units are stored otherwise.

        Args:
            cut: where modules are.
            way: how values are stored.
            units: that the device has.
            device: its number.
            limit: of the device.
            beside: what else is stored otherwise.
        """
        ranked = self.ranked(units, way)
        found = [self.gaps_of(cut, one) for one in beside]
        found += [self.gap(unit, again=way.to is None) for unit in ranked]
        gaps, ends = joined(found), list(accumulate([len(gap.storage) for gap in found], initial=0))[len(beside) :]
        enough = max(limit, self.holding.peak(cut.placed, device, gaps, ends[-1]))
        peaks = lambda count: -self.holding.peak(cut.placed, device, gaps, ends[count])  # noqa: E731
        return ranked[: bisect_left(range(len(ranked)), -enough, key=peaks)]

    def least_state(
        self, cut: Cut, way: Way, units: tuple[Unit, ...], device: int, limit: int, beside: Sequence[Way]
    ) -> Sequence[Unit]:
        """The units whose state is parked so that a limit is kept: of few units those whose trips take the least time,
        of many as few as it takes; all where even that does not do. Arguments are those of :meth:`least_saved`."""

        def held(some: Sequence[Unit]) -> int:
            """What the device holds with the state of some units parked."""
            return int(self.peaks(cut, [*beside, way._replace(units=tuple(some))])[device])

        over = int(self.peaks(cut, beside)[device]) - limit
        if len(units) <= _FEW:
            every = [some for count in range(len(units)) for some in combinations(units, count)]
            freeing = [some for some in every if sum(map(self.updated, some)) >= over]
            freeing.sort(key=lambda some: self.added(way._replace(units=some), cut).busy)
            return next((some for some in freeing if held(some) <= limit), units)
        ranked = sorted(units, key=self.updated, reverse=True)
        return ranked[: bisect_left(range(len(ranked)), -limit, key=lambda count: -held(ranked[:count]))]

    def ranked(self, units: tuple[Unit, ...], way: Way) -> list[Unit]:
        """Units by what it takes to free a byte with them; of about equally dear ones the earlier first, as they free
        it for longer. What is parked costs the same for each byte."""
        levels, key = self.levels, (units, way.to)
        if key in self.order:
            return self.order[key]
        dear = {unit: 0.0 if way.to else levels.seconds(unit) / max(levels.freed(unit), 1) for unit in units}
        order = sorted(units, key=dear.__getitem__)
        found: list[Unit] = []
        while order:
            least = _EQUAL * dear[order[0]]
            equal = [unit for unit in units if unit in order and dear[unit] <= least]
            found += equal
            order = [unit for unit in order if dear[unit] > least]
        self.order[key] = found
        return found

    def ranked_on_host(self, level: Sequence[str]) -> list[str]:
        """Modules with state that may go to the host, by the bytes of it for each second that the host takes."""
        step, spent = self.levels.step, defaultdict[str, float](float)
        for op, seconds in zip(step.net.ops, step.seconds(Device.parse(CPU), self.topology), strict=True):
            for path in lineage(op.module):
                spent[path] += seconds
        parts, pins = self.levels.parts, self.wanted.pins
        free = [path for path in level if parts[path].state and path not in pins]
        return sorted(free, key=lambda path: spent[path] / parts[path].state)

    def updated(self, unit: Unit) -> int:
        """Bytes of a unit's state that the update alone touches."""
        return sum([self.levels.parts[path].updated for path in unit])

    @cached_property
    def whole(self) -> float:
        """Seconds of all operators of a replica."""
        return float(self.seconds.sum()) / self.replicas

    @cached_property
    def ahead(self) -> float:
        """Seconds of the forward of a replica."""
        return float(self.seconds[self.levels.step.forward].sum()) / self.replicas

    @cached_property
    def issued(self) -> float:
        """Seconds that one host thread takes to issue all operators."""
        return sum(self.levels.step.issued)

    @cached_property
    def seconds(self) -> Seconds:
        """By operator, its seconds where it is."""
        step = self.levels.step
        found = np.zeros(len(step.net.ops))
        for number, device in enumerate(step.devices):
            if not device.is_host:
                those = step.at == number
                found[those] = self.spent(device)[those]
        return found

    def spent(self, device: Device) -> Seconds:
        """By operator, its seconds on a gpu; nothing of those that the host runs."""
        if device not in self.speeds:
            step = self.levels.step
            found = np.zeros(len(step.net.ops)) if device.is_host else np.array(step.seconds(device, self.topology))
            found[step.on_host] = 0.0
            self.speeds[device] = found
        return self.speeds[device]
