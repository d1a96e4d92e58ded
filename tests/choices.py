"""Choices for problems of placement, and problems that differ from the seeded ones where those are alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from graphir.passes.choice.problem import KEEP, Choice, Problem, Value

__all__ = ["chosen_at_random", "every_choice", "limited", "varied"]

MIB = 1 << 20


def chosen_at_random(problem: Problem, rng: random.Random) -> Choice:
    """Groups anywhere; of what they save, a random part is not kept."""
    moved = rng.random()
    return _normal(
        [rng.choice(group.devices) for group in problem.groups],
        [rng.choice(group.stored) if rng.random() < moved else KEEP for group in problem.groups],
    )


def every_choice(problem: Problem) -> Iterator[Choice]:
    """All that differ in something."""
    rows = [
        [(d, stored) for d in group.devices for stored in dict.fromkeys((KEEP, *group.stored)) if stored != d]
        for group in problem.groups
    ]
    for row in itertools.product(*rows):
        yield Choice(tuple([d for d, _ in row]), tuple([stored for _, stored in row]))


def _normal(devices: list[int], stored: list[int]) -> Choice:
    return Choice(tuple(devices), tuple([KEEP if s == d else s for s, d in zip(stored, devices, strict=True)]))


def limited(problem: Problem, *limits: int | None) -> Problem:
    """The problem with other limits; the host has none."""
    return replace(problem, limits=(*limits, None))


def varied(problem: Problem, rng: random.Random) -> Problem:
    """The problem with unequal devices and links, some of which are missing, tasks of few operators, less than no room,
    values that last, do not count, or are not read by all, and repeats that take room."""
    count = len(problem.devices)
    tasks = [
        task._replace(
            seconds=tuple([seconds * rng.choice([1, 1, 1.7]) for seconds in task.seconds]),
            room=task.room - rng.choice([0, 0, 2 * task.room]),
            calls=rng.choice([1, 2, 4, 8, 8]),
            touched=int(task.touched * rng.choice([0.05, 0.3, 1])),
        )
        for task in problem.tasks
    ]
    slower = [[rng.choice([1, 5, 30]) for _ in range(count)] for _ in range(count)]
    missing = [[a != b and rng.random() < 0.05 for b in range(count)] for a in range(count)]
    values = [
        value._replace(lasts=rng.random() < 0.1, counted=value.parks or value.again or rng.random() < 0.9)
        for value in problem.values
    ]
    values = [_read_by_fewer(problem, value, rng) for value in values]
    groups = [group._replace(again=tuple([s * rng.choice([1, 2]) for s in group.again])) for group in problem.groups]
    return replace(
        problem,
        tasks=tuple(tasks),
        values=tuple(values),
        groups=tuple(groups),
        held=tuple([rng.choice([0, 50 * MIB]) for _ in range(count)]),
        pace=tuple(
            [tuple([x * y for x, y in zip(*rows, strict=True)]) for rows in zip(problem.pace, slower, strict=True)]
        ),
        latency=tuple(
            [
                tuple([float("inf") if gone else x for x, gone in zip(*rows, strict=True)])
                for rows in zip(problem.latency, missing, strict=True)
            ]
        ),
    )


def _read_by_fewer(problem: Problem, value: Value, rng: random.Random) -> Value:
    """A value that is not read at first, or not by its own group, or as it was."""
    kept = value.reads
    if value.late and rng.random() < 0.1:
        kept = kept[1:]
    if not value.again and rng.random() < 0.2:
        kept = tuple([read for read in kept if problem.tasks[read].group != value.group]) or kept
    return value._replace(reads=kept, late=sum(read in kept for read in value.reads[: value.late]))
