"""Which micro-batch each device works on, and when: how far the devices of a plan work at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..ir.names import micro_batch_of
from ..ir.operator import Operator
from ..ir.plan import Plan, lane_device
from ..ir.verify import require
from .cost import NOMINAL, operator_costs
from .execution import Execution
from .schedule import schedule

__all__ = ["Overlap", "overlap"]

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

    def __str__(self) -> str:
        head = f"overlap of {self.name!r}: digits forward, letters backward, {_OTHER} update, {_IDLE} idle"
        wide = max(map(len, self.grid), default=0)
        rows = [f"  {device:<{wide}}  {row}  {self.bubble[device]:.0%} idle" for device, row in self.grid.items()]
        return "\n".join([head, *rows])


def overlap(plan: Plan, seconds: Sequence[float] | None = None, worker: Callable[[str], str] = lane_device) -> Overlap:
    """Predict which micro-batch each device works on, and when.

    Args:
        plan: usually of a program that :func:`graphir.passes.pipeline` has ordered.
        seconds: what each operator takes, by position in the step; at nominal rates of a core by default, whose
            proportions count, and not the sum.
        worker: who executes a lane; each device's lanes take turns by default, as they do in threads.

    Raises:
        GraphirError: *plan* is no plan.
    """
    require(plan, (Plan,), "overlap")
    net = plan.step
    if seconds is None:
        seconds = [cost.seconds for cost in operator_costs(net, plan.dims, lambda _: NOMINAL)]
    intervals = schedule(plan, plan.dims, seconds, Execution("any", worker)).intervals()
    end = max((interval.end for interval in intervals.values()), default=0.0)
    computing = [d for d in net.devices if not d.is_host]
    slots = {str(device): [dict[str, float]() for _ in range(_COLUMNS)] for device in computing}
    busy = dict.fromkeys(slots, 0.0)
    for position, (start, stop) in intervals.items():
        instruction = plan.instructions[position]
        device, _, stream = instruction.lane.partition(".")
        if stream == "compute" and instruction.op >= 0 and device in slots:
            busy[device] += stop - start
            _fill(slots[device], _mark(net.ops[instruction.op]), start / end * _COLUMNS, stop / end * _COLUMNS)
    grid = {device: "".join(map(_most, found)) for device, found in slots.items()}
    return Overlap(plan.name, end, busy, grid)


def _mark(op: Operator) -> str:
    """What stands for an operator."""
    names = (*op.outputs, *reversed(op.inputs))
    micro = next((found for name in names if (found := micro_batch_of(name)) is not None), 0)
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
