"""When each instruction of a plan would be executed, from what its operators cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..ir.plan import Event, Plan

__all__ = ["Interval", "schedule"]


class Interval(NamedTuple):
    """Seconds since a step's first instruction began."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


def schedule(
    plan: Plan, seconds: Sequence[float], worker: Callable[[str], str], wake: float = 0.0
) -> dict[int, Interval]:
    """A list schedule: each worker executes its lanes' instructions in issue order, each as early as it can.

    Args:
        plan: what is executed.
        seconds: what an instruction of each operator takes, by the operator's position in the step. Records and frees
            take no time, waits until the event is recorded.
        worker: who executes a lane: a stream of its own, or a thread that has others too.
        wake: seconds that pass until a worker that waits goes on, after the event is recorded.

    Returns:
        The interval of each instruction by its position in the plan.
    """
    free: dict[str, float] = {worker(lane): 0.0 for lane in plan.lanes}
    recorded: dict[Event, float] = {}
    found = {}
    for position, instruction in enumerate(plan.instructions):
        here = worker(instruction.lane)
        start = end = free[here]
        if instruction.op >= 0:
            end = start + seconds[instruction.op]
        elif instruction.kind == "record" and instruction.event is not None:
            recorded[instruction.event] = start
        elif instruction.event is not None and (ready := recorded.get(instruction.event, start)) > start:
            end = ready + wake
        free[here] = end
        found[position] = Interval(start, end)
    return found
