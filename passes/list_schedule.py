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
to fit then; another one begins if it fits beside. A copy is kept back while it would take receive buffers, which stay,
beyond the limit. Where all are kept waiting, the earliest is let in all the same, and the limit is exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from .micro_work import INPUT, WEIGHT, Work
from .pipeline_needs import Need
from .rooms import Room, Segment

__all__ = ["RANKS", "ROUNDING", "UNBEATEN", "Beaten", "Rules", "Schedule", "list_schedule"]

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


class Beaten(NamedTuple):
    """From when on a schedule is of no use: nobody asks for the rest of it.

    Attributes:
        seconds: it takes longer.
    """

    seconds: float = math.inf


ROUNDING: Final = 1 + 1e-9
"""Sums of the same seconds in another order differ by less."""

UNBEATEN: Final = Beaten()
"""Any schedule is of use."""


class Schedule(NamedTuple):
    """Attributes:
    order: the operators, in the order in which they begin.
    seconds: when the last one ends, if lanes keep to the order and nobody waits for memory, as no executor does.
    peaks: by device, the most bytes at once; None where nobody asked.
    """

    order: list[int]
    seconds: float
    peaks: list[int] | None = None


def list_schedule(
    work: Work,
    rules: Rules,
    needs: Sequence[Need] | None = None,
    beaten: Beaten = UNBEATEN,
    granted: list[int] | None = None,
) -> Schedule | None:
    """A schedule of all operators; None if it is beaten.

    Args:
        work: the operators.
        rules: what the schedule keeps to.
        needs: what micro-batches need, where there are limits.
        beaten: what schedule is of no use.
        granted: by device, raised to the most bytes that were asked for and that keep within the limit. Limits from
            these to those of the rules make no difference.
    """
    simulation = _Simulation(work, rules, needs, beaten)
    found = simulation.run()
    if granted is not None:
        granted[:] = map(max, granted, [room.granted for room in simulation.rooms])
    return found


