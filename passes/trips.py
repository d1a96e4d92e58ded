"""When what is parked has to set out for home: late, so that it does not take memory for nothing, and in time.

The clock of a device is counted in bytes: those that its operators touch, one after the other. While a copy of *n*
bytes crosses, they touch some multiple of *n*. The copies of one route follow each other, so each of them ends before
the next one begins, and before it is needed. From the last to the first, each gets the latest such time. Where a route
cannot keep up, memory goes before time: no copy sets out more than :data:`QUEUED` times as long before as it takes::

    operators   |  c5  |    c4    | c3 | c2 |     c1     |
    needed                          ^a        ^b
    copies            [ a          ][   b    ]

State goes back where a phase has used it. At most two trips of it are under way at a time: the next one sets out when
the last but one has gone back (:func:`two_at_a_time`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

from graphir.analysis.cost import work
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.size import Dims

__all__ = ["QUEUED", "Clock", "Stay", "Trip", "most_at_once", "toll", "two_at_a_time"]

_PEER: Final = 10
"""Bytes that a gpu's operators touch while one byte crosses to a peer: 4.8 TB/s of memory beside NVLink's 450 GB/s each
way (H200)."""

_HOST: Final = 80
"""The same while one byte crosses to or from the host: beside 63 GB/s of PCIe 5.0 x16."""

QUEUED: Final = 2
"""How many times as long as it takes a copy may set out before it is needed."""


_RIDERS: Final = 16
"""A trip takes others along that together have this share of its bytes."""


def toll(away: Device) -> int:
    """Bytes that a device's operators touch while one byte crosses to or from where it is parked."""
    return _HOST if away.is_host else _PEER


class Trip(NamedTuple):
    """A copy to where a storage is used.

    Attributes:
        storage: what comes.
        needed: the position of its first reader.
        earliest: the first position before which the copy may stand.
        ends: the position before which it goes home again; -1 of what stays until its last reader.
    """

    storage: str
    needed: int
    earliest: int
    ends: int = -1


class Stay(NamedTuple):
    """Bytes that a device holds at positions ``start <= position < end``."""

    start: int
    end: int
    nbytes: int


def two_at_a_time(trips: Iterable[tuple[Trip, int]], nbytes: Callable[[str], int]) -> Iterator[tuple[Trip, int]]:
    """For each trip of state to one device, and the position before which its copy would stand, a position at which at
    most one other is under way, or that of its first reader.

    What goes to one operator is one trip. Trips of few bytes go with a larger one before them: biases, which come after
    weights, would leave a link idle in one direction.

    Args:
        trips: in the order in which they are needed.
        nbytes: of a storage.
    """
    ended: list[int] = []
    room = most = riders = 0
    for needed, together in groupby(trips, key=lambda pair: pair[0].needed):
        group = list(together)
        size, ends = sum(nbytes(trip.storage) for trip, _ in group), max(trip.ends for trip, _ in group)
        if ended and riders + size <= most // _RIDERS:
            riders += size
            ended[-1] = max(ended[-1], ends)
        else:
            latest = sorted(ended)[-2:]
            room = latest[0] if len(latest) == 2 else 0
            ended = [*latest, ends]
            most, riders = size, 0
        for trip, at in group:
            yield trip, min(max(at, room), needed)


def most_at_once(stays: Iterable[Stay]) -> int:
    """The most bytes that stay at one position."""
    changes: dict[int, int] = defaultdict(int)
    for start, end, nbytes in stays:
        changes[start] += nbytes
        changes[end] -= nbytes
    return max(accumulate([changes[position] for position in sorted(changes)]), default=0)


class Clock:
    """The operators of a device that compute, and the bytes that they touch.

    Args:
        positions: of the operators, ascending.
        touched: by operator, the bytes.
    """

    def __init__(self, positions: Sequence[int], touched: Iterable[int]) -> None:
        self.positions, self.times = positions, list(accumulate(touched, initial=0))

    @classmethod
    def of(cls, net: Net, device: Device, dims: Dims) -> Clock:
        """The clock of a device."""
        busy = [i for i, op in enumerate(net.ops) if op.device == device and not op.effects.shows and op.kind != "copy"]
        return cls(busy, [work(net.ops[i], net, dims).nbytes for i in busy])

    @staticmethod
    def before(free: float, needed: float, cost: float) -> float:
        """When a copy sets out that is needed then, and must be done when its route is *free* no more."""
        return max(min(free, needed) - cost, needed - QUEUED * cost)

    def latest(self, trips: Sequence[Trip], costs: Sequence[int], ahead: int | None) -> Iterator[tuple[Trip, int]]:
        """For each trip of one route, the position before which its copy stands, in the order in which they are needed.

        Args:
            trips: of the route.
            costs: by trip, how long it takes on this clock.
            ahead: how many operators before its first reader each copy begins; None: as many as the clock says.
        """
        found = []
        free: float = self.times[-1]
        for cost, trip in sorted(zip(costs, trips, strict=True), key=lambda pair: -pair[1].needed):
            reader = bisect_left(self.positions, trip.needed)
            if ahead is None:
                free = self.before(free, self.times[reader], cost)
                begins = min(reader, max(bisect_right(self.times, free) - 1, 0))
            else:
                begins = max(reader - ahead, 0)
            at = self.positions[begins] if begins < len(self.positions) else trip.needed
            found.append((trip, max(min(at, trip.needed), trip.earliest)))
        return reversed(found)
