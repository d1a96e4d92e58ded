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
from itertools import groupby
from typing import NamedTuple

from .micro_work import FORWARD, UPDATE, Work

__all__ = ["Need", "comes_back", "most_in_flight", "needs_of"]

_SLACK = 0.1
"""Micro-batches: how much of one more it takes before one more is let in."""


class Need(NamedTuple):
    """On one device, at most for any micro-batch, bytes above what was there before it, but for those of copies.

    Attributes:
        forward: the most that its forward takes at once.
        held: what its forward leaves behind.
        backward: the most that its backward takes at once above what is held; but for the first micro-batch, whose
            backward makes the sums of gradients.
        sums: what all of them leave behind.
        held_copies: what its forward leaves behind in copies.
        copies: the most that copies take at once, which stays allocated as receive buffers.
    """

    forward: int
    held: int
    backward: int
    sums: int
    held_copies: int
    copies: int

    @property
    def least(self) -> int:
        """What one micro-batch after the other takes."""
        return self.sums + max(self.forward, self.held + self.backward) + self.copies


class _Needs:
    """The figures of :class:`Need`, by device, while micro-batches go by one after the other.

    Attributes:
        live, copied: bytes at present, but for copies and of copies.
        start, held: what was live before the current forward and before the current backward; ``before``: of copies.
        figures: at most, so far.
    """

    def __init__(self, devices: int) -> None:
        self.figures = {name: [0] * devices for name in Need._fields}
        self.live, self.copied, self.start, self.held, self.before = ([0] * devices for _ in range(5))

    def raise_to(self, figure: str, device: int, nbytes: int) -> None:
        """A figure is at least so much."""
        self.figures[figure][device] = max(self.figures[figure][device], nbytes)

    def turn(self, *, to_forward: bool) -> None:
        """Note what a forward has left behind, or a backward."""
        for device, nbytes in enumerate(self.live):
            if to_forward:
                self.raise_to("sums", device, nbytes)
                self.start[device], self.before[device] = nbytes, self.copied[device]
            else:
                self.raise_to("held", device, nbytes - self.start[device])
                self.raise_to("held_copies", device, self.copied[device] - self.before[device])
                self.held[device] = nbytes


def needs_of(work: Work) -> list[Need]:
    """What the micro-batches need on each device, one after the other."""
    sizes, place, needs = work.bytes, work.place, _Needs(len(work.devices))
    live, copied, before, figures = needs.live, needs.copied, needs.before, needs.figures
    segments = [2 * micro + (kind != FORWARD) for micro, kind in zip(work.micro, work.kind, strict=True)]
    order = sorted(range(len(segments)), key=segments.__getitem__)
    uses, current = list(sizes.uses), (-1, False)
    most, base = figures["forward"], needs.start
    for i in order:
        if work.kind[i] == UPDATE:
            break
        if (now := (work.micro[i], work.kind[i] == FORWARD)) != current:
            needs.turn(to_forward=now[1])
            current = now
            most, base = (figures["forward"], needs.start) if now[1] else (figures["backward"], needs.held)
        for device, nbytes, copy in sizes.made[i]:
            if copy:
                copied[device] += nbytes
                figures["copies"][device] = max(figures["copies"][device], copied[device] - before[device])
            else:
                live[device] += nbytes
        if now[0] or now[1]:
            device = place[i]
            top = live[device] + sizes.top(i, uses) - base[device]
            if top > most[device]:
                most[device] = top
        for n in sizes.used[i]:
            uses[n] -= 1
            if not uses[n]:
                device, nbytes, copy = sizes.freed[n]
                (copied if copy else live)[device] -= nbytes
    needs.turn(to_forward=True)
    return [Need(*of) for of in zip(*figures.values(), strict=True)]


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
