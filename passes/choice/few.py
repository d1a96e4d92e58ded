"""Every placement of a few modules, reckoned at once: each module on any device, kept, parked or recomputed.

::

    rows       by module and kind, the bytes that are away, by operator      -▁▃▃▁-
    stored     by placement, which rows count: a matrix of ones              0 1 0 0 1 0
    held       what a part holds with everything kept, less stored @ rows; its largest value is compared with a limit
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from graphir.ir.device import CPU, Device

from .drafts import Way
from .levels import Unit
from .reckoning import Cut, Reckoning

__all__ = ["Fate", "Few", "Reckoned"]

Fate: TypeAlias = Literal["keep", "again", "park"]
"""What becomes of what a module saves."""

_MOST: Final = 4_000
"""How many placements are reckoned at most."""


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
        chain: the devices.
        fates: what may become of what a module saves.
    """

    def __init__(
        self, reckoning: Reckoning, units: Sequence[str], chain: tuple[Device, ...], fates: Sequence[Fate]
    ) -> None:
        self.reckoning, self.units, self.chain, self.fates = reckoning, tuple(units), chain, tuple(fates)

    @property
    def count(self) -> int:
        """How many placements there are."""
        return int((len(self.chain) * len(self.fates)) ** len(self.units))

    @property
    def many(self) -> bool:
        """Whether there are too many of them, or none."""
        return not self.units or len(self.units) > _MOST.bit_length() or self.count > _MOST

    def reckoned(self) -> Iterator[list[Reckoned]]:
        """All placements, those at a time that have modules on the same devices."""
        stored = list(product(range(len(self.fates)), repeat=len(self.units)))
        ones = np.eye(len(self.fates), dtype=np.float64)[np.array(stored)]  # by placement, module and fate
        rows, hopes = (self.rows(hopes=hopes) for hopes in (False, True))
        for at in product(range(len(self.chain)), repeat=len(self.units)):
            yield self.at(at, stored, ones, rows, hopes)

    def at(
        self,
        at: Sequence[int],
        stored: Sequence[Sequence[int]],
        ones: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        hopes: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    ) -> list[Reckoned]:
        """The placements with modules on some devices."""
        reckoning, parts = self.reckoning, np.array(at)
        cut = reckoning.cut_into(dict(zip(self.units, at, strict=True)), self.chain)
        limits = reckoning.limits(cut, {})
        over, hoped = np.zeros(len(stored), np.int64), np.zeros(len(stored), np.int64)
        park = self.fates.index("park") if "park" in self.fates else -1
        for part in range(len(self.chain)):
            live = (cut.placed.state[part] + cut.placed.live[part]).astype(np.float64)
            here, there = parts == part, (parts + 1) % len(self.chain) == part
            which = ones[:, here].reshape(len(stored), -1)
            away = which @ rows[here].reshape(which.shape[1], len(live))
            least = which @ hopes[here].reshape(which.shape[1], len(live))
            hoped += np.maximum((live + least).max(1).astype(np.int64) - limits[part], 0)
            if park >= 0 and len(self.chain) > 1:
                away -= ones[:, there, park] @ rows[there, park]
            over += np.maximum((live + away).max(1).astype(np.int64) - limits[part], 0)
        busy, issued = reckoning.plain(cut)
        added = [
            [reckoning.added(self.way(path, part, fate)) if fate != "keep" else None for fate in self.fates]
            for path, part in zip(self.units, at, strict=True)
        ]
        found = []
        for k, kinds in enumerate(stored):
            some = [one for row, kind in zip(added, kinds, strict=True) if (one := row[kind]) is not None]
            seconds = reckoning.total(busy, issued, some)
            found.append(Reckoned(int(over[k]), int(hoped[k]), seconds, cut, self.ways(at, kinds)))
        return found

    def rows(self, *, hopes: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """By module and fate, the bytes that are away, by operator, below 0."""
        holding, reckoning = self.reckoning.holding, self.reckoning
        found = np.zeros((len(self.units), len(self.fates), holding.count))
        for i, path in enumerate(self.units):
            for k, fate in enumerate(self.fates):
                if fate != "keep":
                    found[i, k] = holding.away(*reckoning.gap((path,), again=fate == "again", hopes=hopes))
        return found

    def way(self, path: str, part: int, fate: Fate) -> Way:
        """What becomes of what one module saves: what is parked of one part is on the next device, or on the host."""
        away = self.chain[(part + 1) % len(self.chain)] if len(self.chain) > 1 else CPU
        return Way(((path,),), None if fate == "again" else away)

    def ways(self, at: Sequence[int], kinds: Sequence[int]) -> tuple[Way, ...]:
        """What modules store otherwise."""
        found: dict[Device | None, list[Unit]] = {}
        for path, part, kind in zip(self.units, at, kinds, strict=True):
            if (fate := self.fates[kind]) != "keep":
                found.setdefault(self.way(path, part, fate).to, []).append((path,))
        return tuple(
            [Way(tuple(paths), to) for to, paths in sorted(found.items(), key=lambda pair: str(pair[0] or ""))]
        )
