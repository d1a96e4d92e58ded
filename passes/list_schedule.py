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

A micro-batch is *let in* on a device before its first operator there that allocates. With a limit of bytes, it is let
in when these fit: what is live, what begun forwards have still to allocate, what sums of gradients are still to come,
and the micro-batch with a backward of its own. One backward at a time is sure to fit then; another one begins if it
fits beside. Where all are kept waiting, the earliest is let in all the same, and the limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from .micro_work import FORWARD, INPUT, UPDATE, WEIGHT, Work
from .pipeline_needs import Needs

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


def list_schedule(work: Work, rules: Rules, needs: Needs | None = None) -> Schedule:
    """A schedule of all operators; *needs* where there are limits."""
    return _Simulation(work, rules, needs).run()


class _Room:
    """Who is on a device, and what is live there.

    Attributes:
        limit: of bytes; None where there is none.
        at_most: of micro-batches.
        left, left_forward, left_backward: by micro-batch, how many operators are not done.
        inside: micro-batches that are let in and not done.
        waiting: operators that are ready and not let in, by (whether of the forward, micro-batch).
        open: what is let in, by the same.
        live, copied, pool: bytes of storages but for copies; of copies; the most that copies took so far, which stay
            allocated as receive buffers.
        peak: the most bytes at once so far.
        sums: bytes of sums of gradients and the like that are still to come.
        growing: bytes that each begun forward has allocated so far.
        computing: the begun forwards of which more was executed than copies.
        stirred: something was freed or is done, or waits anew, since somebody was last let in.
        backwards: micro-batches whose backward is let in and not done; ``grown``: what these have allocated so far.
    """

    __slots__ = (
        "at_most",
        "backwards",
        "computing",
        "copied",
        "growing",
        "grown",
        "inside",
        "left",
        "left_backward",
        "left_forward",
        "limit",
        "live",
        "open",
        "peak",
        "pool",
        "stirred",
        "waiting",
    )

    def __init__(self, count: int, limit: int | None, at_most: int | None, base: int) -> None:
        self.limit, self.at_most = limit, at_most if at_most is not None else count
        self.left_forward, self.left_backward = [0] * count, [0] * count
        self.inside: set[int] = set()
        self.waiting: dict[tuple[bool, int], list[int]] = {}
        self.open: set[tuple[bool, int]] = set()
        self.live, self.copied, self.pool, self.peak = base, 0, 0, base
        self.growing: dict[int, int] = {}
        self.computing: set[int] = set()
        self.backwards: set[int] = set()
        self.grown = 0
        self.stirred = False


