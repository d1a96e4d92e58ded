"""The bytes and seconds that a person's placement is reckoned to take, before a plan is made of it.

By these the cheapest cut of a level is found, and the fewest units that are recomputed or parked so that devices keep
within their limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import Final, NamedTuple

import numpy as np

from graphir.analysis.topology import Topology
from graphir.ir.device import CPU, Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.touches import Numbers

from ..order import AHEAD
from .drafts import Way
from .groups import Wanted
from .holding import Gaps, Holding, Placed
from .levels import Levels, Unit

__all__ = ["Cut", "Reckoning"]

_SWEEPS: Final = 2
"""How often every boundary between two devices is moved to where it is best."""

_EQUAL: Final = 1.05
"""How many times as dear as the cheapest a unit is that counts as equal: of equal units, the earlier one is first."""

_FEW: Final = 6
"""Of how many units the state of every selection is looked at."""

_PARKED: Final = 0.2
"""The part of the time of copies to where something is parked that a step is reckoned to be longer by."""


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
        spent = np.bincount(cut.placed.at, self.seconds, len(cut.devices))
        busy = float(spent.max() if self.parts > 1 else spent.sum())
        pace = min([self.topology.link(str(a), str(b)).bytes_per_second for a, b in pairwise(cut.devices)], default=1.0)
        step, copies, issued = self.levels.step, cut.placed.copies, self.issued
        for way in ways:
            busy += self.longer(way)
            for unit in way.units:
                if way.what != "saved":
                    copies += 2 * len(self.states(unit))
                    continue
                storages = self.gap(unit, again=way.to is None).storage.tolist()
                if way.to is None:
                    issued += sum([step.issued[step.makers[k]] for k in storages])
                else:
                    copies += 2 * len(storages)
        return max(busy + cut.placed.crossing / pace, issued + self.issue * copies)

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
            if way.what == "saved":
                gaps += [(self.gap(unit, again=way.to is None, hopes=hopes), part) for unit in way.units]
            elif way.to is not None:
                states = [k for unit in way.units for k in self.states(unit)]
                there = way.what == "updates"
                gaps.append((self.holding.between_updates(cut.placed, states, way.to, there=there), part))
        return self.holding.peaks(cut.placed, gaps)

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
        over = np.maximum(self.peaks(cut, beside) - limits, 0)
        chosen: set[Unit] = set()
        for part in np.flatnonzero(over).tolist():
            units = [unit for unit in way.units if self.part(cut, unit, way) == part and cut.devices[part] != way.to]

            def exceeds(some: Sequence[Unit], part: int = part) -> int:
                """The bytes by which some units leave a limit exceeded."""
                peaks = self.peaks(cut, [*beside, way._replace(units=tuple(some))])
                return max(int((peaks - limits)[part]), 0)

            if way.what == "saved":
                ranked, found = self.ranked(units), [(int(over[part]), 0)]
                for count in range(1, len(ranked) + 1):
                    found.append((exceeds(ranked[:count]), count))
                    if not found[-1][0]:
                        break
                over[part], count = min(found)
                chosen.update(ranked[:count])
            else:
                some = self.least_state(way, units, int(over[part]), exceeds)
                over[part] = exceeds(some)
                chosen.update(some)
        return way._replace(units=tuple([unit for unit in way.units if unit in chosen])), int(over.sum())

    def part(self, cut: Cut, unit: Unit, way: Way) -> int:
        """The part that a unit is in, or its state."""
        if way.what == "saved":
            return int(cut.placed.at[self.levels.parts[unit[0]].first])
        return int(cut.placed.home[self.states(unit)[0]])

    def least_state(
        self, way: Way, units: Sequence[Unit], over: int, exceeds: Callable[[Sequence[Unit]], int]
    ) -> Sequence[Unit]:
        """The units whose state is parked so that a limit is kept: of few units those whose trips take the least time,
        of many as few as it takes; all where even that does not do.

        Args:
            way: how it is parked.
            units: of one part.
            over: the bytes by which the limit is exceeded.
            exceeds: the same with the state of some units parked.
        """
        if len(units) <= _FEW:
            every = [some for count in range(len(units)) for some in combinations(units, count)]
            freeing = [some for some in every if sum(map(self.updated, some)) >= over]
            freeing.sort(key=lambda some: self.longer(way._replace(units=some)))
            return next((some for some in freeing if not exceeds(some)), units)
        ranked = sorted(units, key=self.updated, reverse=True)
        # The more state is away, the less is held.
        return ranked[: bisect_left(range(len(ranked)), 0, key=lambda count: -exceeds(ranked[:count]))]

    def ranked(self, units: Sequence[Unit]) -> list[Unit]:
        """Units by what it takes to free a byte with them; of about equally dear ones the earlier first, as they free
        it for longer."""
        levels = self.levels
        dear = {unit: levels.seconds(unit) / max(levels.freed(unit), 1) for unit in units}
        order = sorted(units, key=dear.__getitem__)
        found: list[Unit] = []
        while order:
            least = _EQUAL * dear[order[0]]
            equal = [unit for unit in units if unit in order and dear[unit] <= least]
            found += equal
            order = [unit for unit in order if dear[unit] > least]
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

    def longer(self, way: Way) -> float:
        """Seconds by which a step is reckoned to be longer."""
        if way.to is None:
            return sum(map(self.levels.seconds, way.units))
        source = next((device for device in self.sources if device != way.to), way.to)
        if source == way.to:
            return 0.0
        if way.what != "saved":  # what comes in and what goes out pass each other
            link = self.topology.link(str(source), str(way.to))
            trips = sum([len(self.states(unit)) for unit in way.units])
            return sum(map(self.updated, way.units)) / link.bytes_per_second + trips * link.latency
        nbytes = sum([self.levels.parts[path].saved for unit in way.units for path in unit]) * self.parts
        return _PARKED * nbytes / self.topology.link(str(source), str(way.to)).bytes_per_second

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
    def issued(self) -> float:
        """Seconds that one host thread takes to issue all operators."""
        return sum(self.levels.step.issued)

    @cached_property
    def seconds(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """By operator, its seconds where it is."""
        step = self.levels.step
        found = np.zeros(len(step.net.ops))
        for number, device in enumerate(step.devices):
            if not device.is_host:
                those = step.at == number
                found[those] = np.array(step.seconds(device, self.topology))[those]
        return found
