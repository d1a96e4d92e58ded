"""Plans that a person would try: one pass or two over a level of the modules, each judged as the plan that it gives.

::

    recompute "layers[0:7]"                       each unit of a level, as few of them as it takes
    shift_modules {"layers[6:12]": gpu:1}         a contiguous cut at a level
    the two together                              a cut, and the least that is recomputed or parked behind it

Whether a plan keeps within limits, the plan says, and not what groups are reckoned to hold: a balance never refuses
what one of these keeps, and never hands back a longer step. What is cheap comes first: the program as it is, cuts
alone, then what is stored otherwise, the fastest first. Which cut, and how many units it takes, is reckoned
(:mod:`.holding`); where a plan holds more or less, the reckoning goes on with that in mind. What cannot be faster than
the fastest plan so far is not emitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, permutations, product
from math import inf
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError
from graphir.ir.device import CPU, Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.touches import Numbers

from ..base import build
from ..order import AHEAD
from ..recompute import Recompute
from ..shift_modules import ShiftModules
from .groups import Grouped, Wanted
from .holding import Gaps, Holding, Placed
from .levels import Levels, Unit
from .moves import ParkedQuietly
from .naming import patterns, storages_named
from .plans import Judged, Plans
from .problem import AGAIN, KEEP, Choice

__all__ = ["ByHand", "Draft", "Hand", "Way"]

_MOST_ORDERS: Final = 6
"""How many orders of unlike devices are tried."""

_CORRECTED: Final = 4
_CORRECTED_PARKED: Final = 2
"""How many plans of one way are judged, each corrected by what the one before holds: what is parked comes back as the
clock of a route says, which is not reckoned."""

_HOPELESS: Final = 1.1
"""How many times a limit may be reckoned to be held so that a plan is worth a look."""

_SWEEPS: Final = 2
"""How often every boundary between two devices is moved to where it is best."""

_MOST_PLACED: Final = 1_500
_FASTER: Final = 1.02
"""Where there are so few placements of modules, all are reckoned; and those judged that are reckoned to take no more
than so many times as long as the first that keeps within the limits."""

_EQUAL: Final = 1.05
"""How many times as dear as the cheapest a unit is that counts as equal: of equal units, the earlier one is first."""

_PARKED: Final = 0.2
"""The part of the time of copies to where something is parked that a step is reckoned to be longer by."""


class Way(NamedTuple):
    """What becomes of what some units save.

    Attributes:
        units: in the order of the forward.
        to: where it is parked; None: it is computed again.
    """

    units: tuple[Unit, ...] = ()
    to: Device | None = None


class Draft(NamedTuple):
    """A placement as a person writes it.

    Attributes:
        moves: modules that move, each with its device.
        ways: what is stored otherwise.
    """

    moves: tuple[tuple[str, Device], ...] = ()
    ways: tuple[Way, ...] = ()


class Hand(NamedTuple):
    """A draft as a plan.

    Attributes:
        draft: what was written.
        program: placed.
        judged: what its plan comes to.
        says: which plan it is, for a report.
    """

    draft: Draft
    program: Program
    judged: Judged
    says: str


class _Cut(NamedTuple):
    """Where modules are.

    Attributes:
        moves: those that move.
        devices: by part of *placed*, its device.
        placed: what the parts hold.
    """

    moves: tuple[tuple[str, Device], ...]
    devices: tuple[Device, ...]
    placed: Placed


_Tried: TypeAlias = "Generator[None, None, None]"
"""Yields whenever some work was done, so that whoever asks can stop."""


class ByHand:
    """Tries the plans of a person for one program.

    Args:
        program: to be placed.
        plans: that judge.
        levels: of its modules.
        wanted: what the caller says of a placement.
        pin: by pattern, where modules have to be.
        topology: how fast devices and links are.
        issue: seconds that one host thread takes to issue a copy.

    Attributes:
        best: the fastest so far that keeps within the limits.
        nearest: the one whose limits would have to be multiplied by the least.
    """

    def __init__(
        self,
        program: Program,
        plans: Plans,
        levels: Levels,
        wanted: Wanted,
        pin: Mapping[str, str | None],
        topology: Topology,
        issue: float = 0.0,
    ) -> None:
        self.issue = issue
        self.program, self.plans, self.levels, self.topology = program, plans, levels, topology
        self.wanted, self.pin, self.options = wanted, pin, wanted.options
        self.sources = [device for device in program.devices if not device.is_host]
        self.parts = micro_batches(program.step.blobs)
        self.known: dict[Draft, Hand | None] = {}
        self.cuts: dict[tuple[tuple[str, ...], tuple[Device, ...], tuple[int, ...]], _Cut] = {}
        self.gaps: dict[tuple[Unit, bool, bool], Gaps] = {}
        self.best: Hand | None = None
        self.nearest: Hand | None = None

    def tried(self) -> _Tried:
        """Try one plan after the other."""
        yield from self.judge(Draft())
        now = self.known[Draft()]
        chains = list(self.chains()) if "shift" in self.options else []
        if now is None or (not self.plans.excess(now.judged.peaks) and not chains):
            return  # nothing that is stored otherwise takes less time
        places = [(tuple(level), chain) for level in self.levels.cuts() for chain in chains]
        for place in places:
            cut = yield from self.cheapest(*place, Way())
            yield from self.least(cut, Way())
        if not self.plans.excess(now.judged.peaks):
            return
        yield from self.every_one(chains or [tuple(self.sources)])
        ways = list(self.ways())
        here = _Cut((), self.levels.step.devices, self.holding.now())
        yield from self.in_order([(here, way) for way in ways])
        for place in places:
            cuts = []
            for way in ways:
                cuts.append((yield from self.cheapest(*place, way)))
            yield from self.in_order(list(zip(cuts, ways, strict=True)))
        for level, chain in places:
            for end in range(1, len(level)) if len(chain) == 2 else ():
                if self.best is None:  # what a plan holds does not always grow from one cut to the next
                    yield from self.judge(Draft(self.cut(level, chain, (end,)).moves))

    def every_one(self, chains: Sequence[tuple[Device, ...]]) -> _Tried:
        """Judge placements of a few modules, each of them on any device and stored in any way, in the order in which
        they are reckoned to be fast."""
        for level in self.levels.depths():
            units = [path for path in level if self.levels.parts[path].state]
            for chain in chains[:1] if len(self.sources) == 1 else ():
                kinds = ["keep", *(["again"] if "recompute" in self.options else [])]
                kinds += ["park"] if "park" in self.options else []
                if not units or (len(chain) * len(kinds)) ** len(units) > _MOST_PLACED:
                    continue
                drafts: list[tuple[bool, float, int, Draft]] = []
                for at in product(range(len(chain)), repeat=len(units)):
                    cut = self.cut_at(tuple(units), chain, at)
                    limits = self.limits(cut, {})
                    for stored in product(kinds, repeat=len(units)):
                        ways = self.ways_of(units, chain, at, stored)
                        over = bool((self.peaks(cut, ways) > limits).any())
                        if not over or not (self.peaks(cut, ways, hopes=True) > limits).any():
                            drafts.append((over, self.cost(cut, ways), len(drafts), Draft(cut.moves, ways)))
                    yield
                yield from self.fastest_of(drafts)

    def fastest_of(self, drafts: Sequence[tuple[bool, float, int, Draft]]) -> _Tried:
        """Judge drafts, each with whether limits are reckoned to be exceeded, and with its seconds: the fastest first,
        and while none is found, those that are over."""
        most = inf
        for over, cost, _, draft in sorted(drafts):
            if cost > most or (over and self.best is not None):
                continue
            yield from self.judge(draft)
            hand = self.known[draft]
            if hand is not None and not self.plans.excess(hand.judged.peaks):
                most = min(most, _FASTER * cost)

    def ways_of(
        self, units: Sequence[str], chain: Sequence[Device], at: Sequence[int], stored: Sequence[str]
    ) -> tuple[Way, ...]:
        """What modules store otherwise: what is parked of one part is on the next device, or on the host."""
        found: dict[Device | None, list[Unit]] = {}
        for path, part, kind in zip(units, at, stored, strict=True):
            if kind != "keep":
                away = chain[(part + 1) % len(chain)] if len(chain) > 1 else CPU
                found.setdefault(None if kind == "again" else away, []).append((path,))
        return tuple(
            [Way(tuple(paths), to) for to, paths in sorted(found.items(), key=lambda pair: str(pair[0] or ""))]
        )

    def cut_at(self, units: tuple[str, ...], chain: tuple[Device, ...], at: tuple[int, ...]) -> _Cut:
        """Modules, each on a device of its own choice."""
        return self.cut_into(dict(zip(units, at, strict=True)), chain)

    def cut_into(self, part_of: Mapping[str, int], chain: tuple[Device, ...]) -> _Cut:
        """Modules on the devices of their parts; what is pinned to one of these, there."""
        parts = {device: number for number, device in enumerate(chain)}
        pins = self.wanted.pins
        part_of = {path: parts.get(pins.get(path, chain[part]), part) for path, part in part_of.items()}
        moves = [(path, chain[part]) for path, part in part_of.items() if chain[part] != self.sources[0]]
        return _Cut(tuple(moves), chain, self.holding.placed(part_of, len(chain)))

    def in_order(self, tries: Sequence[tuple[_Cut, Way]]) -> _Tried:
        """Look for the least of some ways, those first that are reckoned to keep within the limits, and of these the
        fastest."""
        ranked = []
        for number, (cut, way) in enumerate(tries):
            some, over = self.fewest(cut, way, {})
            ranked.append((over, self.longer(some), number))
            yield
        for over, _, number in sorted(ranked):
            if over <= 0 or self.best is None:
                yield from self.least(*tries[number])

    # What a plan comes to.

    def judge(self, draft: Draft) -> _Tried:
        """Know what a draft comes to as a plan; None where a pass refuses it."""
        if draft not in self.known:
            self.known[draft] = self.made(draft)
            yield

    def made(self, draft: Draft) -> Hand | None:
        """A draft as a plan."""
        try:
            program = self.placed(draft)
            judged = self.plans.judged(program, timed=draft == Draft())
        except PassError:
            return None  # a pattern that the pass refuses, or what cannot be repeated
        hand = Hand(draft, program, judged, self.says(draft))
        if self.plans.excess(judged.peaks):
            if self.nearest is None or self.factor(hand) < self.factor(self.nearest):
                self.nearest = hand
        elif self.best is None or judged.seconds < self.best.judged.seconds:
            self.best = hand
        return hand

    def placed(self, draft: Draft) -> Program:
        """The program with the passes of a draft.

        Raises:
            PassError: one of these refuses it.
        """
        found = self.program
        going = {pattern: str(device) for device, named in _by_device(draft.moves) for pattern in named} | dict(
            self.pin
        )
        if going:
            found = build(ShiftModules, modules=going).recorded(found)
        for units, to in draft.ways:
            if to is None:
                found = build(Recompute, what=self.named(found, units)).recorded(found)
                continue
            paths, taken = [path for unit in units for path in unit], found.step.blobs
            what = patterns(paths, taken) + [path for path in paths if not patterns([path], taken)]
            found = build(ParkedQuietly, what=what, to=str(to)).recorded(found)
        return found

    def named(self, program: Program, units: Sequence[Unit]) -> list[str]:
        """How units that are recomputed are named: modules by patterns, neighbours that are one unit by what they
        save."""
        single = [unit[0] for unit in units if len(unit) == 1]
        found = patterns(single, program.step.blobs)
        unnamed = [path for path in single if not patterns([path], program.step.blobs)]
        storages = [storage for unit in units if len(unit) > 1 for storage in self.levels.storages(unit)]
        storages += [storage for path in unnamed for storage in self.levels.storages((path,))]
        return [*found, *(storages_named(program, storages, "recompute") if storages else ())]

    def says(self, draft: Draft) -> str:
        """Which plan a draft is."""
        said = [f"{', '.join(named)} on {device}" for device, named in _by_device(draft.moves)]
        for units, to in draft.ways:
            named = ", ".join(patterns([path for unit in units for path in unit]))
            several = max(map(len, units))
            each = f", {several} at a time" if several > 1 else ", each" if len(units) > 1 else ""
            said.append(f"recompute of {named}{each}" if to is None else f"{named} parked on {to}")
        return "; ".join(said) or "as it is"

    def factor(self, hand: Hand) -> float:
        """What limits have to be multiplied by so that a plan keeps within them."""
        peaks = hand.judged.peaks
        return max([peaks.get(str(device), 0) / max(limit, 1) for device, limit in self.plans.limits.items()])

    # What is reckoned.

    @cached_property
    def holding(self) -> Holding:
        """What reckons what devices hold."""
        return Holding(self.levels.step)

    def peaks(self, cut: _Cut, ways: Sequence[Way], *, hopes: bool = False) -> Numbers:
        """By part of a cut, the most bytes that it is reckoned to hold; who *hopes* takes what is parked to be nowhere
        meanwhile, which is so where it is away while the others hold little."""
        gaps = []
        for units, to in ways:
            part = cut.devices.index(to) if to in cut.devices and not hopes else -1
            for unit in units:
                key = unit, to is None, hopes
                if key not in self.gaps:
                    storages = self.levels.storages(unit) if to is None else self.levels.saved(unit)
                    ahead = 0 if to is None or hopes else AHEAD
                    self.gaps[key] = self.holding.gaps(storages, together=to is None, ahead=ahead)
                gaps.append((self.gaps[key], part))
        return self.holding.peaks(cut.placed, gaps)

    def limits(self, cut: _Cut, more: Mapping[Device, int]) -> Numbers:
        """By part of a cut, the most bytes that it may be reckoned to hold."""
        limits = [self.plans.limits.get(device, 1 << 62) - more.get(device, 0) for device in cut.devices]
        return np.array(limits, np.int64)

    def fewest(self, cut: _Cut, way: Way, more: Mapping[Device, int]) -> tuple[Way, int]:
        """As few units of a way as are reckoned to keep devices within their limits, and the bytes by which limits are
        exceeded all the same: where all units do not do, those with which a device holds the least.

        Args:
            cut: where modules are.
            way: all units.
            more: by device, what a plan was found to hold beyond what is reckoned.
        """
        limits = self.limits(cut, more)
        over = np.maximum(cut.placed.peaks - limits, 0)
        chosen: set[Unit] = set()
        for part in np.flatnonzero(over).tolist():
            units = [unit for unit in way.units if self.part(cut, unit) == part and cut.devices[part] != way.to]
            found: list[tuple[int, int]] = []
            ranked = self.ranked(units)
            for count in range(1, len(ranked) + 1):
                peak = self.peaks(cut, [way._replace(units=tuple(ranked[:count]))])[part]
                found.append((max(int(peak - limits[part]), 0), count))
                if peak <= limits[part]:
                    break
            over[part], count = min(found, default=(int(over[part]), 0))
            chosen.update(ranked[:count])
        return way._replace(units=tuple([unit for unit in way.units if unit in chosen])), int(over.sum())

    def part(self, cut: _Cut, unit: Unit) -> int:
        """The part that a unit is in."""
        return int(cut.placed.at[self.levels.parts[unit[0]].first])

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

    def longer(self, way: Way) -> float:
        """Seconds by which a step is reckoned to be longer."""
        if way.to is None:
            return sum(map(self.levels.seconds, way.units))
        source = next((device for device in self.sources if device != way.to), way.to)
        if source == way.to:
            return 0.0
        nbytes = sum([self.levels.parts[path].saved for unit in way.units for path in unit]) * self.parts
        return _PARKED * nbytes / self.topology.link(str(source), str(way.to)).bytes_per_second

    def beaten(self, way: Way) -> bool:
        """Whether no plan can be faster than the best that stores so otherwise: devices compute all of it."""
        if self.best is None or way.to is not None or not way.units:
            return False
        return self.least_seconds + self.longer(way) / self.count >= self.best.judged.seconds

    @property
    def count(self) -> int:
        """How many devices there may be."""
        return max(len({*self.sources, *self.wanted.devices}), 1)

    @cached_property
    def least_seconds(self) -> float:
        """Seconds of all operators, shared by all devices."""
        return float(self.seconds.sum()) / self.count

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

    # What is stored otherwise.

    def ways(self) -> Iterator[Way]:
        """What may be stored otherwise, all of it."""
        levels = self.levels
        if "recompute" in self.options:
            yield from [Way(tuple(units)) for units in levels.recomputed()]
        if "park" in self.options:
            peers = [device for device in self.wanted.devices if device not in self.sources]
            for level in levels.depths():
                saving = tuple([(path,) for path in level if levels.parts[path].saved])
                yield from [Way(saving, to) for to in (*peers[:1], CPU) if saving and self.reaches(to)]

    def reaches(self, to: Device) -> bool:
        """Whether copies go there from all devices, and back."""
        try:
            for device in {*self.sources, *self.wanted.devices} - {to}:
                self.topology.link(str(device), str(to))
                self.topology.link(str(to), str(device))
        except GraphirError:
            return False
        return True

    def least(self, cut: _Cut, way: Way) -> _Tried:
        """Judge the plan with the fewest units of a way that keeps within the limits."""
        more: dict[Device, int] = {}
        for _ in range(_CORRECTED if way.to is None else _CORRECTED_PARKED):
            some, over = self.fewest(cut, way, more)
            draft = Draft(cut.moves, (some,) if some.units else ())
            given = sum([limit for limit in self.limits(cut, {}).tolist() if limit < 1 << 62])
            if draft in self.known or over > (_HOPELESS - 1) * given or self.beaten(some):
                return
            yield from self.judge(draft)
            hand = self.known[draft]
            if hand is None:
                return
            reckoned = self.peaks(cut, [some]).tolist()
            for device, nbytes in zip(cut.devices, reckoned, strict=True):
                more[device] = hand.judged.peaks.get(str(device), 0) - nbytes

    # Cuts.

    def chains(self) -> Iterator[tuple[Device, ...]]:
        """The orders in which parts of the model are on devices: one where these are alike."""
        usable = list(dict.fromkeys((*self.sources, *self.wanted.devices)))
        if len(self.sources) != 1 or len(usable) < 2:
            return
        alike = len({self.likeness(device) for device in usable}) == 1
        yield from [tuple(usable)] if alike else list(permutations(usable))[:_MOST_ORDERS]

    def likeness(self, device: Device) -> tuple[object, ...]:
        """What tells devices apart."""
        return self.plans.limits.get(device), self.topology.speed(str(device)).model_dump_json()

    def cut(self, level: tuple[str, ...], chain: tuple[Device, ...], ends: tuple[int, ...]) -> _Cut:
        """A level cut into contiguous parts."""
        key = level, chain, ends
        if key not in self.cuts:
            parts = [level[begin:end] for begin, end in pairwise((0, *ends, len(level)))]
            part_of = {path: number for number, paths in enumerate(parts) for path in paths}
            self.cuts[key] = self.cut_into(part_of, chain)
        return self.cuts[key]

    def cheapest(self, level: tuple[str, ...], chain: tuple[Device, ...], way: Way) -> Generator[None, None, _Cut]:
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

    def price(self, cut: _Cut, way: Way) -> tuple[int, int, float]:
        """What decides between cuts: by how many bytes limits are exceeded with all of a way, and without, and
        seconds."""
        limits = self.limits(cut, {})
        plain = int(np.maximum(cut.placed.peaks - limits, 0).sum())
        over = plain
        if way.units and plain:
            over = int(np.maximum(self.peaks(cut, [way]) - limits, 0).sum())
        return over, plain, self.cost(cut, ())

    def cost(self, cut: _Cut, ways: Sequence[Way]) -> float:
        """Seconds that a step is reckoned to take: what is computed, copied and issued, one after the other; where
        micro-batches flow, what the busiest device computes."""
        spent = np.bincount(cut.placed.at, self.seconds, len(cut.devices))
        busy = float(spent.max() if self.parts > 1 else spent.sum())
        pace = min([self.topology.link(str(a), str(b)).bytes_per_second for a, b in pairwise(cut.devices)], default=1.0)
        step, copies = self.levels.step, cut.placed.copies
        issued = sum(step.issued)
        for way in ways:
            busy += self.longer(way)
            for unit in way.units:
                storages = self.gaps[unit, way.to is None, False].storage.tolist()
                if way.to is None:
                    issued += sum([step.issued[step.makers[k]] for k in storages])
                else:
                    copies += 2 * len(storages)
        return max(busy + cut.placed.crossing / pace, issued + self.issue * copies)

    def even(self, level: Sequence[str], chain: Sequence[Device]) -> tuple[int, ...]:
        """Where parts end that hold as much of a level as their devices' shares of the limits."""
        parts = self.levels.parts
        sums = list(accumulate([parts[path].state + parts[path].saved for path in level], initial=0))
        limits = [self.plans.limits.get(device, 0) for device in chain]
        shares = [share / max(sum(limits), 1) for share in accumulate(limits)][:-1]
        found: list[int] = []
        for number, share in enumerate(shares):
            least, most = (found[-1] if found else 0) + 1, len(level) - len(shares) + number
            found.append(min(range(least, most + 1), key=lambda end: abs(sums[end] - share * sums[-1])))
        return tuple(found)

    # As a choice of groups.

    def said(self, hand: Hand, grouped: Grouped) -> Choice:
        """What is nearest to a plan among the choices of some groups."""
        problem, going = grouped.problem, dict(hand.draft.moves)
        number = {name: i for i, name in enumerate(problem.devices)}
        stored = {
            path: AGAIN if to is None else number.get(str(to), problem.host)
            for units, to in hand.draft.ways
            for unit in units
            for path in unit
        }
        devices, kept = [], []
        for units, group in zip(grouped.units, problem.groups, strict=True):
            lineages = [lineage(unit.module) for unit in units]
            at = next((going[path] for line in lineages for path in reversed(line) if path in going), None)
            devices.append(group.now if at is None else number[str(at)])
            found = {next((stored[path] for path in line if path in stored), KEEP) for line in lineages}
            kept.append(found.pop() if len(found) == 1 else KEEP)
        return Choice(tuple(devices), tuple(kept))


def _by_device(moves: Sequence[tuple[str, Device]]) -> list[tuple[Device, list[str]]]:
    """By device, patterns of the modules that move there."""
    found: dict[Device, list[str]] = defaultdict(list)
    for path, device in moves:
        found[device].append(path)
    return [(device, patterns(paths)) for device, paths in found.items()]
