"""Contiguous cuts of a level, and the cheapest of them.

What a part holds, computes and receives follows from its own modules, whatever the others are. So the cheapest cut in
three or more parts is found part by part: of those that end at one module, the ones that no other beats go on. Where
that does not hold, or takes too long, boundaries move one by one to where it is best.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import accumulate, combinations, pairwise, product
from math import comb
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .chains import Chain
from .drafts import Way
from .intervals import Intervals
from .reckoning import Cut, Reckoning

__all__ = ["Cuts"]

_SWEEPS: Final = 2
"""How often every boundary between two devices is moved to where it is best."""

_EVERY: Final = 100
_EXACT: Final = 4_000_000
"""How many cuts are looked at one by one at most; and up to how many pairs of an operator and a run of neighbours the
cheapest one is found part by part."""

_Found: TypeAlias = "Generator[None, None, Cut]"
"""Yields whenever some work was done, so that whoever asks can stop."""


class _Begun(NamedTuple):
    """The first parts of a cut.

    Attributes:
        over: bytes that exceed limits with all of a way, and without.
        costs: what a step takes: seconds of the busiest part, where micro-batches flow; seconds that are computed;
            copies; and by replica, the bytes of these.
        ends: where the parts end.
    """

    over: tuple[int, int]
    costs: tuple[float, ...]
    ends: tuple[int, ...]


class Cuts:
    """Cuts of one program.

    Args:
        reckoning: of the program.
    """

    def __init__(self, reckoning: Reckoning) -> None:
        self.reckoning = reckoning
        self.known: dict[tuple[tuple[str, ...], Chain, tuple[int, ...]], Cut] = {}
        self.intervals: dict[tuple[str, ...], Intervals] = {}
        self.ends: dict[tuple[tuple[str, ...], Chain, Way], list[tuple[int, ...]]] = {}

    def cut(self, level: tuple[str, ...], chain: Chain, ends: tuple[int, ...]) -> Cut:
        """A level cut into contiguous parts."""
        key = level, chain, ends
        if key not in self.known:
            parts = [level[begin:end] for begin, end in pairwise((0, *ends, len(level)))]
            part_of = {path: number for number, paths in enumerate(parts) for path in paths}
            self.known[key] = self.reckoning.cut_into(part_of, chain)
        return self.known[key]

    def cheapest(self, level: tuple[str, ...], chain: Chain, way: Way) -> _Found:
        """The cut of a level in as many parts as there are that is reckoned to exceed limits least with all of a way,
        to need the least of the way, and to take the least time."""
        chain = chain.first(len(level))
        every: list[tuple[int, ...]]
        if comb(len(level) - 1, chain.parts - 1) <= _EVERY:
            every = list(combinations(range(1, len(level)), chain.parts - 1))
        elif not self.is_exact(level, chain, Way()):
            return (yield from self.near(level, chain, way, self.even(level, chain)))
        else:
            every = yield from self.best(level, chain, Way())
            plain = min(every, key=lambda ends: self.price(self.cut(level, chain, ends), Way()))
            if not self.is_exact(level, chain, way):
                return (yield from self.near(level, chain, way, plain))
            if way.units and self.price(self.cut(level, chain, plain), Way())[1]:
                every = yield from self.best(level, chain, way)
        found = every[0]
        for ends in every[1:]:
            found = min(found, ends, key=lambda one: self.price(self.cut(level, chain, one), way))
            yield
        return self.cut(level, chain, found)

    def near(self, level: tuple[str, ...], chain: Chain, way: Way, ends: tuple[int, ...]) -> _Found:
        """A cut near another one, of which no boundary alone is better elsewhere."""
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
        limits = self.reckoning.limits(cut, {})
        plain = int(np.maximum(cut.placed.peaks - limits, 0).sum())
        over = plain
        if way.units and plain:
            over = int(np.maximum(self.reckoning.peaks(cut, [way]) - limits, 0).sum())
        return over, plain, self.reckoning.cost(cut, ())

    def even(self, level: Sequence[str], chain: Chain) -> tuple[int, ...]:
        """Where parts end that hold as much of a level as their devices' shares of the limits."""
        parts = self.reckoning.levels.parts
        sums = list(accumulate([parts[path].state + parts[path].saved for path in level], initial=0))
        given = self.reckoning.wanted.limits
        limits = [sum([given.get(device, 0) for device in dict.fromkeys(column)]) for column in chain.columns]
        shares = [share / max(sum(limits), 1) for share in accumulate(limits)][:-1]
        found: list[int] = []
        for number, share in enumerate(shares):
            least, most = (found[-1] if found else 0) + 1, len(level) - len(shares) + number
            found.append(min(range(least, most + 1), key=lambda end: abs(sums[end] - share * sums[-1])))
        return tuple(found)

    # All cuts.

    def is_exact(self, level: tuple[str, ...], chain: Chain, way: Way) -> bool:
        """Whether each part's share of the price follows from its own modules, and all parts are soon looked at."""
        reckoning, devices = self.reckoning, chain.devices
        runs = len(level) * (len(level) + 1) // 2
        if way.to is not None or runs * reckoning.holding.count > _EXACT:
            return False
        if not chain.is_apart or not reckoning.wanted.pins.keys().isdisjoint(level):
            return False
        return len({reckoning.pace(a, b) for a, b in product(devices, devices) if a != b}) == 1

    def best(self, level: tuple[str, ...], chain: Chain, way: Way) -> Generator[None, None, list[tuple[int, ...]]]:
        """Where the parts end of the cuts that exceed limits least and that no other cut beats in all that a step
        takes."""
        if (level, chain, way) not in self.ends:
            self.ends[level, chain, way] = yield from self.unbeaten(level, chain, way)
        return self.ends[level, chain, way]

    def unbeaten(self, level: tuple[str, ...], chain: Chain, way: Way) -> Generator[None, None, list[tuple[int, ...]]]:
        """The same, anew."""
        if level not in self.intervals:
            self.intervals[level] = Intervals(self.reckoning.holding, level)
        intervals = self.intervals[level]
        away = intervals.away(self.reckoning.gap_of(way)) if way.units else None
        parts = _Parts(self.reckoning, intervals, chain, away)
        begun = {0: [_Begun((0, 0), (0.0,) * (3 + intervals.replicas), ())]}
        for part in range(chain.parts):
            last = part == chain.parts - 1
            going: dict[int, list[_Begun]] = {}
            for end in [len(level)] if last else range(part + 1, len(level) - chain.parts + part + 2):
                begins = [begin for begin in begun if begin < end]
                going[end] = _unbeaten(
                    [parts.behind(one, part, begin, end) for begin in begins for one in begun[begin]]
                )
                yield
            begun = going
        return [one.ends[:-1] for one in begun[len(level)]]


