"""What a choice comes to: when each task and copy of the step is executed, and what the devices hold.

Copies to a device follow each other, in the order in which what they bring is needed. A value that others read is
copied once to each device that reads it, and stays there until its last reader; such copies are received in buffers,
which are there throughout (:mod:`graphir.analysis.buffers`). What is parked comes back when the clock of :mod:`..trips`
says; where it leaves, it is freed some operators later, and its device waits then until it has left (:mod:`..order`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from graphir.ir.device import Device

from ..order import AHEAD
from ..trips import Clock, Trip, toll, two_at_a_time
from .flow import Flow
from .problem import AGAIN, Choice, Problem, Value

__all__ = ["Outcome", "Outcomes", "buffers"]


_MOST_KNOWN: Final = 50_000
"""How many outcomes are remembered at a time: some 100 MB, where a search goes on for an hour."""


class Outcome(NamedTuple):
    """What a choice comes to.

    Attributes:
        over: by how much limits are exceeded, in parts of them, summed up over devices; 0 if all hold.
        seconds: of a step.
        peaks: by device, the most bytes that it holds.
        busy: by device, the seconds for which it computes.
        crossing: by source and destination, the bytes that are copied.
    """

    over: float
    seconds: float
    peaks: tuple[int, ...]
    busy: tuple[float, ...]
    crossing: dict[tuple[int, int], int]


class _Copy:
    """A copy, or several that follow each other, how many they are, what they come after, and when they have ended."""

    __slots__ = ("after", "calls", "destination", "end", "seconds")

    def __init__(self, destination: int, seconds: float, after: _Copy | int) -> None:
        self.destination, self.seconds, self.after, self.end, self.calls = destination, seconds, after, 0.0, 1


class _Fact(NamedTuple):
    """A value, the other groups that touch it, and the last task that does."""

    value: Value
    others: tuple[int, ...]
    last: int


class _Facts:
    """What holds for all choices. Most values are kept where everything is that touches them: their bytes are summed up
    by group once, and a choice looks only at the others.

    Attributes:
        values: each with what is known of it.
        local: by group, how the bytes of its values change from task to task where all of them are kept there.
        again: by group, the values that are computed again with it.
        parks: by group, those that are parked with it.
        rebuilt: by group, those that it reads when it computes again.
        shared, homes, others: of values that other groups touch: their number, their own group, and each other one.
        flow: the tasks where micro-batches flow.
        tasks: by task, its group.
        rooms: by task, the bytes that it takes beyond values.
    """

    def __init__(self, problem: Problem) -> None:
        count, groups = len(problem.tasks), range(len(problem.groups))
        self.values = [self.fact(problem, value) for value in problem.values]
        self.local = np.zeros((len(groups), count + 1))
        self.again, self.parks, self.rebuilt = ([list[int]() for _ in groups] for _ in range(3))
        for i, (value, _, last) in enumerate(self.values):
            if value.counted:
                self.local[value.group, max(value.made, 0)] += value.nbytes
                self.local[value.group, last + 1] -= value.nbytes
            if value.again:
                self.again[value.group].append(i)
            if value.parks:
                self.parks[value.group].append(i)
            for group in value.rebuilds:
                self.rebuilt[group].append(i)
        pairs = [(i, fact.value.group, other) for i, fact in enumerate(self.values) for other in fact.others]
        self.shared, self.homes, self.others = np.array(pairs, dtype=np.intp).reshape(-1, 3).T
        self.flow = Flow(problem) if problem.parts > 1 else None
        self.tasks = np.array([task.group for task in problem.tasks], dtype=np.intp)
        self.rooms = np.array([task.room for task in problem.tasks], dtype=float)

    @staticmethod
    def fact(problem: Problem, value: Value) -> _Fact:
        groups = {problem.tasks[read].group for read in value.reads} | set(value.rebuilds)
        last = len(problem.tasks) - 1 if value.lasts else max([value.made, *value.reads])
        return _Fact(value, tuple(sorted(groups - {value.group})), last)

    def unlike(self, choice: Choice) -> list[int]:
        """The values of a choice that are not just kept where everything is that touches them, ascending."""
        devices = np.array(choice.devices)
        found = set(self.shared[devices[self.homes] != devices[self.others]].tolist())
        for group, stored in enumerate(choice.stored):
            if stored == AGAIN:
                found.update(self.again[group], self.rebuilt[group])
            elif stored >= 0:
                found.update(self.parks[group])
        return sorted(found)


class Outcomes:
    """Evaluates choices for one problem.

    Args:
        problem: what is to be placed.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[Choice, Outcome] = {}
        self._facts = _Facts(problem)

    def __call__(self, choice: Choice) -> Outcome:
        """What a choice comes to."""
        found = self._known.get(choice)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[choice] = _Step(self.problem, self._facts, choice).outcome()
        return found


