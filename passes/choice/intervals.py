"""What a device is reckoned to hold that has neighbours of a level: of all that may be one part of a cut, at once.

::

    module        0    1    2    3
    own           ▁▂   ▂▅   ▅▆   ▂▁       by operator, what its operators make and hold: neighbours have the sum
    received      ▁         ▁             what others make, in buffers for copies
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphir.ir.touches import Flags, Numbers

from .holding import Gaps, Holding

__all__ = ["Interval", "Intervals"]


class Interval(NamedTuple):
    """What neighbours of a level come to on one device.

    Attributes:
        peak: the most bytes.
        stored: the same with all of something stored otherwise.
        nbytes: by replica, bytes of the copies that come.
        copies: how many there are.
    """

    peak: int
    stored: int
    nbytes: tuple[int, ...]
    copies: int


class Intervals:
    """Neighbours of one level.

    Args:
        holding: of the step.
        level: paths of modules, in the order of the forward.
    """

    def __init__(self, holding: Holding, level: Sequence[str]) -> None:
        self.holding, self.count = holding, len(level)
        self.replicas = holding.replicas[0]
        self.kinds = self.count * self.replicas
        table = [[replica * self.count + i for replica in range(self.replicas)] for i in range(self.count)]
        self.placed = holding.placed({path: i for i, path in enumerate(level)}, table, self.kinds)
        at, home = self.placed.at, self.placed.home
        self.state = self.summed(self.placed.state[:, None])
        self.live = self.summed(holding.own(at, home, self.placed.until, self.kinds).cumsum(1)[:, : holding.count])
        step, apart = holding.step, holding.apart(at, home)
        shared = np.zeros(len(home), np.bool_)
        shared[step.storage[apart]] = True
        those = shared[step.storage]
        self.ops, self.storages = step.op[those], step.storage[those]
        self.source = home[self.storages]
        self.to = np.where(apart[those], at[self.ops], self.source)
        self.changes: dict[tuple[tuple[int, ...], int, int], tuple[Numbers, Numbers, tuple[int, ...], int]] = {}
        self.found: dict[tuple[tuple[int, ...], int, int], Interval] = {}

    def summed(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """By replica and end, the sum of the rows of the modules before."""
        found = rows.reshape(self.replicas, self.count, -1).cumsum(1)
        return np.concatenate([np.zeros_like(found[:, :1]), found], 1)

    def spent(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """By replica and end, the seconds that the modules before compute; by operator, they are *seconds*."""
        found = np.zeros(self.kinds)
        np.add.at(found, self.placed.at, seconds)
        sums = found.reshape(self.replicas, self.count).cumsum(1)
        return np.concatenate([np.zeros((self.replicas, 1)), sums], 1)

    def away(self, gaps: Gaps) -> NDArray[np.int64]:
        """By replica, end and operator, the bytes of what is stored otherwise, below 0."""
        storage, start, end = gaps
        change, nbytes = np.zeros((self.kinds, self.holding.count + 1), np.int64), self.holding.step.nbytes[storage]
        np.subtract.at(change, (self.placed.home[storage], start), nbytes)
        np.add.at(change, (self.placed.home[storage], end), nbytes)
        return self.summed(change.cumsum(1)[:, : self.holding.count])

    def of(self, together: tuple[int, ...], begin: int, end: int, away: NDArray[np.int64] | None = None) -> Interval:
        """The neighbours from *begin* to the one before *end*.

        Args:
            together: the replicas that are on one device.
            away: what is stored otherwise, as :meth:`away` has it.
        """
        key = together, begin, end
        if away is None and key in self.found:
            return self.found[key]
        rows = list(together)
        ops, change, nbytes, copies = self.received(together, begin, end)
        state = int((self.state[rows, end] - self.state[rows, begin]).sum())
        live = (self.live[rows, end] - self.live[rows, begin]).sum(0)
        received = np.zeros(self.holding.count + 1, np.int64)
        np.add.at(received, ops, change)
        live += received.cumsum()[: self.holding.count]
        if away is None:
            peak = state + int(live.max())
            self.found[key] = Interval(peak, peak, nbytes, copies)
            return self.found[key]
        live += (away[rows, end] - away[rows, begin]).sum(0)
        return self.of(together, begin, end)._replace(stored=state + int(live.max()))

    def received(
        self, together: tuple[int, ...], begin: int, end: int
    ) -> tuple[Numbers, Numbers, tuple[int, ...], int]:
        """By how many bytes, and at which operators, the device holds more for others: in buffers for what they make,
        and until they have copied what its own operators make. The bytes that come by replica, and how many copies
        there are."""
        key = together, begin, end
        if key not in self.changes:
            holding, sizes = self.holding, self.holding.step.nbytes
            inside = np.zeros(self.kinds, np.bool_)
            for replica in together:
                inside[replica * self.count + begin : replica * self.count + end] = True
            to, source = inside[self.to], inside[self.source]
            come, first, last = self.ends(to & ~source)
            of = holding.replicas[2][come]
            nbytes = tuple([int(sizes[come][of == replica].sum()) for replica in range(self.replicas)])
            own, _, until = self.ends(to & source)
            other, leaves, _ = self.ends(source & ~to)
            left = np.zeros(len(sizes), np.int64)
            left[own] = until + 1
            left[other] = np.maximum(left[other], leaves + 1)
            own = own[holding.leaves[own]]
            room = holding.buffers(come, first, last)
            at = np.concatenate([[0], self.placed.until[own], left[own]])
            change = np.concatenate([[room], sizes[own], -sizes[own]])
            self.changes[key] = at, change, nbytes, len(come)
        return self.changes[key]

    def ends(self, those: Flags) -> tuple[Numbers, Numbers, Numbers]:
        """The storages of some touches, and of each the first and the last operator."""
        ops, storages = self.ops[those], self.storages[those]
        found, first = np.unique(storages, return_index=True)
        last = len(storages) - 1 - np.unique(storages[::-1], return_index=True)[1]
        return found, ops[first], ops[last]
