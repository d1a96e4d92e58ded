"""The bytes and seconds that a person's placement is reckoned to take, before a plan is made of it.

By these the cheapest cut of a level is found, and the fewest units that are recomputed or parked so that devices keep
within their limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphir.analysis.topology import Topology
from graphir.ir.device import CPU, Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.touches import Numbers

from ..order import AHEAD
from .drafts import Way
from .groups import Wanted
from .holding import Gaps, Holding, Placed, joined
from .levels import Levels, Unit

__all__ = ["Added", "Cut", "Reckoning"]

Seconds: TypeAlias = "NDArray[np.float64]"

_SWEEPS: Final = 2
"""How often every boundary between two devices is moved to where it is best."""

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
        moves: those that move.
        devices: by part of *placed*, its device.
        placed: what the parts hold.
    """

    moves: tuple[tuple[str, Device], ...]
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
    """

    def __init__(self, program: Program, levels: Levels, wanted: Wanted, topology: Topology, issue: float) -> None:
        self.levels, self.wanted, self.topology, self.issue = levels, wanted, topology, issue
        self.sources = [device for device in program.devices if not device.is_host]
        self.parts = micro_batches(program.step.blobs)
        self.cuts: dict[tuple[tuple[str, ...], tuple[Device, ...], tuple[int, ...]], Cut] = {}
        self.gaps: dict[tuple[Unit, bool, bool], Gaps] = {}
        self.joined: dict[tuple[Way, bool], Gaps] = {}
        self.between: dict[tuple[tuple[tuple[str, Device], ...], tuple[Device, ...], Way], Gaps] = {}
        self.plains: dict[tuple[tuple[tuple[str, Device], ...], tuple[Device, ...]], tuple[float, float]] = {}
        self.ways: dict[Way, Added] = {}
        self.speeds: dict[Device, Seconds] = {}
        self.order: dict[tuple[tuple[Unit, ...], Device | None], list[Unit]] = {}

    def now(self) -> Cut:
        """The program as it is."""
        return Cut((), self.levels.step.devices, self.holding.now())

    def cut_at(self, units: tuple[str, ...], chain: tuple[Device, ...], at: tuple[int, ...]) -> Cut:
        """Modules, each on a device of its own choice."""
        return self.cut_into(dict(zip(units, at, strict=True)), chain)

    def cut_into(self, part_of: Mapping[str, int], chain: tuple[Device, ...]) -> Cut:
        """Modules on the devices of their parts; what is pinned to one of these, there."""
        parts = {device: number for number, device in enumerate(chain)}
        pins = self.wanted.pins
        part_of = {path: parts.get(pins.get(path, chain[part]), part) for path, part in part_of.items()}
        moves = [(path, chain[part]) for path, part in part_of.items() if chain[part] != self.sources[0]]
        return Cut(tuple(moves), chain, self.holding.placed(part_of, len(chain)))

    def cut(self, level: tuple[str, ...], chain: tuple[Device, ...], ends: tuple[int, ...]) -> Cut:
        """A level cut into contiguous parts."""
        key = level, chain, ends
        if key not in self.cuts:
            parts = [level[begin:end] for begin, end in pairwise((0, *ends, len(level)))]
            part_of = {path: number for number, paths in enumerate(parts) for path in paths}
            self.cuts[key] = self.cut_into(part_of, chain)
        return self.cuts[key]

    def cheapest(self, level: tuple[str, ...], chain: tuple[Device, ...], way: Way) -> Generator[None, None, Cut]:
        """The cut of a level that is reckoned to exceed limits least with all of a way, to need the least of the way,
        and to take the least time."""
        chain = chain[: len(level)]
        ends = self.even(level, chain)
        for _ in range(_SWEEPS):
            before = ends
            for number in range(len(ends)):
                bounds = (0, *ends, len(level))
                others = [
                    (*ends[:number], end, *ends[number + 1 :]) for end in range(bounds[number] + 1, bounds[number + 2])
                ]
                ends = min(others, key=lambda other: (self.price(self.cut(level, chain, other), way), other != ends))
                yield
            if ends == before:
                break
        return self.cut(level, chain, ends)

    def price(self, cut: Cut, way: Way) -> tuple[int, int, float]:
        """What decides between cuts: by how many bytes limits are exceeded with all of a way, and without, and
        seconds."""
        limits = self.limits(cut, {})
        plain = int(np.maximum(cut.placed.peaks - limits, 0).sum())
        over = plain
        if way.units and plain:
            over = int(np.maximum(self.peaks(cut, [way]) - limits, 0).sum())
        return over, plain, self.cost(cut, ())

    def cost(self, cut: Cut, ways: Sequence[Way]) -> float:
        """Seconds that a step is reckoned to take: what is computed, copied and issued, one after the other; where
        micro-batches flow, what the busiest device computes."""
        busy, issued = self.plain(cut)
        return self.total(busy, issued, [self.added(way) for way in ways])

    def plain(self, cut: Cut) -> tuple[float, float]:
        """Seconds of a cut with everything kept: what is computed and copied, and what one host thread issues."""
        key = cut.moves, cut.devices
        if key not in self.plains:
            spent = [float(self.spent(device)[cut.placed.at == part].sum()) for part, device in enumerate(cut.devices)]
            busy = max(spent) if self.parts > 1 else sum(spent)
            pairs = pairwise(cut.devices) if cut.moves else ()
            pace = min([self.topology.link(str(a), str(b)).bytes_per_second for a, b in pairs], default=1.0)
            self.plains[key] = busy + cut.placed.crossing / pace, self.issued + self.issue * cut.placed.copies
        return self.plains[key]

    def total(self, busy: float, issued: float, added: Sequence[Added]) -> float:
        """Seconds of a step with what is stored otherwise on top. Copies of what is parked run beside the forward, and
        back beside the backward."""
        copied = sum([one.copied for one in added])
        behind = self.least_seconds * self.count - self.ahead
        longer = max(copied - self.ahead, 0.0) + max(copied - behind, 0.0) + _PARKED * min(copied, self.ahead)
        return max(busy + sum([one.busy for one in added]) + longer, issued + sum([one.issued for one in added]))

    def added(self, way: Way) -> Added:
        """What a way adds to a step."""
        if way not in self.ways:
            levels = self.levels
            if way.to is None:
                busy = sum(map(levels.seconds, way.units))
                self.ways[way] = Added(busy, sum(map(levels.issued, way.units)), 0.0)
            elif way.what != "saved":
                trips = sum([len(self.states(unit)) for unit in way.units])
                self.ways[way] = Added(self.waited(way, way.to, trips), 2 * self.issue * trips, 0.0)
            else:
                copies = 2 * sum([len(self.gap(unit, again=False).storage) for unit in way.units])
                nbytes = sum([levels.parts[path].saved for unit in way.units for path in unit]) * self.parts
                source = next((d for d in (*self.sources, *self.wanted.devices) if d != way.to), way.to)
                link = None if source == way.to else self.topology.link(str(source), str(way.to))
                copied = nbytes / link.bytes_per_second if link is not None else 0.0
                self.ways[way] = Added(0.0, self.issue * copies, copied)
        return self.ways[way]

    def waited(self, way: Way, to: Device, trips: int) -> float:
        """Seconds that a step waits for state that is parked: what comes in and what goes out pass each other."""
        source = next((device for device in self.sources if device != to), to)
        if source == to:
            return 0.0
        link = self.topology.link(str(source), str(to))
        return sum(map(self.updated, way.units)) / link.bytes_per_second + trips * link.latency

    def even(self, level: Sequence[str], chain: Sequence[Device]) -> tuple[int, ...]:
        """Where parts end that hold as much of a level as their devices' shares of the limits."""
        parts = self.levels.parts
        sums = list(accumulate([parts[path].state + parts[path].saved for path in level], initial=0))
        limits = [self.wanted.limits.get(device, 0) for device in chain]
        shares = [share / max(sum(limits), 1) for share in accumulate(limits)][:-1]
        found: list[int] = []
        for number, share in enumerate(shares):
            least, most = (found[-1] if found else 0) + 1, len(level) - len(shares) + number
            found.append(min(range(least, most + 1), key=lambda end: abs(sums[end] - share * sums[-1])))
        return tuple(found)

    @cached_property
    def holding(self) -> Holding:
        """What reckons what devices hold."""
        return Holding(self.levels.step)

    def peaks(self, cut: Cut, ways: Sequence[Way], *, hopes: bool = False) -> Numbers:
        """By part of a cut, the most bytes that it is reckoned to hold; who *hopes* takes what is parked to be nowhere
        meanwhile, which is so where it is away while the others hold little."""
        gaps = []
        for way in ways:
            part = cut.devices.index(way.to) if way.to in cut.devices and not hopes else -1
            gaps.append((self.gaps_of(cut, way, hopes=hopes), part))
        return self.holding.peaks(cut.placed, gaps)

    def gaps_of(self, cut: Cut, way: Way, *, hopes: bool = False) -> Gaps:
        """When the storages of a way are away where modules are cut."""
        if way.what == "saved" or way.to is None:
            return self.gap_of(way, hopes=hopes)
        key = cut.moves, cut.devices, way
        if key not in self.between:
            states = [k for unit in way.units for k in self.states(unit)]
            self.between[key] = self.holding.between_updates(cut.placed, states, way.to, there=way.what == "updates")
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
            self.gaps[key] = self.holding.gaps(storages, together=again, ahead=0 if again or hopes else AHEAD)
        return self.gaps[key]

    def states(self, unit: Unit) -> list[int]:
        """The numbers of a unit's state that the update alone touches."""
        return [self.levels.step.number[name] for path in unit for name in self.levels.states[path]]

    def limits(self, cut: Cut, more: Mapping[Device, int]) -> Numbers:
        """By part of a cut, the most bytes that it may be reckoned to hold."""
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
        for part in np.flatnonzero(over).tolist():
            away = cut.devices[part] != way.to
            units = tuple([unit for unit in way.units if self.part(cut, unit, way) == part and away])
            least = self.least_saved if way.what == "saved" else self.least_state
            chosen.update(least(cut, way, units, part, int(limits[part]), beside))
        some = way._replace(units=tuple([unit for unit in way.units if unit in chosen]))
        held = self.peaks(cut, [*beside, some] if some.units else beside)
        return some, int(np.maximum(held - limits, 0).sum())

    def part(self, cut: Cut, unit: Unit, way: Way) -> int:
        """The part that a unit is in, or its state."""
        if way.what == "saved":
            return int(cut.placed.at[self.levels.parts[unit[0]].first])
        return int(cut.placed.home[self.states(unit)[0]])

    def least_saved(
        self, cut: Cut, way: Way, units: tuple[Unit, ...], part: int, limit: int, beside: Sequence[Way]
    ) -> Sequence[Unit]:
        """The fewest units of a part whose saved values are stored otherwise so that its limit is kept; all that help
        where even these do not do. A device holds the less, the more units are stored otherwise.

        Args:
            cut: where modules are.
            way: how values are stored.
            units: of the part.
            part: its number.
            limit: of its device.
            beside: what else is stored otherwise.
        """
        ranked = self.ranked(units, way.to)
        found = [self.gaps_of(cut, one) for one in beside]
        found += [self.gap(unit, again=way.to is None) for unit in ranked]
        gaps, ends = joined(found), list(accumulate([len(gap.storage) for gap in found], initial=0))[len(beside) :]
        enough = max(limit, self.holding.peak(cut.placed, part, gaps, ends[-1]))
        peaks = lambda count: -self.holding.peak(cut.placed, part, gaps, ends[count])  # noqa: E731
        return ranked[: bisect_left(range(len(ranked)), -enough, key=peaks)]

    def least_state(
        self, cut: Cut, way: Way, units: tuple[Unit, ...], part: int, limit: int, beside: Sequence[Way]
    ) -> Sequence[Unit]:
        """The units whose state is parked so that a limit is kept: of few units those whose trips take the least time,
        of many as few as it takes; all where even that does not do. Arguments are those of :meth:`least_saved`."""

        def held(some: Sequence[Unit]) -> int:
            """What the device holds with the state of some units parked."""
            return int(self.peaks(cut, [*beside, way._replace(units=tuple(some))])[part])

        over = int(self.peaks(cut, beside)[part]) - limit
        if len(units) <= _FEW:
            every = [some for count in range(len(units)) for some in combinations(units, count)]
            freeing = [some for some in every if sum(map(self.updated, some)) >= over]
            freeing.sort(key=lambda some: self.added(way._replace(units=some)).busy)
            return next((some for some in freeing if held(some) <= limit), units)
        ranked = sorted(units, key=self.updated, reverse=True)
        return ranked[: bisect_left(range(len(ranked)), -limit, key=lambda count: -held(ranked[:count]))]

    def ranked(self, units: tuple[Unit, ...], to: Device | None) -> list[Unit]:
        """Units by what it takes to free a byte with them; of about equally dear ones the earlier first, as they free
        it for longer. What is parked costs the same for each byte."""
        levels, key = self.levels, (units, to)
        if key in self.order:
            return self.order[key]
        dear = {unit: 0.0 if to else levels.seconds(unit) / max(levels.freed(unit), 1) for unit in units}
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

    @property
    def count(self) -> int:
        """How many devices there may be."""
        return max(len({*self.sources, *self.wanted.devices}), 1)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of all operators, shared by all devices."""
        return float(self.seconds.sum()) / self.count

    @cached_property
    def ahead(self) -> float:
        """Seconds of the forward."""
        return float(self.seconds[self.levels.step.forward].sum())

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
