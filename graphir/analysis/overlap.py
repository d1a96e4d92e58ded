"""Which micro-batch each device works on, and when: how far the devices of a plan work at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..ir.device import Device
from ..ir.names import micro_batch_of, micro_batches
from ..ir.operator import Operator
from ..ir.plan import Plan, lane_device
from ..ir.verify import Planned, require, subject_of
from .cost import NOMINAL, Cost, operator_costs
from .execution import Execution
from .schedule import Interval, schedule

__all__ = ["Overlap", "flows", "micro_batch", "overlap", "overlap_of"]

_COLUMNS: Final = 72
_IDLE, _OTHER = "-", "u"


@dataclass(frozen=True)
class Overlap:
    """What the devices of a plan do side by side.

    Attributes:
        name: of the plan.
        seconds: that a step takes.
        busy: by device, the seconds of the step in which its compute lane executes operators.
        grid: by device, what it works on from the beginning of the step to its end, a character for each part of it:
            the last digit of a micro-batch's number in its forward, the letter of that number (``a`` is 0) in its
            backward, ``u`` reductions and updates, ``-`` nothing.
    """

    name: str
    seconds: float
    busy: Mapping[str, float]
    grid: Mapping[str, str]

    @property
    def bubble(self) -> dict[str, float]:
        """By device, the share of the step in which it computes nothing."""
        return {device: 1 - busy / self.seconds if self.seconds else 0.0 for device, busy in self.busy.items()}

    def to_dict(self) -> dict[str, object]:
        """All of it, with the bubbles, as JSON has it."""
        return {"seconds": self.seconds, "busy": dict(self.busy), "bubble": self.bubble, "grid": dict(self.grid)}

    def lines(self, head: str = "micro-batches") -> list[str]:
        """The grid, under a line that begins with *head* and says what its characters mean."""
        wide = max(map(len, self.grid), default=0)
        rows = [f"  {device:<{wide}}  {row}  {self.bubble[device]:.0%} idle" for device, row in self.grid.items()]
        return [f"{head}: digits forward, letters backward, {_OTHER} update, {_IDLE} idle", *rows]

    def __str__(self) -> str:
        return "\n".join(self.lines(f"overlap of {self.name!r}"))


def overlap(
    plan: Plan | Planned, seconds: Sequence[float] | None = None, worker: Callable[[str], str] = lane_device
) -> Overlap:
    """Predict which micro-batch each device works on, and when.

    Args:
        plan: usually of a program that :func:`graphir.passes.pipeline` has ordered; or a session or a compiled step.
        seconds: what each operator takes, by position in the step; at nominal rates of a core by default, whose
            proportions count, and not the sum.
        worker: who executes a lane; each device's lanes take turns by default, as they do in threads.

    Raises:
        GraphirError: *plan* is no plan.
    """
    plan = subject_of(plan)
    require(plan, (Plan,), "overlap")
    if seconds is None:
        costs = operator_costs(plan.step, plan.dims, lambda _: NOMINAL)
    else:
        costs = [Cost(spent, "registered") for spent in seconds]
    return overlap_of(plan, schedule(plan, plan.dims, costs, Execution("any", worker)).intervals())


def overlap_of(plan: Plan, intervals: Mapping[int, Interval]) -> Overlap:
    """Which micro-batch each device works on, and when.

    Args:
        plan: whose step it is.
        intervals: of its instructions, by position, as they were measured or predicted.
    """
    net = plan.step
    end = max((interval.end for interval in intervals.values()), default=0.0)
    slots = {str(device): [dict[str, float]() for _ in range(_COLUMNS)] for device in _computing(plan)}
    busy = dict.fromkeys(slots, 0.0)
    for position, (start, stop) in intervals.items():
        instruction = plan.instructions[position]
        device, _, stream = instruction.lane.partition(".")
        if stream == "compute" and instruction.op >= 0 and device in slots:
            busy[device] += stop - start
            if end:
                _fill(slots[device], _mark(net.ops[instruction.op]), start / end * _COLUMNS, stop / end * _COLUMNS)
    grid = {device: "".join(map(_most, found)) for device, found in slots.items()}
    return Overlap(plan.name, end, busy, grid)


def flows(plan: Plan) -> bool:
    """Whether there is a schedule to see: a step of several micro-batches on several devices."""
    return len(_computing(plan)) > 1 and micro_batches(plan.step.blobs) > 1


def micro_batch(op: Operator) -> int | None:
    """The micro-batch that an operator works on, by the names of what it makes and reads; None where none is named."""
    names = (*op.outputs, *reversed(op.inputs))
    return next((found for name in names if (found := micro_batch_of(name)) is not None), None)


def _computing(plan: Plan) -> list[Device]:
    return [device for device in plan.step.devices if not device.is_host]


def _mark(op: Operator) -> str:
    """What stands for an operator."""
    micro = micro_batch(op) or 0
    if op.phase == "forward":
        return str(micro % 10)
    return "abcdefghijklmnopqrst"[micro % 20] if op.phase == "backward" else _OTHER


def _fill(slots: Sequence[dict[str, float]], mark: str, start: float, stop: float) -> None:
    """Note of each slot how much of it an operator takes."""
    for slot in range(int(start), min(int(stop) + 1, len(slots))):
        share = min(stop, slot + 1) - max(start, slot)
        slots[slot][mark] = slots[slot].get(mark, 0.0) + share


def _most(slot: Mapping[str, float]) -> str:
    """What takes most of a slot, nothing included."""
    return max({_IDLE: 1 - sum(slot.values()), **slot}.items(), key=lambda item: item[1])[0]
