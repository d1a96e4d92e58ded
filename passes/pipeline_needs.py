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

__all__ = ["Needs", "comes_back", "most_in_flight", "needs_of"]

_SLACK = 0.1
"""Micro-batches: how much of one more it takes before one more is let in."""


class Needs(NamedTuple):
    """By device, at most for any micro-batch, bytes above what was there before it.

    Attributes:
        forward: the most that its forward takes at once.
        held: what its forward leaves behind.
        backward: the most that its backward takes at once above what is held, with sums of gradients there.
        first: the same of the first micro-batch, whose backward makes these sums.
        sums: what all of them leave behind.
    """

    forward: list[int]
    held: list[int]
    backward: list[int]
    first: list[int]
    sums: list[int]


def needs_of(work: Work) -> Needs:
    """What the micro-batches need, one after the other."""
    devices, sizes = len(work.devices), work.bytes
    order = sorted(range(len(work.micro)), key=lambda i: (work.micro[i], work.kind[i] != FORWARD, i))
    uses, live = list(sizes.uses), [0] * devices
    needs = Needs(*([0] * devices for _ in Needs._fields))
    start, held = [0] * devices, [0] * devices
    current = -1, False
    for i in order:
        if work.kind[i] == UPDATE:
            break
        if (now := (work.micro[i], work.kind[i] == FORWARD)) != current:
            _turn(needs, live, start, held, to_forward=now[1])
            current = now
        for device, nbytes, _ in sizes.made[i]:
            live[device] += nbytes
        place = work.place[i]
        top = live[place] + sizes.scratch[i]
        figure, base = (needs.forward, start) if now[1] else (needs.backward if now[0] else needs.first, held)
        figure[place] = max(figure[place], top - base[place])
        for n in sizes.used[i]:
            uses[n] -= 1
            if not uses[n]:
                device, nbytes, _ = sizes.freed[n]
                live[device] -= nbytes
    _turn(needs, live, start, held, to_forward=True)
    return needs


def _turn(needs: Needs, live: list[int], start: list[int], held: list[int], *, to_forward: bool) -> None:
    """Note what a forward has left behind, or a backward."""
    for device, nbytes in enumerate(live):
        if to_forward:
            needs.sums[device] = max(needs.sums[device], nbytes)
            start[device] = nbytes
        else:
            needs.held[device] = max(needs.held[device], nbytes - start[device])
            held[device] = nbytes


def comes_back(work: Work) -> bool:
    """Whether the forward comes back to a device that it has left: several stages are on one device."""
    devices = len(work.devices)
    runs = zip(work.micro, work.kind, work.lane, strict=True)
    found = [lane for micro, kind, lane in runs if micro == 0 and kind == FORWARD and lane < devices]
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
