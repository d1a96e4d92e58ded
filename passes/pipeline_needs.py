r"""What a micro-batch takes where it runs: bytes, and the time for which it is on its way.

Bytes are those of the micro-batches one after the other, on each device::

    bytes
      |            /\              need of the backward: above what is held
      |     /-----/  \
      |    /  held    \
      |   /            \_____     sums of gradients, which stay
      +------------------------- time
        forward   |  backward
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from .micro_work import FORWARD, UPDATE, Work

__all__ = ["Need", "comes_back", "most_in_flight", "needs_of"]

_SLACK = 0.1
"""Micro-batches: how much of one more it takes before one more is let in."""


class Need(NamedTuple):
    """On one device, at most for any micro-batch, bytes above what was there before it.

    Attributes:
        forward: the most that its forward takes at once.
        held: what its forward leaves behind.
        backward: the most that its backward takes at once above what is held; but for the first micro-batch, whose
            backward makes the sums of gradients.
        sums: what all of them leave behind.
    """

    forward: int
    held: int
    backward: int
    sums: int


class _Needs:
    """The figures of :class:`Need`, by device, while micro-batches go by one after the other."""

    def __init__(self, devices: int) -> None:
        self.forward, self.held, self.backward, self.sums = ([0] * devices for _ in Need._fields)
        self.start, self.holds = [0] * devices, [0] * devices

    def turn(self, live: Sequence[int], *, to_forward: bool) -> None:
        """Note what a forward has left behind, or a backward."""
        for device, nbytes in enumerate(live):
            if to_forward:
                self.sums[device] = max(self.sums[device], nbytes)
                self.start[device] = nbytes
            else:
                self.held[device] = max(self.held[device], nbytes - self.start[device])
                self.holds[device] = nbytes

    def top(self, device: int, nbytes: int, micro: int, *, forward: bool) -> None:
        """Note what is live at once."""
        if forward or micro:
            figure, base = (self.forward, self.start) if forward else (self.backward, self.holds)
            figure[device] = max(figure[device], nbytes - base[device])


def needs_of(work: Work) -> list[Need]:
    """What the micro-batches need on each device, one after the other."""
    sizes, live = work.bytes, [0] * len(work.devices)
    order = sorted(range(len(work.micro)), key=lambda i: (work.micro[i], work.kind[i] != FORWARD, i))
    uses, needs = list(sizes.uses), _Needs(len(work.devices))
    current = -1, False
    for i in order:
        if work.kind[i] == UPDATE:
            break
        if (now := (work.micro[i], work.kind[i] == FORWARD)) != current:
            needs.turn(live, to_forward=now[1])
            current = now
        for device, nbytes, _ in sizes.made[i]:
            live[device] += nbytes
        place = work.place[i]
        needs.top(place, live[place] + sizes.top(i, uses), now[0], forward=now[1])
        for n in sizes.used[i]:
            uses[n] -= 1
            if not uses[n]:
                device, nbytes, _ = sizes.freed[n]
                live[device] -= nbytes
    needs.turn(live, to_forward=True)
    return list(map(Need, needs.forward, needs.held, needs.backward, needs.sums))


def comes_back(work: Work) -> bool:
    """Whether the forward comes back to a device that it has left: several stages are on one device."""
    devices = len(work.devices)
    runs = zip(work.micro, work.kind, work.lane, work.bytes.made, strict=True)
    found = [lane for micro, kind, lane, made in runs if made and micro == 0 and kind == FORWARD and lane < devices]
    visits = [place for place, _ in groupby(found)]
    return len(visits) > len(set(visits))


def most_in_flight(work: Work) -> list[int]:
    """By device, how many micro-batches have to be on their way so that the busiest device is never idle.

    A micro-batch is on its way on a device from its first forward operator there to its last backward operator. That is
    a longest path: other devices work on it meanwhile, one after the other or side by side.
    """
    devices = len(work.devices)
    free, busy = [0.0] * work.lanes, [0.0] * work.lanes
    enters, leaves = [math.inf] * devices, [0.0] * devices
    ends: dict[int, float] = {}
    for i, micro in enumerate(work.micro):
        if micro != 0:
            continue
        lane, place = work.lane[i], work.place[i]
        start = max([free[lane], *[ends.get(other, 0.0) for other in work.earlier[i]]])
        ends[i] = free[lane] = start + work.seconds[i]
        busy[lane] += work.seconds[i]
        if lane < devices and (work.kind[i] != FORWARD or work.bytes.made[i]):
            enters[place], leaves[place] = min(enters[place], start), max(leaves[place], ends[i])
    bottleneck = max(busy)
    return [
        max(1, math.ceil((leave - enter) / bottleneck - _SLACK)) if leave > enter else 1
        for enter, leave in zip(enters, leaves, strict=True)
    ]