class _Simulation:
    """Attributes:
    gated: for each operator, whether it begins only once its segment is let in.
    segments: for each operator, that of its micro-batch; None: an update.
    held_up: devices on which a segment waits.
    due: by lane, until when its next operator has to begin for the schedule to be of use: all others come behind it.
    rooms: the devices, where what begins is to be let in; empty: all begins at once.
    limited: whether bytes are; ``defers``: and gradients of parameters come after forwards.
    free, ends: where bytes are limited, when each lane and each operator is done if nobody waits for memory.
    sent: copies that begin whether they fit or not, as nothing else can.
    forced_at: how many operators had begun when a segment was last let in that does not fit.
    """

    def __init__(self, work: Work, rules: Rules, needs: Sequence[Need] | None, beaten: Beaten) -> None:
        self.work, self.rules, self.beaten = work, rules, beaten
        self.lane, self.place, self.kind = work.lane, work.place, work.kind
        self.seconds = work.seconds
        self.size = len(work.micro)
        self.segment, self.key = work.ranked(rules.ranks)
        self.missing = list(work.waits)
        self.ready: list[list[int]] = [[] for _ in range(work.lanes)]
        self.begun: list[list[int]] = [[] for _ in range(work.lanes)]
        self.current = [-1] * work.lanes
        self.busy = [False] * work.lanes
        self.events: list[tuple[float, int]] = []
        self.order: list[int] = []
        self.dirty: set[int] = set()
        self.held_up: set[int] = set()
        self.now = 0.0
        self.due = [ROUNDING * beaten.seconds - load for load in work.loads]
        self.useless, self.forced_at = False, -1
        self.gated: list[bool] = []
        self.rooms: list[Room] = []
        limited = needs is not None and rules.limits is not None
        self.limited, self.sent = limited, set[int]()
        self.free, self.ends = [0.0] * work.lanes, [0.0] * self.size
        self.defers = limited and rules.ranks[INPUT] < rules.ranks[WEIGHT]
        if limited or rules.in_flight is not None:
            self._furnish(needs if limited else None)

    def _furnish(self, needs: Sequence[Need] | None) -> None:
        work, rules, devices = self.work, self.rules, len(self.work.devices)
        limits: Sequence[int | None] = rules.limits or [None] * devices
        in_flight: Sequence[int | None] = rules.in_flight or [None] * devices
        of: Sequence[Need | None] = needs or [None] * devices
        base = work.bytes.base
        self.rooms = [Room(work.counts[d], limits[d], in_flight[d], base[d], of[d]) for d in range(devices)]
        self.sizes, self.uses = work.bytes, list(work.bytes.uses)
        self.segments, self.gated = work.segments, work.entering if needs is None else work.allocating
        for room, nbytes in zip(self.rooms, work.most_for_weights if self.defers else (), strict=False):
            room.spare = 2 * nbytes

    def run(self) -> Schedule | None:
        for i, others in enumerate(self.missing):
            if not others:
                self.becomes_ready(i)
        events, missing, later, lanes, gated = self.events, self.missing, self.work.later, self.lane, self.gated
        ready, begun, segment, key, current = self.ready, self.begun, self.segment, self.key, self.current
        busy, dirty, rooms = self.busy, self.dirty, self.rooms
        while True:
            if self.held_up:
                self.let_in_who_fits()
            if len(dirty) == 1:
                self.start(dirty.pop())
            else:
                due = sorted(dirty)
                dirty.clear()
                for lane in due:
                    self.start(lane)
            if self.useless:
                return None
            if not events:
                if rooms and self.force():
                    continue
                break
            self.now = now = events[0][0]
            while events and events[0][0] == now:
                i = heappop(events)[1]
                lane = lanes[i]
                busy[lane] = False
                dirty.add(lane)
                if rooms:
                    self.leave(i)
                for other in later[i]:
                    missing[other] = left = missing[other] - 1
                    if left:
                        continue
                    if rooms and gated[other]:
                        self.becomes_ready(other)
                        continue
                    lane = lanes[other]  # as push does
                    heappush(begun[lane] if segment[other] == current[lane] else ready[lane], key[other])
                    if not busy[lane]:
                        dirty.add(lane)
        seconds = max(self.free, default=0.0) if self.limited else self.now
        if seconds > self.beaten.seconds:
            return None
        return Schedule(self.order, seconds, [room.peak for room in self.rooms] or None)

    def becomes_ready(self, i: int) -> None:
        if self.rooms and self.gated[i]:
            place, segment = self.place[i], self.segments[i]
            room = self.rooms[place]
            if segment is not None and segment not in room.open:
                room.wait(segment, i)
                self.held_up.add(place)
                return
        self.push(i)

    def push(self, i: int) -> None:
        lane = self.lane[i]
        heappush(self.begun[lane] if self.segment[i] == self.current[lane] else self.ready[lane], self.key[i])
        if not self.busy[lane]:
            self.dirty.add(lane)

    def start(self, lane: int) -> None:
        """Let a free lane take an operator."""
        if self.busy[lane]:
            return
        begun, ready = self.begun[lane], self.ready[lane]
        if self.limited and lane >= len(self.rooms):
            received = self.receivable(ready)
            if received is None:
                return
            i = received
        elif begun:
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
        if (self.planned(i, lane) if self.limited else self.now) > self.due[lane]:
            self.useless = True
        self.due[lane] += self.seconds[i]
        self.order.append(i)
        if self.rooms:
            self.enter(i)
        heappush(self.events, (self.now + self.seconds[i], i))

    def planned(self, i: int, lane: int) -> float:
        """When an operator that a lane takes now begins if nobody waits for memory."""
        ends, start = self.ends, self.free[lane]
        for other in self.work.hazards.earlier[i]:
            if ends[other] > start:
                start = ends[other]
        ends[i] = self.free[lane] = start + self.seconds[i]
        return start

    def receivable(self, ready: list[int]) -> int | None:
        """Take the best ready transfer that finds room where it goes, and keep back those before it."""
        while ready:
            i = heappop(ready) % self.size
            room = self.rooms[self.place[i]]
            if i in self.sent or all(room.receives(nbytes) for _, nbytes, copy in self.sizes.made[i] if copy):
                return i
            room.kept_back.append(i)
        return None

    def send_on(self, room: Room) -> None:
        """Let copies that were kept back be ready again."""
        ready, room.kept_back = room.kept_back, []
        for i in ready:
            self.push(i)

    def fitting(self, ready: list[int]) -> int | None:
        """Take the best ready operator. Where that would take what gradients of parameters need, take one that computes
        these, and frees what they follow from; without one, a forward waits until it fits."""
        kind, size = self.kind, self.size
        while ready:
            i = ready[0] % size
            if kind[i] >= WEIGHT:  # nothing that could be computed instead
                return heappop(ready)
            room = self.rooms[self.place[i]]
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
        """Whether an operator of a forward, or that others wait for, fits before gradients of parameters."""
        if self.kind[i] == INPUT:
            return room.fits_deferring(self.sizes.takes[i])
        micro = self.work.micro[i]
        begun = micro in room.computing or (len(room.inside) == 1 and micro in room.inside)
        return begun or micro in room.compelled or room.fits_forward(micro)

    def turn_back(self, room: Room, ready: list[int]) -> None:
        """Let the forward of the best ready operator wait once more."""
        segment = self.segment[ready[0] % self.size]
        micro, place = self.work.micro[ready[0] % self.size], self.work.place[ready[0] % self.size]
        room.turn_back(micro)
        while ready and ready[0] // self.size == segment:
            room.wait((True, micro), heappop(ready) % self.size)
        self.held_up.add(place)

    def enter(self, i: int) -> None:
        """An operator begins: it allocates."""
        sizes, place = self.sizes, self.place[i]
        room, made = self.rooms[place], sizes.made[i]
        if made:
            segment = self.segments[i]
            if segment is not None and segment[0] and self.lane[i] < len(self.rooms):
                room.computing.add(segment[1])
            for device, nbytes, copy in made:
                self.rooms[device].takes(nbytes, copy, segment)
        top = room.live
        if sizes.alters[i]:
            top += sizes.top(i, self.uses)
        if top > room.top:
            room.top = top

    def leave(self, i: int) -> None:
        """An operator ends: what it used last is freed, and a segment may be done."""
        sizes, uses, segment = self.sizes, self.uses, self.segments[i]
        for n in sizes.used[i]:
            uses[n] = left = uses[n] - 1
            if not left:
                device, nbytes, copy = sizes.freed[n]
                room = self.rooms[device]
                room.frees(nbytes, copy, segment)
                if copy and room.kept_back:
                    self.send_on(room)
        if segment is not None:
            self.rooms[self.place[i]].goes_on(segment)

    def let_in_who_fits(self) -> None:
        """Let in, on each device where somebody waits and something has changed, who fits."""
        rooms = self.rooms
        for place in sorted([place for place in self.held_up if rooms[place].stirred]):
            room = rooms[place]
            self.let_in(room)
            room.stirred = False
            if not room.waiting:
                self.held_up.discard(place)

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
        """Let in the earliest of all who wait, copies first; false where nobody does."""
        kept_back = [(self.key[i], i) for room in self.rooms for i in room.kept_back]
        if kept_back:
            i = min(kept_back)[1]
            self.sent.add(i)
            self.send_on(self.rooms[self.place[i]])
            return True
        waiting = [(micro, forward, d) for d, room in enumerate(self.rooms) for forward, micro in room.waiting]
        if not waiting:
            return False
        micro, forward, device = min(waiting)
        if forward and self.forced_at == len(self.order):  # let in before, and turned back since
            self.rooms[device].compelled.add(micro)
        self.forced_at = len(self.order)
        self.open(self.rooms[device], (forward, micro))
        return True