class _Step:
    """The tasks, copies and bytes of one choice.

    Attributes:
        at: by task, its device.
        live: by device, how the bytes there change from task to task, beside what is kept where all of it is used.
        received: by device, of what copies bring, the first and the last task that reads it, and its bytes.
        copies: by task, the copies that are issued before it.
        needed: by task, the copies that it waits for.
        first: the same of what is computed again before it.
        again: by task, the group that is computed again before it.
        crossing: by source and destination, the bytes that are copied.
        lasting: by destination, of the copy that is issued last: before which task, from where, its bytes, and the last
            task that reads these at home.
        trips: by source and destination, what is parked and comes back.
    """

    def __init__(self, problem: Problem, facts: _Facts, choice: Choice) -> None:
        self.problem, self.facts, self.choice = problem, facts, choice
        devices, count = len(problem.devices), len(problem.tasks)
        chosen = choice.devices
        self.at = [chosen[task.group] for task in problem.tasks]
        self.live = [[0] * (count + 1) for _ in range(devices)]
        self.received: list[list[tuple[int, int, int]]] = [[] for _ in range(devices)]
        self.copies: dict[int, list[_Copy]] = defaultdict(list)
        self.needed: dict[int, list[_Copy]] = defaultdict(list)
        self.first: dict[int, list[_Copy]] = defaultdict(list)
        self.again = {
            problem.groups[group].again_at: group for group, stored in enumerate(choice.stored) if stored == AGAIN
        }
        self.crossing: dict[tuple[int, int], int] = defaultdict(int)
        self.lasting: dict[int, tuple[int, int, int, int]] = {}
        self.trips: dict[tuple[int, int], list[tuple[int, int, int, _Copy, list[int]]]] = defaultdict(list)

    def outcome(self) -> Outcome:
        """What the choice comes to."""
        devices, stored = self.choice.devices, self.choice.stored
        for number in self.facts.unlike(self.choice):
            value, others, last = self.facts.values[number]
            home, becomes = devices[value.group], stored[value.group]
            if value.counted:
                self.holds(home, -value.nbytes, value.made, last)
            rebuilt = [other for other in value.rebuilds if stored[other] == AGAIN]
            if value.again and becomes == AGAIN:
                self.repeated(value, home, last)
            elif becomes >= 0 and value.parks and becomes != home and value.late < len(value.reads):
                self.parked(value.nbytes, value.made, value.reads, value.late, home, becomes, rebuilt)
            elif any(devices[other] != home for other in others):
                self.kept(value, home, rebuilt)
            elif value.counted:
                groups = self.problem.groups
                self.holds(home, value.nbytes, value.made, max([last, *[groups[other].again_at for other in rebuilt]]))
        if self.choice.state:
            self.updated(self.choice.parked)
        self.come_back()
        self.linger()
        return self.summed()

    def repeated(self, value: Value, home: int, last: int) -> None:
        """A value that is freed, and computed again for those that read it later."""
        again = self.problem.groups[value.group].again_at
        cut = bisect_left(value.reads, again)
        self.holds(home, value.nbytes, value.made, max(value.made, value.reads[cut - 1] if cut else -1))
        self.holds(home, value.nbytes, again, max(again, last))

    def kept(self, value: Value, home: int, rebuilt: Sequence[int]) -> None:
        """A value that stays where it is made, with a copy on each other device that reads it."""
        at, elsewhere = self.at, dict[int, list[int]]()
        end = len(at) - 1 if value.lasts else value.made
        for read in (*value.reads, *[self.problem.groups[group].again_at for group in rebuilt]):
            if at[read] != home:
                elsewhere.setdefault(at[read], []).append(read)
            elif read > end:
                end = read
        for device, readers in elsewhere.items():
            begin = min(readers)
            copy = self.copied(home, device, value.nbytes, value.made, begin)
            self.receives(device, value.nbytes, begin, max(readers))
            end = max(end, begin)
            self.read_by(readers, copy)
        if value.counted:
            self.holds(home, value.nbytes, value.made, end)
            for device, readers in elsewhere.items():
                if min(readers) >= self.lasting.get(device, (-1, 0, 0, 0))[0]:
                    self.lasting[device] = min(readers), home, value.nbytes, end

    def read_by(self, readers: Sequence[int], copy: _Copy) -> None:
        """Let tasks wait for a copy, and what is computed again before them."""
        for read in readers:
            self.needed[read].append(copy)
            if read in self.again:
                self.first[read].append(copy)

    def holds(self, device: int, nbytes: int, first: int, last: int) -> None:
        live = self.live[device]
        live[max(first, 0)] += nbytes
        live[last + 1] -= nbytes

    def receives(self, device: int, nbytes: int, first: int, last: int) -> None:
        self.received[device].append((first, last, nbytes))

    def copied(self, source: int, destination: int, nbytes: int, after: _Copy | int, before: int) -> _Copy:
        """A copy that is issued before a task."""
        copy = _Copy(destination, self.problem.crossing(source, destination, nbytes), after)
        self.copies[before].append(copy)
        self.crossing[source, destination] += nbytes
        return copy

    def parked(
        self, nbytes: int, made: int, reads: Sequence[int], late: int, home: int, away: int, rebuilt: Sequence[int]
    ) -> None:
        """A saved value that leaves after its last reader of the forward."""
        at, groups = self.at, self.problem.groups
        leaves = max(made, reads[late - 1] if late else -1)
        elsewhere: dict[int, list[int]] = {}
        for read in reads[:late]:
            if at[read] != home:
                elsewhere.setdefault(at[read], []).append(read)
        back: list[int] = []
        there = leaves
        copied = set(elsewhere)
        for read in (*reads[late:], *[groups[group].again_at for group in rebuilt]):
            if at[read] in copied:
                elsewhere[at[read]].append(read)
            elif at[read] == away:
                there = max(there, read)
            else:
                back.append(read)
        for device, readers in elsewhere.items():
            copy = self.copied(home, device, nbytes, made, min(readers))
            self.receives(device, nbytes, min(readers), max(readers))
            self.read_by(readers, copy)
        out = self.copied(home, away, nbytes, leaves, leaves + 1)
        freed = self.later(home, leaves)
        self.holds(home, nbytes, made, freed)
        if freed + 1 < len(at):
            self.waits(home, freed + 1, out)
        if there > leaves or not back:
            self.holds(away, nbytes, leaves, there)
            for read in reads[late:]:
                if at[read] == away:
                    self.needed[read].append(out)
        if back:
            needed = min(back)
            copy = _Copy(home, self.problem.crossing(away, home, nbytes), out)
            self.crossing[away, home] += nbytes
            self.read_by(back, copy)
            self.trips[away, home].append((needed, leaves, nbytes, copy, [there, max(back)]))

    def updated(self, parked: Sequence[tuple[int, int]]) -> None:
        """State that comes for its update and goes back: what comes in and what goes out pass each other, in trips of
        which two are under way."""
        routes: dict[tuple[int, int], list[tuple[Trip, int]]] = defaultdict(list)
        sizes: dict[str, int] = {}
        for number, away in parked:
            group, home = self.problem.groups[number], self.choice.devices[number]
            first, last = group.update
            for source, to in ((away, home), (home, away)):
                copy = self.copied(source, to, group.updated, first - 1, first)
                copy.seconds += (group.copies - 1) * self.problem.latency[source][to]
                copy.calls = group.copies
                if to == home:
                    self.read_by([last], copy)
            for turn, nbytes in enumerate(group.trips):
                sizes[name := f"{number} {turn}"] = nbytes
                routes[home, away].append((Trip(name, first, 0, last), turn))
        coming: dict[int, list[tuple[Trip, int]]] = defaultdict(list)
        for (home, away), route in routes.items():
            cost, turns = toll(Device.parse(self.problem.devices[away])), {trip.storage: turn for trip, turn in route}
            trips = [trip for trip, _ in route]
            for trip, at in self.clock(home).latest(trips, [sizes[trip.storage] * cost for trip in trips], None):
                turn = turns[trip.storage]  # of one task, too, one trip comes before the other
                needed, ends = 2 * trip.needed + turn, 2 * trip.ends + turn + 1
                coming[home].append((Trip(trip.storage, needed, 0, ends), 2 * at))
        for home, found in coming.items():
            found.sort(key=lambda pair: pair[0].needed)
            for trip, at in two_at_a_time(found, sizes.__getitem__):
                self.holds(home, sizes[trip.storage], at // 2, (trip.ends - 1) // 2)

    def clock(self, device: int) -> Clock:
        """The clock of a device, by tasks."""
        positions = [position for position, at in enumerate(self.at) if at == device]
        return Clock(positions, [self.problem.tasks[position].touched for position in positions])

    def come_back(self) -> None:
        """Let what is parked set out for home, as late as it can."""
        for (away, home), trips in self.trips.items():
            clock = self.clock(home)
            positions, times = clock.positions, clock.times
            cost = toll(Device.parse(self.problem.devices[away]))
            free: float = times[-1]
            back: list[tuple[int, _Copy]] = []
            for needed, leaves, nbytes, copy, (there, last) in sorted(trips, key=lambda trip: -trip[0]):
                reader = times[bisect_left(positions, needed)]
                free = Clock.before(free, reader, nbytes * cost)
                begins = max(bisect_right(times, free) - 1, 0)
                position = positions[begins] if begins < len(positions) else needed
                position = max(min(position, needed), leaves + 1)
                back.append((position, copy))
                self.holds(home, nbytes, position, last)
                self.holds(away, nbytes, leaves, max(there, position))
            for position, copy in reversed(back):  # of those before one task, what is needed first is first
                self.copies[position].append(copy)

    def linger(self) -> None:
        """Hold what the last copy to a device brings there for some more operators at home: it is freed when nobody has
        to wait for that copy, which the next copy on that lane shows, or else so many operators."""
        for _, home, nbytes, end in self.lasting.values():
            last = self.later(home, end)
            if last > end:
                self.holds(home, nbytes, end + 1, last)

    def later(self, device: int, since: int) -> int:
        """The task of a device after which :data:`.order.AHEAD` operators of it have come since a task."""
        calls, last = 0, since
        for position in range(since + 1, len(self.at)):
            if calls >= AHEAD:
                break
            if self.at[position] == device:
                calls += self.problem.tasks[position].calls
                last = position
        return last

    def waits(self, device: int, since: int, copy: _Copy) -> None:
        """Let a device's next task wait for a copy."""
        for position in range(since, len(self.at)):
            if self.at[position] == device:
                self.needed[position].append(copy)
                return

    def summed(self) -> Outcome:
        seconds, busy = self.timed() if self.facts.flow is None else self.flowing(self.facts.flow)
        peaks = self.peaks()
        over = 0.0
        for limit, peak in zip(self.problem.limits, peaks, strict=True):
            if limit is not None and peak > limit:
                over += peak / max(limit, 1) - 1
        return Outcome(over, seconds, peaks, busy, dict(self.crossing))

    def timed(self) -> tuple[float, tuple[float, ...]]:
        """The seconds of the step, and by device those for which it computes.

        Tasks of a device follow each other, and so do copies to a device; each begins when what it waits for has ended,
        and none ends before it is issued.
        """
        problem, copies, needed, again = self.problem, self.copies, self.needed, self.again
        devices = len(problem.devices)
        free, arriving, busy = [0.0] * devices, [0.0] * devices, [0.0] * devices
        ends = [0.0] * len(self.at)
        issued = 0.0
        for position, device in enumerate(self.at):
            if position in copies:
                issued = self.issued(copies[position], arriving, ends, issued)
            now = free[device]
            if position in again:
                for copy in self.first.get(position, ()):
                    now = max(now, copy.end)
                group = problem.groups[again[position]]
                spent = group.again[device]
                issued += group.again_issued
                now = max(now + spent, issued)
                busy[device] += spent
            if position in needed:
                for copy in needed[position]:
                    now = max(now, copy.end)
            task = problem.tasks[position]
            spent = task.seconds[device]
            issued += task.issued
            free[device] = ends[position] = max(now + spent, issued)
            busy[device] += spent
        self.issued(copies.get(len(self.at), ()), arriving, ends, issued)
        return max(*free, *arriving), tuple(busy)

    def flowing(self, flow: Flow) -> tuple[float, tuple[float, ...]]:
        """The same of a step whose micro-batches flow."""
        groups, needed = self.problem.groups, self.needed
        for position, copies in self.first.items():
            needed[position] += [copy for copy in copies if copy not in needed[position]]
        again = {position: groups[number].again[self.at[position]] for position, number in self.again.items()}
        seconds, busy = flow.timed(self.at, self.copies, needed, again)
        issued = sum(task.issued for task in self.problem.tasks)
        issued += self.problem.issue * sum([copy.calls for copies in self.copies.values() for copy in copies])
        issued += sum(groups[number].again_issued for number in self.again.values())
        return max(seconds, issued), busy

    def issued(self, copies: Sequence[_Copy], arriving: list[float], ends: Sequence[float], issued: float) -> float:
        """Let copies follow each other; the seconds until the last one is issued."""
        issue = self.problem.issue
        for copy in copies:
            after = copy.after
            done = (ends[after] if after >= 0 else 0.0) if isinstance(after, int) else after.end
            issued += issue * copy.calls
            copy.end = arriving[copy.destination] = max(arriving[copy.destination], done, issued) + copy.seconds
        return issued

    def peaks(self) -> tuple[int, ...]:
        problem, choice, facts = self.problem, self.choice, self.facts
        chosen, count = np.array(choice.devices), len(self.at)
        there = chosen == np.arange(len(problem.devices))[:, None]
        live = np.cumsum(there @ facts.local + np.array(self.live, dtype=float), axis=1)
        at, tasks = chosen[facts.tasks], np.arange(count)
        held = live[:, :count].copy()
        held[at, tasks] += facts.rooms
        most = np.maximum(held.max(axis=1), 0.0)
        found = [base + int(nbytes) for base, nbytes in zip(problem.held, most, strict=True)]
        for group, device in zip(problem.groups, choice.devices, strict=True):
            found[device] += group.state
        for number, away in choice.parked:
            found[choice.devices[number]] -= problem.groups[number].updated
            found[away] += problem.groups[number].updated
        return tuple([nbytes + buffers(row) for nbytes, row in zip(found, self.received, strict=True)])


def buffers(received: list[tuple[int, int, int]]) -> int:
    """The bytes of the receive buffers that serve copies one after the other, as :mod:`graphir.analysis.buffers` has
    it."""
    sizes: list[int] = []
    until: list[int] = []
    for first, last, nbytes in sorted(received):
        idle = [k for k, busy in enumerate(until) if busy < first]
        if idle:
            best = min(idle, key=lambda k: (sizes[k] < nbytes, abs(sizes[k] - nbytes)))
            sizes[best], until[best] = max(sizes[best], nbytes), last
        else:
            sizes.append(nbytes)
            until.append(last)
    return sum(sizes)