class _Simulation:
    def __init__(self, work: Work, rules: Rules, needs: Needs | None) -> None:
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
        self.spare: list[int] = []
        if self.gates:
            limits: Sequence[int | None] = rules.limits or [None] * devices
            most: Sequence[int | None] = rules.in_flight or [None] * devices
            base = work.bytes.base
            self.rooms = [_Room(count, limits[d], most[d], base[d]) for d in range(devices)]
            self.sizes, self.uses = work.bytes, list(work.bytes.uses)
            self._count()
        if self.limited and ranks[INPUT] < ranks[WEIGHT]:
            self.spare = self._needed_by_weights()

    def _count(self) -> None:
        work = self.work
        for place, kind, micro in zip(work.place, work.kind, work.micro, strict=True):
            if kind != UPDATE:
                room = self.rooms[place]
                (room.left_forward if kind == FORWARD else room.left_backward)[micro] += 1

    def _needed_by_weights(self) -> list[int]:
        """By device, what a gradient of a parameter takes until it is added to the sum of the others."""
        found, sizes = [0] * len(self.rooms), self.sizes
        for i, kind in enumerate(self.work.kind):
            if kind == WEIGHT:
                nbytes = sum([nbytes for _, nbytes, _ in sizes.made[i]]) + sizes.scratch[i]
                found[self.work.place[i]] = max(found[self.work.place[i]], 2 * nbytes)
        return found

    def run(self) -> Schedule:
        for i, missing in enumerate(self.missing):
            if not missing:
                self.becomes_ready(i)
        while True:
            if self.gates:
                for device, room in enumerate(self.rooms):
                    if room.stirred and room.waiting:
                        self.let_in(room, device)
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
                self.wait(room, segment, i)
                return
        self.push(i)

    @staticmethod
    def wait(room: _Room, segment: tuple[bool, int], i: int) -> None:
        """An operator is ready, and its segment is not let in."""
        room.waiting.setdefault(segment, []).append(i)
        room.stirred = True

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
            taken = self.fitting(ready) if self.spare else heappop(ready)
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
            self.close(room, ready)
        return None

    def fits(self, room: _Room, i: int) -> bool:
        """Whether an operator fits before gradients of parameters that could be computed instead."""
        kind, micro, place = self.work.kind[i], self.work.micro[i], self.work.place[i]
        if kind == INPUT:
            return self.fits_deferring(room, place, i)
        return (
            kind != FORWARD
            or micro in room.computing
            or room.inside == {micro}
            or (self.fits_forward(room, place, micro))
        )

    def close(self, room: _Room, ready: list[int]) -> None:
        """Let the forward of the best ready operator wait once more."""
        segment = self.segment[ready[0] % self.size]
        micro = self.work.micro[ready[0] % self.size]
        room.open.discard((True, micro))
        room.inside.discard(micro)
        while ready and ready[0] // self.size == segment:
            self.wait(room, (True, micro), heappop(ready) % self.size)

    def fits_deferring(self, room: _Room, device: int, i: int) -> bool:
        """Whether a backward operator fits while gradients of parameters are put off."""
        assert self.needs is not None and room.limit is not None
        nbytes = sum([nbytes for _, nbytes, _ in self.sizes.made[i]]) + self.sizes.scratch[i]
        held = self.needs.held[device]
        growing = sum([max(0, held - grown) for micro, grown in room.growing.items() if micro in room.computing])
        return room.live + room.pool + growing + nbytes + self.spare[device] <= room.limit

    # Who is let in.

    def enter(self, i: int) -> None:
        """An operator begins: it allocates."""
        sizes, kind, micro, rooms = self.sizes, self.work.kind[i], self.work.micro[i], self.rooms
        if kind == FORWARD and sizes.made[i] and self.work.lane[i] < len(rooms):
            rooms[self.work.place[i]].computing.add(micro)
        for device, nbytes, copy in sizes.made[i]:
            room = rooms[device]
            if copy:
                room.copied += nbytes
                room.pool = max(room.pool, room.copied)
            else:
                room.live += nbytes
            self.grow(room, kind, micro, nbytes)
        room = rooms[self.work.place[i]]
        top = room.live + room.pool + sizes.scratch[i]
        if top > room.peak:
            room.peak = top

    def leave(self, i: int) -> None:
        """An operator ends: what it used last is freed, and a micro-batch may be done."""
        sizes, uses, kind, micro = self.sizes, self.uses, self.work.kind[i], self.work.micro[i]
        for n in sizes.used[i]:
            uses[n] = left = uses[n] - 1
            if left:
                continue
            device, nbytes, copy = sizes.freed[n]
            room = self.rooms[device]
            room.stirred = True
            if copy:
                room.copied -= nbytes
            else:
                room.live -= nbytes
            self.grow(room, kind, micro, -nbytes)
        if kind == UPDATE:
            return
        room = self.rooms[self.work.place[i]]
        todo = room.left_forward if kind == FORWARD else room.left_backward
        todo[micro] -= 1
        if not todo[micro]:
            self.done(room, kind == FORWARD, micro)

    @staticmethod
    def done(room: _Room, forward: bool, micro: int) -> None:
        """A forward is done on a device, or a backward."""
        room.stirred = True
        if forward:
            room.growing.pop(micro, None)
            room.computing.discard(micro)
        else:
            room.backwards.discard(micro)
            if not room.backwards:
                room.grown = 0
        if not room.left_forward[micro] and not room.left_backward[micro]:
            room.inside.discard(micro)

    @staticmethod
    def grow(room: _Room, kind: int, micro: int, nbytes: int) -> None:
        if kind == FORWARD:
            if micro in room.growing:
                room.growing[micro] += nbytes
        elif kind != UPDATE and room.backwards:
            room.grown += nbytes

    def let_in(self, room: _Room, device: int) -> None:
        """Let in whoever fits: backwards before forwards, the earliest of each first."""
        for forward in (False, True):
            while waiting := [segment for segment in room.waiting if segment[0] == forward]:
                segment = min(waiting)
                fits = self.fits_forward(room, device, segment[1]) if forward else self.fits_backward(room, device)
                if not fits:
                    break
                self.open(room, segment)

    def open(self, room: _Room, segment: tuple[bool, int]) -> None:
        forward, micro = segment
        room.open.add(segment)
        if forward:
            room.inside.add(micro)
            room.growing.setdefault(micro, 0)
        else:
            room.backwards.add(micro)
        for i in room.waiting.pop(segment, ()):
            self.push(i)

    def coming(self, room: _Room, device: int, beside: int = -1) -> int:
        """Bytes that are live or sure to come: of begun forwards but one, and of sums of gradients what these take
        beyond what the first micro-batch leaves free when it is done."""
        assert self.needs is not None
        held, sums = self.needs.held[device], self.needs.sums[device]
        found = room.live + room.pool
        found += sum([max(0, held - grown) for micro, grown in room.growing.items() if micro != beside])
        return found + (max(0, sums - held) if not self.summed(room) else 0)

    @staticmethod
    def summed(room: _Room) -> bool:
        """Whether the first micro-batch is done, and the sums of gradients are there."""
        return not room.left_backward[0] and not room.left_forward[0]

    def fits_forward(self, room: _Room, device: int, micro: int) -> bool:
        """Whether a forward fits that computes nothing yet, and its backward behind it."""
        if len(room.inside - {micro}) >= room.at_most:
            return False
        if room.limit is None or self.needs is None:
            return True
        needs, grown = self.needs, room.growing.get(micro, 0)
        backward = needs.backward[device]
        going_on = min(max(room.grown, 0), backward) if room.backwards else 0
        wanted = max(needs.forward[device], needs.held[device] + backward - going_on) - grown
        return self.coming(room, device, micro) + wanted <= room.limit

    def fits_backward(self, room: _Room, device: int) -> bool:
        if room.limit is None or self.needs is None or not room.backwards:
            return True
        return self.coming(room, device) + self.needs.backward[device] <= room.limit

    def force(self) -> bool:
        """Let in the earliest of all who wait; false where nobody does."""
        waiting = [(micro, forward, d) for d, room in enumerate(self.rooms) for forward, micro in room.waiting]
        if not waiting:
            return False
        micro, forward, device = min(waiting)
        self.open(self.rooms[device], (forward, micro))
        return True
