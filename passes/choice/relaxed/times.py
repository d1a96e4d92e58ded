"""What a step takes in a linear program.

* *path*: a task begins after what it reads is made. Where both are on one device, what their groups compute in between
  comes first; where they are not, what is read has to cross;
* *load*: a device computes for no longer than the step takes;
* *lane*: nor do copies to one device take longer, which follow each other.

Where limits need several devices, groups that are connected by values are apart at least as often as there are devices
less one.
"""

from __future__ import annotations

from ..facts import Readers, longest, total_seconds
from ..problem import Value
from .bytes import fewest_devices
from .parts import Parts, Terms, plus, times

__all__ = ["Times"]


class Times:
    """The rows of a linear program that say what a step takes, in parts of all its tasks.

    Args:
        parts: how much of each group is where.

    Attributes:
        step: what the step takes.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts, self.lp, self.problem = parts, parts.lp, parts.problem
        self.unit = total_seconds(self.problem)
        most = longest(self.problem) / self.unit
        self.step = self.lp.variable(0.0, most)
        self.starts = [self.lp.variable(0.0, most) for _ in self.problem.tasks]
        self.arrived: dict[tuple[int, ...], int] = {}
        self._add_chains()
        for value, readers in zip(self.problem.values, parts.readers, strict=True):
            self._add_path(value, readers)
        for k in range(len(parts.classes)):
            self._add_load(k)
            self._add_lane(k)
        self._add_crossings()

    def _spent(self, task: int) -> Terms:
        """What a task takes."""
        seconds, group = self.problem.tasks[task].seconds, self.problem.tasks[task].group
        classes = enumerate(self.parts.classes)
        return plus(*[times(seconds[alike.one] / self.unit, self.parts.on(group, k)) for k, alike in classes])

    def _again(self, number: int, k: int) -> Terms:
        """What a group computes again on a class."""
        part = self.parts.of(number, k, "again")
        return times(self.problem.groups[number].again[self.parts.classes[k].one] / self.unit, part) if part else {}

    def _all_again(self, number: int) -> Terms:
        return plus(*[self._again(number, k) for k in range(len(self.parts.classes))])

    def _after(self, first: int, then: int, between: Terms) -> None:
        """A task begins after another one is done, or after the step begins (-1), and something has passed since."""
        done = {} if first < 0 else plus({self.starts[first]: 1.0}, self._spent(first))
        self.lp.at_most(plus(done, between, {self.starts[then]: -1.0}), 0.0)

    def _add_chains(self) -> None:
        """Tasks of a group follow each other."""
        latest: dict[int, int] = {}
        for position, task in enumerate(self.problem.tasks):
            again = self.problem.groups[task.group].again_at == position
            self._after(latest.get(task.group, -1), position, self._all_again(task.group) if again else {})
            latest[task.group] = position
        for last in latest.values():
            self.lp.at_most(plus({self.starts[last]: 1.0, self.step: -1.0}, self._spent(last)), 0.0)

    def _add_path(self, value: Value, readers: Readers) -> None:
        """Tasks begin after what they read is made, and has come."""
        parts, group = self.parts, value.group
        for reader in readers.others:
            if not reader.reads or parts.is_again(value):
                continue
            then, needs = reader.reads[0], list[Terms]()
            for k in range(len(parts.classes)):
                if not parts.is_late(reader, readers):
                    crossing = parts.from_home(group, k, value.nbytes) / self.unit
                    needs.append(times(crossing, parts.apart(group, reader.group, k)))
                if value.made >= 0:
                    between = self._between(value.made, then, {group, reader.group}, k)
                    needs.append(times(between, parts.together(group, reader.group, k)))
            if self.problem.groups[reader.group].again_at == then and not readers.parks:
                needs.append(self._all_again(reader.group))
            self._after(value.made, then, plus(*needs))
        if readers.parks and readers.own.late and value.made >= 0:
            trips = {
                part: parts.from_home(group, k, value.nbytes) + parts.to_home(group, k, value.nbytes)
                for k, part in parts.away[group].items()
            }
            self._after(value.made, readers.own.late[0], times(1 / self.unit, trips))

    def _between(self, first: int, then: int, groups: set[int], k: int) -> float:
        """What some groups compute between two tasks on a device of a class."""
        device, tasks = self.parts.classes[k].one, self.problem.tasks[first + 1 : then]
        return sum(task.seconds[device] for task in tasks if task.group in groups) / self.unit

    def _add_load(self, k: int) -> None:
        """Devices compute for no longer than the step takes."""
        alike = self.parts.classes[k]
        busy = [0.0] * len(self.problem.groups)
        for task in self.problem.tasks:
            busy[task.group] += (
                task.seconds[alike.one] / self.unit if alike.one in self.problem.groups[task.group].devices else 0.0
            )
        terms = [times(spent, self.parts.on(number, k)) for number, spent in enumerate(busy)]
        again = [self._again(number, k) for number in range(len(busy))]
        self.lp.at_most(plus({self.step: -float(alike.size)}, *terms, *again), 0.0)

    def _add_lane(self, k: int) -> None:
        """Copies to devices take no longer than the step."""
        parts, alike = self.parts, self.parts.classes[k]
        busy: list[Terms] = [{self.step: -float(alike.size)}]
        for value, readers in zip(self.problem.values, parts.readers, strict=True):
            number = value.group
            crossing = parts.from_home(number, k, value.nbytes) / self.unit
            busy.append(times(crossing, self._arriving(value, readers, k)))
            if readers.parks and k in parts.away[number]:
                busy.append({parts.away[number][k]: crossing})
            if readers.parks and readers.own.late:
                away = [stored for stored in self.problem.groups[number].stored if stored >= 0]
                back = parts.crossing(away, alike.devices, value.nbytes) / self.unit
                busy.append(times(back, parts.of(number, k, "park")))
        self.lp.at_most(plus(*busy), 0.0)

    def _arriving(self, value: Value, readers: Readers, k: int) -> Terms:
        """How much of a value is copied to a class: once to a device, for all groups that read it there."""
        others = self.parts.copied_to(value, readers)
        if len(others) <= 1:
            return self.parts.apart(value.group, others[0].group, k) if others else {}
        key = (value.group, *[one.group for one in others], k)
        if key not in self.arrived:
            self.arrived[key] = found = self.lp.variable(0.0, float(self.parts.classes[k].size))
            for one in others:
                apart = self.parts.apart(value.group, one.group, k)
                self.lp.at_most(plus(apart, {found: -1.0}), 0.0)
        return {self.arrived[key]: 1.0}

    def _add_crossings(self) -> None:
        """Groups are apart as often as the limits need."""
        same, count = self.parts.same, len(self.problem.groups)
        pairs = {(min(pair), max(pair)) for pair in same}
        if not _connected(count, pairs):
            return
        devices = fewest_devices(self.parts)
        together = plus(*[dict.fromkeys(same[pair].values(), 1.0) for pair in sorted(pairs)])
        self.lp.at_most(together, float(len(pairs) - (devices - 1)))


def _connected(count: int, pairs: set[tuple[int, int]]) -> bool:
    """Whether all groups are connected by pairs."""
    leads = list(range(count))

    def root(number: int) -> int:
        while leads[number] != number:
            leads[number] = number = leads[leads[number]]
        return number

    for a, b in pairs:
        leads[root(a)] = root(b)
    return len({root(number) for number in range(count)}) <= 1
