"""Receive buffers in a model: what is received depends on nothing but which groups are on a device.

Buffers serve copies one after the other, and one that is free may be too small or too large for the next copy. So they
take more than is received at once, by a per cent or two; of few groups all sets are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from graphir.passes.choice.facts import Readers
from graphir.passes.choice.outcome import buffers
from graphir.passes.choice.problem import Problem

from .step import Step

__all__ = ["add_buffers"]

_MOST_GROUPS: Final = 10
"""Of which all sets are looked at."""


def add_buffers(step: Step, readers: Sequence[Readers]) -> None:
    """Let devices hold the buffers of whatever set of groups they have."""
    problem = step.problem
    count = len(problem.groups)
    if count > _MOST_GROUPS or not all(_depends_on_groups_alone(problem, one) for one in readers):
        return
    for number in range(1, 1 << count):
        groups = {group for group in range(count) if number >> group & 1}
        received = list(_received(problem, readers, groups))
        units = buffers(received) // step.unit
        if units <= _at_once(received) // step.unit:
            continue
        for device, held in step.buffers.items():
            on = [step.chosen.on[group].get(device) for group in range(count)]
            if all(on[group] is not None for group in groups):
                there = [x if group in groups else ~x for group, x in enumerate(on) if x is not None]
                step.cp.add(held >= units).only_enforce_if(there)


def _depends_on_groups_alone(problem: Problem, readers: Readers) -> bool:
    """Whether what becomes of what groups save changes nothing about who reads a copy, and when."""
    for one in readers.others:
        if not one.reads or (readers.parks and len(one.late) == len(one.reads)):
            return False
        if one.rebuilds and not one.reads[0] <= problem.groups[one.group].again_at <= one.reads[-1]:
            return False
    return True


def _received(problem: Problem, readers: Sequence[Readers], groups: set[int]) -> Iterable[tuple[int, int, int]]:
    """What a device with these groups receives: the first and the last task that reads it, and its bytes."""
    for value, one in zip(problem.values, readers, strict=True):
        if value.group not in groups:
            reads = [read for other in one.others if other.group in groups for read in other.reads]
            if reads:
                yield min(reads), max(reads), value.nbytes


def _at_once(received: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes that are there at one task."""
    return max([sum(n for a, b, n in received if a <= first <= b) for first, _, _ in received], default=0)
