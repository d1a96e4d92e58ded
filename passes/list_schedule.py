"""A list schedule of a step's operators: lanes that take the best ready operator, micro-batches that are let in.

Events are simulated. A lane that is free takes, of the operators that are ready, the one of the least rank of its kind,
then of the earliest micro-batch, then of the earliest position in the program. Ranks are what a schedule is:

    ===========  ==============================  ===================================================================
    gpipe        FORWARD  INPUT=WEIGHT  UPDATE   all forwards, then all backwards
    1f1b         INPUT=WEIGHT  FORWARD  UPDATE   backward first; a device takes only so many micro-batches at a time,
                                                 and finishes what it has begun
    zero_bubble  INPUT  FORWARD  WEIGHT  UPDATE  what other devices wait for first; gradients of parameters when there
                                                 is nothing else to do
    ===========  ==============================  ===================================================================

Where bytes or micro-batches are limited, these are let in on a device by :mod:`.rooms`. One backward at a time is sure
to fit then; another one begins if it fits beside. Where all are kept waiting, the earliest is let in all the same, and
the limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from .micro_work import FORWARD, INPUT, UPDATE, WEIGHT, Work
from .pipeline_needs import Need
from .rooms import Room, Segment

__all__ = ["RANKS", "Rules", "Schedule", "list_schedule"]

RANKS: Final[Mapping[str, tuple[int, int, int, int]]] = {
    "gpipe": (0, 1, 1, 2),
    "1f1b": (1, 0, 0, 2),
    "zero_bubble": (1, 0, 2, 3),
}
"""By schedule, the ranks of FORWARD, INPUT, WEIGHT and UPDATE."""


class Rules(NamedTuple):
    """What a schedule keeps to.

    Attributes:
        ranks: of each kind.
        in_flight: by device, how many micro-batches may be there at a time; None: any number.
        limits: by device, bytes, or None.
        finishes: a lane goes on with the micro-batch and kind that it has begun while any operator of these is ready.
    """

    ranks: tuple[int, int, int, int]
    in_flight: Sequence[int] | None = None
    limits: Sequence[int | None] | None = None
    finishes: bool = False


class Schedule(NamedTuple):
    """Attributes:
    order: the operators, in the order in which they begin.
    seconds: when the last one ends.
    peaks: by device, the most bytes at once; None where nobody asked.
    """

    order: list[int]
    seconds: float
    peaks: list[int] | None = None


def list_schedule(work: Work, rules: Rules, needs: Sequence[Need] | None = None) -> Schedule:
    """A schedule of all operators; *needs* where there are limits."""
    return _Simulation(work, rules, needs).run()


class _Simulation:
    def __init__(self, work: Work, rules: Rules, needs: Sequence[Need] | None) -> None:
        self.work, self.rules, self.needs = work, rules, needs
        self.limited = needs is not None and rules.limits is not None
        self.gates = self.limited or rules.in_flight is not None
        count, devices = work.count, len(work.devices)
        self.size = len(work.micro)
        ranks, size = rules.ranks, self.size
        self.segment = [ranks[k] * (count + 1) + m for k, m in zip(work.kind, work.micro, strict=True)]
        self.key = [segment * size + i for i, segment in enumerate(self.segment)]
        self.missing = list(map(len, work.earlier))
        self.ready: list[list[int]] = [[] for _ in range(work.lanes)]
        self.begun: list[list[int]] = [[] for _ in range(work.lanes)]
        self.current = [-1] * work.lanes
        self.busy = [False] * work.lanes
        self.events: list[tuple[float, int]] = []
        self.order: list[int] = []
        self.dirty: set[int] = set()
        self.now = 0.0
        if self.gates:
            limits: Sequence[int | None] = rules.limits or [None] * devices
            most: Sequence[int | None] = rules.in_flight or [None] * devices
            base = work.bytes.base
            of: Sequence[Need | None] = needs if self.limited and needs is not None else [None] * devices
            self.rooms = [Room(count, limits[d], most[d], base[d], of[d]) for d in range(devices)]
            self.sizes, self.uses = work.bytes, list(work.bytes.uses)
            self._count()
        self.defers = self.limited and ranks[INPUT] < ranks[WEIGHT]
        if self.defers:
            self._spare()

    def _count(self) -> None:
        work = self.work
        for place, kind, micro in zip(work.place, work.kind, work.micro, strict=True):
            if kind != UPDATE:
                room = self.rooms[place]
                (room.left_forward if kind == FORWARD else room.left_backward)[micro] += 1

    def _spare(self) -> None:
        for i, kind in enumerate(self.work.kind):
            if kind == WEIGHT:
                room = self.rooms[self.work.place[i]]
                room.spare = max(room.spare, 2 * self.sizes.taken(i))

    def run(self) -> Schedule:
        for i, missing in enumerate(self.missing):
            if not missing:
                self.becomes_ready(i)
        while True:
            if self.gates:
                for room in self.rooms:
                    if room.stirred and room.waiting:
                        self.let_in(room)
                    room.stirred = False
            dirty, self.dirty = sorted(self.dirty), set()
            for lane in dirty:
                self.start(lane)
            if not self.events and not (self.gates and self.force()):
                break
            self.advance()
        return Schedule(self.order, self.now, [room.peak for room in self.rooms] if self.gates else None)

    def advance(self) -> None:
        """Go on to the next moment at which operators end."""
        events, missing, work = self.events, self.missing, self.work
        if not events:
            return
        self.now = now = events[0][0]
        while events and events[0][0] == now:
            _, i = heappop(events)
            lane = work.lane[i]
            self.busy[lane] = False
            self.dirty.add(lane)
            if self.gates:
                self.leave(i)
            for other in work.later[i]:
                missing[other] -= 1
                if not missing[other]:
                    self.becomes_ready(other)

    def becomes_ready(self, i: int) -> None:
        if self.gates and self.sizes.made[i] and self.work.kind[i] != UPDATE:
            work = self.work
            forward, room = work.kind[i] == FORWARD, self.rooms[work.place[i]]
            gated = (self.limited or work.lane[i] < len(self.rooms)) if forward else self.limited
            segment = forward, work.micro[i]
            if gated and segment not in room.open:
                room.wait(segment, i)
                return
        self.push(i)

    def push(self, i: int) -> None:
        lane = self.work.lane[i]
        heappush(self.begun[lane] if self.segment[i] == self.current[lane] else self.ready[lane], self.key[i])
        if not self.busy[lane]:
            self.dirty.add(lane)

    def start(self, lane: int) -> None:
        """Let a free lane take an operator."""
        if self.busy[lane]:
            return
        begun, ready = self.begun[lane], self.ready[lane]
        if begun:
            i = heappop(begun) % self.size
        elif ready:
            taken = self.fitting(ready) if self.defers else heappop(ready)
            if taken is None:
                return
            i = taken % self.size
            if self.rules.finishes:
                self.current[lane] = segment = self.segment[i]
                while ready and ready[0] // self.size == segment:
                    begun.append(heappop(ready))
        else:
            return
        self.busy[lane] = True
        self.order.append(i)
        if self.gates:
            self.enter(i)
        heappush(self.events, (self.now + self.work.seconds[i], i))

    def fitting(self, ready: list[int]) -> int | None:
        """Take the best ready operator. Where that would take what gradients of parameters need, take one that computes
        these, and frees what they follow from; without one, a forward waits until it fits."""
        kind, size = self.work.kind, self.size
        while ready:
            i = ready[0] % size
            room = self.rooms[self.work.place[i]]
            if room.limit is None or self.fits(room, i):
                return heappop(ready)
            if others := [key for key in ready if kind[key % size] == WEIGHT]:
                best = min(others)
                ready.remove(best)
                heapify(ready)
                return best
            if kind[i] == INPUT:
                return heappop(ready)
            self.turn_back(room, ready)
        return None

    def fits(self, room: Room, i: int) -> bool:
        """Whether an operator fits before gradients of parameters that could be computed instead."""
        kind, micro = self.work.kind[i], self.work.micro[i]
        if kind == INPUT:
            return room.fits_deferring(self.sizes.taken(i))
        begun = kind != FORWARD or micro in room.computing or room.inside == {micro}
        return begun or room.fits_forward(micro)

    def turn_back(self, room: Room, ready: list[int]) -> None:
        """Let the forward of the best ready operator wait once more."""
        segment = self.segment[ready[0] % self.size]
        micro = self.work.micro[ready[0] % self.size]
        room.turn_back(micro)
        while ready and ready[0] // self.size == segment:
            room.wait((True, micro), heappop(ready) % self.size)

    def enter(self, i: int) -> None:
        """An operator begins: it allocates."""
        sizes, kind, micro, rooms = self.sizes, self.work.kind[i], self.work.micro[i], self.rooms
        if kind == FORWARD and sizes.made[i] and self.work.lane[i] < len(rooms):
            rooms[self.work.place[i]].computing.add(micro)
        for device, nbytes, copy in sizes.made[i]:
            rooms[device].takes(nbytes, copy)
            if kind != UPDATE and not copy:
                rooms[device].grows(kind == FORWARD, micro, nbytes)
        room = rooms[self.work.place[i]]
        top = room.live + room.pool + sizes.top(i, self.uses)
        if top > room.peak:
            room.peak = top

    def leave(self, i: int) -> None:
        """An operator ends: what it used last is freed, and a segment may be done."""
        sizes, uses, kind, micro = self.sizes, self.uses, self.work.kind[i], self.work.micro[i]
        for n in sizes.used[i]:
            uses[n] = left = uses[n] - 1
            if left:
                continue
            device, nbytes, copy = sizes.freed[n]
            self.rooms[device].frees(nbytes, copy)
            if kind != UPDATE and not copy:
                self.rooms[device].grows(kind == FORWARD, micro, -nbytes)
        if kind != UPDATE:
            self.rooms[self.work.place[i]].goes_on(kind == FORWARD, micro)

    def let_in(self, room: Room) -> None:
        """Let in whoever fits: backwards before forwards, the earliest of each first."""
        for forward in (False, True):
            while waiting := [segment for segment in room.waiting if segment[0] == forward]:
                segment = min(waiting)
                if not room.fits(segment):
                    break
                self.open(room, segment)

    def open(self, room: Room, segment: Segment) -> None:
        for i in room.let_in(segment):
            self.push(i)

    def force(self) -> bool:
        """Let in the earliest of all who wait; false where nobody does."""
        waiting = [(micro, forward, d) for d, room in enumerate(self.rooms) for forward, micro in room.waiting]
        if not waiting:
            return False
        micro, forward, device = min(waiting)
        self.open(self.rooms[device], (forward, micro))
        return True
