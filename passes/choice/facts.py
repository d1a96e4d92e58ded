"""What holds of a problem whatever is chosen: who reads its values, which devices are alike, how long a step can be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from .problem import Problem, Value

__all__ = ["Reader", "Readers", "interchangeable", "longest", "readers_of", "total_seconds"]


class Reader(NamedTuple):
    """A group that reads a value.

    Attributes:
        group: which.
        reads: its tasks that read the value, ascending.
        late: those of them in the backward.
        rebuilds: whether it also reads the value when it computes again.
    """

    group: int
    reads: tuple[int, ...]
    late: tuple[int, ...]
    rebuilds: bool


class Readers(NamedTuple):
    """The groups that read a value.

    Attributes:
        own: the group that it belongs to.
        others: the other ones, in the order of their first reads.
        leaves: the task after which the value leaves where it is parked: the last one of the forward that has to do
            with it.
        parks: whether it is parked where its group's values are.
    """

    own: Reader
    others: tuple[Reader, ...]
    leaves: int
    parks: bool


def readers_of(problem: Problem, value: Value) -> Readers:
    """The groups that read a value of a problem."""
    reads: dict[int, list[int]] = defaultdict(list)
    late: dict[int, list[int]] = defaultdict(list)
    for number, read in enumerate(value.reads):
        group = problem.tasks[read].group
        reads[group].append(read)
        if number >= value.late:
            late[group].append(read)

    def reader(group: int) -> Reader:
        return Reader(group, tuple(reads[group]), tuple(late[group]), group in value.rebuilds)

    def first(one: Reader) -> int:
        return one.reads[0] if one.reads else problem.groups[one.group].again_at

    own = reader(value.group)
    others = [reader(group) for group in dict.fromkeys((*list(reads), *value.rebuilds)) if group != value.group]
    leaves = max(value.made, value.reads[value.late - 1] if value.late else -1)
    return Readers(own, tuple(sorted(others, key=first)), leaves, value.parks and value.late < len(value.reads))


def interchangeable(problem: Problem) -> list[list[int]]:
    """The devices in classes: exchanging two of a class changes nothing but their names.

    The host is alone.
    """
    classes: list[list[int]] = []
    for device in range(len(problem.devices)):
        for members in classes:
            if device != problem.host and _alike(problem, members[0], device):
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def _alike(problem: Problem, a: int, b: int) -> bool:
    """Whether exchanging two devices changes nothing."""
    swapped = {a: b, b: a}
    order = [swapped.get(device, device) for device in range(len(problem.devices))]

    def same(row: tuple[float, ...]) -> bool:
        return not row or row[a] == row[b]

    return (
        problem.limits[a] == problem.limits[b]
        and problem.held[a] == problem.held[b]
        and all(
            row[source][to] == row[order[source]][order[to]]
            for row in (problem.latency, problem.pace)
            for source in range(len(order))
            for to in range(len(order))
        )
        and all(same(task.seconds) for task in problem.tasks)
        and all(
            same(group.again)
            and (a in group.devices) == (b in group.devices)
            and (a in group.stored) == (b in group.stored)
            and (a in group.away) == (b in group.away)
            for group in problem.groups
        )
    )


def total_seconds(problem: Problem) -> float:
    """The seconds of all tasks on the devices where they take the most."""
    return max(sum(_most(task.seconds) for task in problem.tasks), 1e-12)


def longest(problem: Problem) -> float:
    """The seconds of no step are more: those of everything that any choice computes and copies, one after the other."""
    devices = range(len(problem.devices))
    latency = _most([problem.latency[a][b] for a in devices for b in devices])
    pace = _most([problem.pace[a][b] for a in devices for b in devices if isfinite(problem.latency[a][b])])
    copies = [len({*value.reads, *value.rebuilds}) + 2 for value in problem.values]
    crossing = sum(count * (latency + value.nbytes * pace) for count, value in zip(copies, problem.values, strict=True))
    return total_seconds(problem) + sum(_most(group.again) for group in problem.groups) + crossing


def _most(seconds: Sequence[float]) -> float:
    return max([each for each in seconds if isfinite(each)], default=0.0)
