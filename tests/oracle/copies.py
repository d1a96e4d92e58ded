"""Values in a model: what they take at home, and the copies of them to where others read them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from graphir.passes.choice.facts import Reader, Readers
from graphir.passes.choice.problem import AGAIN, Value

from .step import Sent, Step

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar

__all__ = ["add_value"]


def add_value(step: Step, number: int, value: Value, readers: Readers) -> None:
    """Add what a value takes at home unless it is parked, and its copies whatever becomes of it."""
    added = _Value(step, number, value, readers)
    added.hold_for_own()
    if value.counted:
        added.hold_for_others()
    for device in range(len(step.problem.devices)):
        added.send(device)


class _Value:
    """A value of a model."""

    def __init__(self, step: Step, number: int, value: Value, readers: Readers) -> None:
        self.step, self.number, self.value, self.readers = step, number, value, readers
        self.chosen, self.cp = step.chosen, step.cp
        self.on, self.states = self.chosen.on[value.group], self.chosen.states[value.group]
        self.last = len(step.problem.tasks) - 1 if value.lasts else -1
        self.end = max([value.made, self.last, *readers.own.reads])

    def is_kept(self, stored: int) -> bool:
        """Whether the value stays where it is, if that becomes of what its group saves."""
        return not (stored >= 0 and self.readers.parks) and not (stored == AGAIN and self.value.again)

    def hold_for_own(self) -> None:
        """What it takes because of its own group."""
        value, hold = self.value, self.step.hold
        again_at = self.step.problem.groups[value.group].again_at
        for (d, stored), state in self.states.items():
            if stored == AGAIN and value.again:
                hold(
                    d,
                    value.made,
                    max([value.made, *[read for read in value.reads if read < again_at]]),
                    value.nbytes,
                    state,
                )
                hold(d, again_at, max([again_at, self.last, *value.reads]), value.nbytes, state)
            elif self.is_kept(stored) and value.counted:
                rebuilds = stored == AGAIN and self.readers.own.rebuilds
                hold(d, value.made, max(self.end, again_at) if rebuilds else self.end, value.nbytes, state)

    def events(self, reader: Reader) -> list[tuple[int, list[IntVar]]]:
        """The tasks before which a group may need the value, and what has to be true for that."""
        found: list[tuple[int, list[IntVar]]] = [(read, []) for read in reader.reads]
        again = self.chosen.again(reader.group)
        if reader.rebuilds and again is not None:
            found.append((self.step.problem.groups[reader.group].again_at, [again]))
        return sorted(found, key=lambda event: event[0])

    def hold_for_others(self) -> None:
        """What a value that is kept takes for longer than its own group needs it: until those on its device have read
        it, and its copies to others are issued."""
        reasons: dict[int, list[tuple[int, list[IntVar]]]] = defaultdict(list)
        for (d, stored), state in self.states.items():
            if not self.is_kept(stored):
                continue
            for i, reader in enumerate(self.readers.others):
                on = self.chosen.on[reader.group]
                if d in on:
                    reasons[d] += [(at, [state, on[d], *needs]) for at, needs in self.events(reader)]
                for e, there in on.items():
                    if e != d and reader.reads:
                        before = [self.chosen.on[other.group] for other in self.readers.others[:i]]
                        first = [~others[e] for others in before if e in others]
                        reasons[d].append((reader.reads[0], [state, there, *first]))
        for d, found in reasons.items():
            begin = self.end
            for until in sorted({at for at, _ in found if at > self.end}):
                held = self.cp.new_bool_var("")
                for at, needs in found:
                    if at >= until:
                        self.cp.add_bool_or([*[~need for need in needs], held])
                self.step.hold(d, begin + 1, until, self.value.nbytes, held)
                begin = until

    def send(self, d: int) -> None:
        """The copy to a device, for whichever groups there read the value."""
        value, step, cp = self.value, self.step, self.cp
        there = [reader for reader in self.readers.others if d in self.chosen.on[reader.group] and self.events(reader)]
        takes = {e: step.crossing(e, d, value.nbytes) for e in self.on if e != d}
        if not there or not takes:
            return
        start, end = step.time(), step.time()
        if value.made >= 0:
            cp.add(start >= step.ends[value.made])
        for e, ticks in takes.items():
            if ticks is not None:
                cp.add(end >= start + ticks).only_enforce_if(self.on[e])
        shortest = min([ticks for ticks in takes.values() if ticks is not None], default=0)
        for i, reader in enumerate(there):
            needs = self.crosses(reader, d)
            for e, ticks in takes.items():
                if ticks is None:
                    cp.add_bool_or([~need for need in (*needs, self.on[e])])
            self.wait(reader, end, needs)
            if reader.reads:
                earlier = [~self.chosen.on[other.group][d] for other in there[:i] if other.reads]
                present = step.implies([*needs, *earlier])
                step.lanes[d].append(Sent(reader.reads[0], (self.number, 0), present, start, shortest))
                cp.add(step.makespan >= end).only_enforce_if(present)
        self.receive(d, there)

    def crosses(self, reader: Reader, d: int) -> list[IntVar]:
        """What has to be true for the value to be copied to a device where a group reads it."""
        found = [self.chosen.on[reader.group][d]]
        if d in self.on:
            found.append(~self.on[d])
        parked = self.chosen.parked(self.value.group) if self.readers.parks else None
        if parked is not None and len(reader.late) == len(reader.reads):
            found.append(~parked)
        again = self.chosen.again(self.value.group) if self.value.again else None
        if again is not None:
            found.append(~again)
        return found

    def wait(self, reader: Reader, end: IntVar, needs: list[IntVar]) -> None:
        """Let a group's first task that reads the copy wait for it, and so what the group computes again."""
        step, number = self.step, reader.group
        if reader.reads:
            self.cp.add(step.starts[reader.reads[0]] >= end).only_enforce_if(needs)
        again = self.chosen.again(number)
        if again is not None and (reader.rebuilds or step.problem.groups[number].again_at in reader.reads):
            self.cp.add(step.repeats[number] >= end).only_enforce_if([*needs, again])

    def receive(self, d: int, there: list[Reader]) -> None:
        """What the copy takes, from the first task that reads it to the last."""
        step, nbytes = self.step, self.value.nbytes
        if len(there) == 1 and not there[0].rebuilds:
            step.receive(d, there[0].reads[0], there[0].reads[-1], nbytes, step.implies(self.crosses(there[0], d)))
            return
        events = [(at, [*self.crosses(one, d), *needs]) for one in there for at, needs in self.events(one)]
        events.sort(key=lambda event: event[0])
        begun, lasting = [self.cp.new_bool_var("") for _ in events], [self.cp.new_bool_var("") for _ in events]
        for i, (_, needs) in enumerate(events):
            self.cp.add_bool_or([*[~need for need in needs], begun[i]])
            self.cp.add_bool_or([*[~need for need in needs], lasting[i]])
            if i:
                self.cp.add_implication(begun[i - 1], begun[i])
                self.cp.add_implication(lasting[i], lasting[i - 1])
        for i, (at, _) in enumerate(events):
            if i and events[i - 1][0] < at:
                step.receive(d, events[i - 1][0] + 1, at - 1, nbytes, step.implies([begun[i - 1], lasting[i]]))
            if i + 1 == len(events) or events[i + 1][0] > at:
                first = next(k for k, event in enumerate(events) if event[0] == at)
                step.receive(d, at, at, nbytes, step.implies([begun[i], lasting[first]]))
