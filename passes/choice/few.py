"""Every placement of a few modules, reckoned at once: each module in any part of a chain, kept, parked or recomputed,
alike in each replica.

::

    rows       by replica, module and kind, the bytes that are away, by operator      -▁▃▃▁-
    stored     by placement, which rows count: a matrix of ones                       0 1 0 0 1 0
    held       what a device holds with everything kept, less stored @ rows; its largest value is compared with a limit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from graphir.ir.device import CPU

from .chains import Chain, Target, goes
from .drafts import Way
from .holding import Gaps
from .levels import Unit
from .reckoning import Cut, Reckoning

__all__ = ["Fate", "Few", "Reckoned"]

Fate: TypeAlias = Literal["keep", "again", "park"]
"""What becomes of what a module saves."""

_MOST: Final = 4_000
_PLACES: Final = 256
"""How many placements are reckoned at most, and how many that have modules on other devices."""


class Reckoned(NamedTuple):
    """A placement as it is reckoned.

    Attributes:
        over: the bytes by which limits are exceeded.
        hoped: the same, if what is parked is nowhere meanwhile.
        seconds: of a step.
        cut: where modules are.
        ways: what is stored otherwise.
    """

    over: int
    hoped: int
    seconds: float
    cut: Cut
    ways: tuple[Way, ...]


class Few:
    """Placements of a few modules.

    Args:
        reckoning: of the program.
        units: the modules.
        chain: the devices of parts.
        fates: what may become of what a module saves.
    """

    def __init__(self, reckoning: Reckoning, units: Sequence[str], chain: Chain, fates: Sequence[Fate]) -> None:
        self.reckoning, self.units, self.chain, self.fates = reckoning, tuple(units), chain, tuple(fates)

    @property
    def count(self) -> int:
        """How many placements there are."""
        return int((self.chain.parts * len(self.fates)) ** len(self.units))

    @property
    def many(self) -> bool:
        """Whether there are too many of them, or none."""
        few = 0 < len(self.units) <= _MOST.bit_length()
        return not few or self.count > _MOST or self.chain.parts ** len(self.units) > _PLACES

    def reckoned(self) -> Iterator[list[Reckoned]]:
        """All placements, those at a time that have modules on the same devices."""
        stored = list(product(range(len(self.fates)), repeat=len(self.units)))
        ones = np.eye(len(self.fates), dtype=np.float64)[np.array(stored)]  # by placement, module and fate
        for at in product(range(self.chain.parts), repeat=len(self.units)):
            yield self.at(at, stored, ones)

    def at(
        self,
        at: Sequence[int],
        stored: Sequence[Sequence[int]],
        ones: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    ) -> list[Reckoned]:
        """The placements with modules in some parts."""
        reckoning = self.reckoning
        cut = reckoning.cut_into(dict(zip(self.units, at, strict=True)), self.chain)
        limits = reckoning.limits(cut, {})
        rows, hopes = (self.rows(cut, hopes=hopes) for hopes in (False, True))
        over, hoped = np.zeros(len(stored), np.int64), np.zeros(len(stored), np.int64)
        park = self.fates.index("park") if "park" in self.fates else -1
        columns, to = self.chain.columns, [self.away(part) for part in range(self.chain.parts)]
        for number, device in enumerate(cut.devices):
            live = (cut.placed.state[number] + cut.placed.live[number]).astype(np.float64)
            away, least = np.zeros((len(stored), len(live))), np.zeros((len(stored), len(live)))
            for replica in range(len(rows)):
                on = [columns[part][replica] for part in at]
                here = np.array([one == device for one in on])
                there = np.array([(goes(to[part], one) or one) == device for part, one in zip(at, on, strict=True)])
                which = ones[:, here].reshape(len(stored), -1)
                away += which @ rows[replica, here].reshape(which.shape[1], len(live))
                least += which @ hopes[replica, here].reshape(which.shape[1], len(live))
                if park >= 0 and there.any():
                    away -= ones[:, there, park] @ rows[replica, there, park]
            hoped += np.maximum((live + least).max(1).astype(np.int64) - limits[number], 0)
            over += np.maximum((live + away).max(1).astype(np.int64) - limits[number], 0)
        busy, issued = reckoning.plain(cut)
        added = [
            [reckoning.added(self.way(path, part, fate), cut) if fate != "keep" else None for fate in self.fates]
            for path, part in zip(self.units, at, strict=True)
        ]
        found = []
        for k, kinds in enumerate(stored):
            some = [one for row, kind in zip(added, kinds, strict=True) if (one := row[kind]) is not None]
            seconds = reckoning.total(busy, issued, some)
            found.append(Reckoned(int(over[k]), int(hoped[k]), seconds, cut, self.ways(at, kinds)))
        return found

    def rows(self, cut: Cut, *, hopes: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """By replica, module and fate, the bytes that are away, by operator, below 0."""
        holding, reckoning = self.reckoning.holding, self.reckoning
        replicas, _, of = holding.replicas
        found = np.zeros((replicas, len(self.units), len(self.fates), holding.count))
        for i, path in enumerate(self.units):
            for k, fate in enumerate(self.fates):
                if fate != "keep":
                    storage, start, end = reckoning.gap((path,), again=fate == "again", hopes=hopes)
                    for replica in range(replicas):
                        own = of[storage] == replica
                        found[replica, i, k] = holding.away(cut.placed, Gaps(storage[own], start[own], end[own]))
        return found

    def away(self, part: int) -> Target:
        """Where what is parked of a part is: where the next part is, or on the host."""
        return self.chain.behind(part) if self.chain.parts > 1 else CPU

    def way(self, path: str, part: int, fate: Fate) -> Way:
        """What becomes of what one module saves."""
        return Way(((path,),), None if fate == "again" else self.away(part))

    def ways(self, at: Sequence[int], kinds: Sequence[int]) -> tuple[Way, ...]:
        """What modules store otherwise."""
        found: dict[Target | None, list[Unit]] = {}
        for path, part, kind in zip(self.units, at, kinds, strict=True):
            if (fate := self.fates[kind]) != "keep":
                found.setdefault(self.way(path, part, fate).to, []).append((path,))
        return tuple(
            [Way(tuple(paths), to) for to, paths in sorted(found.items(), key=lambda pair: str(pair[0] or ""))]
        )