class _Parts:
    """What parts add to a cut that has begun.

    Args:
        reckoning: of the program.
        intervals: of the level.
        chain: the devices.
        away: what is stored otherwise, as intervals have it.
    """

    def __init__(
        self,
        reckoning: Reckoning,
        intervals: Intervals,
        chain: Chain,
        away: NDArray[np.int64] | None,
    ) -> None:
        self.intervals, self.away = intervals, away
        self.flows = reckoning.parts > 1
        self.limits = reckoning.wanted.limits
        self.columns = [
            {device: tuple([r for r, at in enumerate(column) if at == device]) for device in column}
            for column in chain.columns
        ]
        self.spent = {device: intervals.spent(reckoning.spent(device)) for device in chain.devices}
        self.known: dict[tuple[int, int, int], _Begun] = {}

    def behind(self, one: _Begun, part: int, begin: int, end: int) -> _Begun:
        """What has begun with one more part: modules from *begin* to the one before *end*."""
        added = self.part(part, begin, end)
        over = one.over[0] + added.over[0], one.over[1] + added.over[1]
        rest = [a + b for a, b in zip(one.costs[1:], added.costs[1:], strict=True)]
        return _Begun(over, (max(one.costs[0], added.costs[0]), *rest), (*one.ends, end))

    def part(self, part: int, begin: int, end: int) -> _Begun:
        """One part alone."""
        key = part, begin, end
        if key not in self.known:
            over, plain, copies, busy = 0, 0, 0, 0.0
            nbytes = [0] * self.intervals.replicas
            for device, together in self.columns[part].items():
                limit = self.limits.get(device, 1 << 62)
                found = self.intervals.of(together, begin, end, self.away)
                over, plain = over + max(found.stored - limit, 0), plain + max(found.peak - limit, 0)
                nbytes = [a + b for a, b in zip(nbytes, found.nbytes, strict=True)]
                rows = self.spent[device][list(together)]
                busy = max(busy, float((rows[:, end] - rows[:, begin]).sum()))
                copies += found.copies
            most = busy if self.flows else 0.0
            self.known[key] = _Begun((over, plain), (most, busy, copies, *nbytes), (end,))
        return self.known[key]


def _unbeaten(found: Sequence[_Begun]) -> list[_Begun]:
    """Those that exceed limits least, without those that another one beats in every cost."""
    least = min(one.over for one in found)
    kept: list[_Begun] = []
    for one in sorted([one for one in found if one.over == least], key=lambda one: one.costs):
        if not any(all(a <= b for a, b in zip(other.costs, one.costs, strict=True)) for other in kept):
            kept.append(one)
    return kept
