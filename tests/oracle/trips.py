"""Values that are parked in a model: where they are, and when they come home.

By the clock of a device, which counts the bytes that its tasks touch, the copy home of a value sets out between once
and :data:`.trips.QUEUED` times what it costs before the first task that waits for it. It is *back* from the task on
before which it is issued. Where it leaves, it *lingers* for :data:`.order.AHEAD` operators; then its device waits until
it has left::

    tasks at home      f1 ── leaves   f2         b3   b2   b1 ── needed
    lingers                 yes       yes   no
    back                     no       no    no   no   yes
    bytes              at home ────────┘    elsewhere ─┘ at home
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from graphir.passes.choice.facts import Readers
from graphir.passes.choice.problem import Value
from graphir.passes.order import AHEAD
from graphir.passes.trips import QUEUED, toll

from graphir.ir.device import Device

from .step import Sent, Step

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar, LinearExprT

__all__ = ["Trips"]


class _Parked(NamedTuple):
    """A value that may be parked.

    Attributes:
        number: which.
        group: whose.
        leaves: the task after which it leaves.
        comes: the first late tasks of groups that read it, and the groups; ascending.
        start: when the copy home begins.
        end: when it is done.
        returns: whether there is one: whether somebody at home reads it late.
        back: by task between the first and the last before which that copy may be issued, whether it is back.
    """

    number: int
    group: int
    leaves: int
    comes: tuple[tuple[int, int], ...]
    start: IntVar
    end: IntVar
    returns: IntVar
    back: dict[int, IntVar]


class Trips:
    """What is parked in a step.

    Args:
        step: where trips are added.
    """

    def __init__(self, step: Step) -> None:
        self.step, self.cp, self.chosen, self.problem = step, step.cp, step.chosen, step.problem
        self.calls = [task.calls for task in self.problem.tasks]
        self.touched = [task.touched // step.stroke for task in self.problem.tasks]
        self.parked: list[_Parked] = []
        self.lingering: dict[tuple[int, int], dict[int, IntVar]] = {}

    def add(self, number: int, value: Value, readers: Readers) -> None:
        """Add the trips of a value, where its group may be parked."""
        group, step, cp = value.group, self.step, self.cp
        is_parked = self.chosen.parked(group) if readers.parks else None
        if is_parked is None:
            return
        out, arrives, start, end = (step.time() for _ in range(4))
        if readers.leaves >= 0:
            cp.add(out >= step.ends[readers.leaves])
        cp.add(start >= arrives)
        comes = tuple(sorted([(one.late[0], one.group) for one in (readers.own, *readers.others) if one.late]))
        back = {position: cp.new_bool_var("") for position in range(readers.leaves + 1, comes[-1][0])}
        returns = is_parked if readers.own.late else cp.new_bool_var("")
        made = _Parked(number, group, readers.leaves, comes, start, end, returns, back)
        self.parked.append(made)
        for (d, away), state in self.chosen.states[group].items():
            if away >= 0:
                there, here = step.crossing(d, away, value.nbytes), step.crossing(away, d, value.nbytes)
                assert there is not None and here is not None  # else it could not be chosen
                cp.add(arrives >= out + there).only_enforce_if(state)
                cp.add(end >= start + here).only_enforce_if(state)
                cp.add(step.makespan >= arrives).only_enforce_if(state)
                step.lanes[away].append(Sent(readers.leaves + 1, (number, 1), state, out, there))
        for a, b in pairwise(back):
            cp.add_implication(back[a], back[b])
        for at, reader in comes:
            self.wait(made, readers, reader, at)
        self.set_out(made, value)
        self.hold(made, value, readers, self.linger(made, arrives))

    def wait(self, made: _Parked, readers: Readers, reader: int, at: int) -> None:
        """Let the first late task of a group at home wait for what comes back."""
        together = self.at_home(made, reader)
        if together is None:
            return
        self.cp.add(self.step.starts[at] >= made.end).only_enforce_if(together)
        self.cp.add_bool_or([*[~one for one in together], made.returns])
        if at in made.back:
            self.cp.add_bool_or([*[~one for one in together], made.back[at]])
        again, group = self.chosen.again(reader), self.problem.groups[reader]
        late = next(one.late for one in (readers.own, *readers.others) if one.group == reader)
        if again is not None and reader != made.group and group.again_at in late:
            self.cp.add(self.step.repeats[reader] >= made.end).only_enforce_if([*together, again])

    def at_home(self, made: _Parked, reader: int) -> list[IntVar] | None:
        """What is true if a value is parked and a group that reads it is at its home; None: that cannot be."""
        is_parked, same = self.chosen.parked(made.group), self.chosen.same(made.group, reader)
        if is_parked is None or (reader != made.group and same is None):
            return None
        return [is_parked] if same is None or reader == made.group else [is_parked, same]

    def set_out(self, made: _Parked, value: Value) -> None:
        """Let the copy home set out before the value is needed, but no longer than some times what it costs before."""
        costs = sum(
            value.nbytes * toll(Device.parse(self.problem.devices[away])) // self.step.stroke * state
            for (_, away), state in self.chosen.states[made.group].items()
            if away >= 0
        )
        for needed, is_first in self.needed(made):
            for position, back in made.back.items():
                if position < needed:
                    left = sum(self.at_home_between(made.group, position, needed, self.touched))
                    self.cp.add(left <= QUEUED * costs + QUEUED).only_enforce_if([*is_first, back])
                    self.cp.add(left >= costs - (needed - position)).only_enforce_if([*is_first, ~back])

    def needed(self, made: _Parked) -> list[tuple[int, list[IntVar]]]:
        """The tasks that may be the first that waits for a value at home, and what is true if each is."""
        found: list[tuple[int, list[IntVar]]] = []
        others: list[IntVar] = []
        for at, reader in made.comes:
            together = self.at_home(made, reader)
            if together is not None:
                found.append((at, [*together, *[~other for other in others]]))
                others += together[1:]
            if reader == made.group:
                break
        return found

    def at_home_between(self, group: int, first: int, then: int, what: Sequence[int]) -> Iterator[LinearExprT]:
        """What is given of each task, of those between two that are on a group's device."""
        for position in range(first + 1, then):
            task = self.problem.tasks[position]
            same = 1 if task.group == group else self.chosen.same(group, task.group)
            if same is not None:
                yield what[position] * same

    def linger(self, made: _Parked, arrives: IntVar) -> dict[int, IntVar]:
        """By task, whether the value is still where it left; the first task there without it waits until it is gone."""
        found = self.still(made.group, made.leaves)
        for position, lingers in found.items():
            together = self.at_home(made, self.problem.tasks[position].group)
            if together is not None:
                self.cp.add(self.step.starts[position] >= arrives).only_enforce_if([*together, ~lingers])
        return found

    def still(self, group: int, leaves: int) -> dict[int, IntVar]:
        """By task, whether what a group parks after some task is still at home."""
        if (group, leaves) not in self.lingering:
            found = self.lingering[group, leaves] = {}
            parked = self.chosen.parked(group)
            for position in range(leaves + 1, len(self.problem.tasks)):
                calls = sum(self.at_home_between(group, leaves, position, self.calls))
                found[position] = lingers = self.cp.new_bool_var("")
                self.cp.add(calls >= AHEAD).only_enforce_if([parked, ~lingers])
                self.cp.add(calls < AHEAD).only_enforce_if([parked, lingers])
        return self.lingering[group, leaves]

    def hold(self, made: _Parked, value: Value, readers: Readers, lingers: dict[int, IntVar]) -> None:
        """What the value takes: at home until it leaves and once it is back, elsewhere meanwhile."""
        step, group, last = self.step, made.group, readers.own.late[-1] if readers.own.late else -1
        for d in self.chosen.on[group]:
            away = self.chosen.parked_from(group, d)
            if away is None:
                continue
            step.hold(d, value.made, made.leaves, value.nbytes, away)
            for position, still in lingers.items():
                if position <= last:
                    step.hold(d, position, position, value.nbytes, step.implies([away, still]))
            for position, back in made.back.items():
                if position <= last:
                    step.hold(d, position, position, value.nbytes, step.implies([away, back]))
            step.hold(d, made.comes[-1][0], last, value.nbytes, away)
        for d, limit in enumerate(self.problem.limits):
            here = None if limit is None else self.chosen.parked_at(group, d)
            if here is not None:
                step.hold(d, made.leaves, made.leaves + (last >= 0), value.nbytes, here)
                for position, back in made.back.items():
                    step.hold(d, position + 1, position + 1, value.nbytes, step.implies([here, ~back]))

    def close(self) -> None:
        """Order copies home on their lanes, once all trips are added."""
        for made in self.parked:
            for d in self.chosen.on[made.group]:
                self.meet(made, d)
        for one, other in combinations(self.parked, 2):
            self.order(one, other)
        self.exclude()

    def meet(self, made: _Parked, d: int) -> None:
        """Let the copy home, and copies to that device with a fixed place, follow each other in the order of issue."""
        home = self.chosen.parked_from(made.group, d)
        if home is None:
            return
        for copy in self.step.lanes[d]:
            both = [home, made.returns, copy.present]
            copy_first, home_first = made.start >= copy.start + copy.ticks, copy.start >= made.end
            back = made.back.get(copy.before - 1)
            if copy.before <= made.leaves + 1:
                self.cp.add(copy_first).only_enforce_if(both)
            elif back is not None:
                self.cp.add(copy_first).only_enforce_if([*both, ~back])
                self.cp.add(home_first).only_enforce_if([*both, back])
            else:
                self.cp.add(home_first).only_enforce_if(both)

    def order(self, one: _Parked, other: _Parked) -> None:
        """Let two copies home to one device follow each other in the order in which they set out; where they do so
        before the same task, on one route, the one that is needed sooner is first."""
        together = self.at_home(one, other.group)
        if together is None:
            return
        if other.group != one.group:
            is_parked = self.chosen.parked(other.group)
            assert is_parked is not None
            together.append(is_parked)
        together += [one.returns, other.returns]
        cp, first = self.cp, self.cp.new_bool_var("")
        one_out, other_out = (made.leaves + 1 + sum(~back for back in made.back.values()) for made in (one, other))
        is_later = int(one.group == other.group and one.comes[0] >= other.comes[-1])
        cp.add(other.start >= one.end).only_enforce_if([*together, first])
        cp.add(one.start >= other.end).only_enforce_if([*together, ~first])
        cp.add(one_out + is_later <= other_out).only_enforce_if([*together, first])
        cp.add(one_out >= other_out).only_enforce_if([*together, ~first])

    def exclude(self) -> None:
        """Let copies be on a lane one after the other: that follows, but the solver does not see it at once."""
        step, cp = self.step, self.cp
        lanes: dict[int, list[IntVar]] = defaultdict(list)
        for d, sent in step.lanes.items():
            lanes[d] += [cp.new_optional_fixed_size_interval_var(c.start, c.ticks, c.present, "") for c in sent]
        for made in self.parked:
            for (d, away), state in self.chosen.states[made.group].items():
                if away >= 0:
                    takes = step.crossing(away, d, self.problem.values[made.number].nbytes) or 0
                    there = step.implies([state, made.returns])
                    lanes[d].append(cp.new_optional_fixed_size_interval_var(made.start, takes, there, ""))
        for intervals in lanes.values():
            cp.add_no_overlap(intervals)
