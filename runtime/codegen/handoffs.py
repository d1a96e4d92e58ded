"""Which events of a plan have to be handed from one thread to another.

A thread executes the merged projection of some lanes in issue order, so events between its own lanes need nothing. Of
the others, those that earlier hand-offs imply are left out: what a thread is known to come after is kept as a vector
clock, which a record carries and a wait merges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from graphir.errors import PlanError
from graphir.ir.plan import Event, Plan

__all__ = ["Handoffs", "Handover", "handoffs"]


class Handoffs(NamedTuple):
    """The hand-offs of a plan, numbered from 0. Instructions are given by position in the plan.

    Attributes:
        total: how many there are.
        given: for a record, the hand-offs that it gives.
        taken: for a wait, the hand-off that it takes.
    """

    total: int
    given: Mapping[int, tuple[int, ...]]
    taken: Mapping[int, int]


class Handover(NamedTuple):
    """How threads pass values and events to each other.

    Attributes:
        handoffs: the events, see :func:`handoffs`.
        give: for each hand-off, what a record calls.
        take: for each hand-off, what a wait calls.
        values: filled with a slot for each value that another thread reads.
    """

    handoffs: Handoffs
    give: Sequence[Callable[[], object]]
    take: Sequence[Callable[[], object]]
    values: list[Tensor | None]


def handoffs(plan: Plan, thread: Mapping[str, int]) -> Handoffs:
    """The hand-offs of *plan* where each lane belongs to a *thread*.

    Raises:
        PlanError: a wait for an event that nobody recorded before it.
    """
    recorded: dict[Event, int] = {}
    clock: dict[int, dict[int, int]] = {t: {} for t in thread.values()}
    known: dict[int, dict[int, int]] = {}
    given: dict[int, list[int]] = {}
    taken: dict[int, int] = {}
    for position, instruction in enumerate(plan.instructions):
        event, here = instruction.event, thread[instruction.lane]
        if event is None:
            continue
        if instruction.kind == "record":
            recorded[event] = position
            known[position] = {**clock[here], here: position}
            continue
        if event not in recorded:
            raise PlanError(
                f"{instruction.lane} waits for {event.blob!r} by {event.lane}, which is not recorded before",
                where=f"plan {plan.name!r}",
                fix="emit the plan again",
            )
        source, there = recorded[event], thread[event.lane]
        if here == there or clock[here].get(there, -1) >= source:
            continue
        given.setdefault(source, []).append(len(taken))
        taken[position] = len(taken)
        for other, at in known[source].items():
            clock[here][other] = max(at, clock[here].get(other, -1))
    return Handoffs(len(taken), {position: tuple(found) for position, found in given.items()}, taken)
