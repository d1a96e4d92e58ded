"""What to do where a device ran out of memory: take less at a time, move modules, or let ``balance`` choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from graphir.analysis.memory import Memory
from graphir.ir.device import Device, gpu
from graphir.ir.names import base_name
from graphir.ir.plan import Plan
from graphir.ir.text import nbytes_text

from .cut import Cut, cheapest_cut

__all__ = ["SMALLER", "remedy"]

SMALLER: Final = "give a smaller batch"


def remedy(plan: Plan, device: Device, there: Sequence[str], predicted: Memory, room: int, made: int) -> str:
    """What to do, as a line with calls to paste.

    Args:
        plan: what was executed.
        device: where it ran out.
        there: the logical devices that share the memory that ran out.
        predicted: what the plan holds, at the sizes of the step.
        room: bytes that there were, together.
        made: bytes that the operator makes by itself; where there are fewer on any device, no placement helps.
    """
    if device.kind != "gpu":
        return SMALLER
    gpus = [found for d in predicted.peak if (found := Device.parse(d)).kind == "gpu"]
    others = [other for other in gpus if other != device]
    apart = sorted([other for other in others if other not in there] or others, key=lambda d: predicted.peak[d])
    another = gpu(max(found.index for found in gpus) + 1)
    targets = [*apart[:1], another]
    cuts = ((target, _cut(plan, device, target, predicted, room)) for target in targets)
    target, cut = next((found for found in cuts if found[1]), (targets[0], None))
    own = f", with {target} bound to memory of its own" if target in there or target == another else ""
    shared = [d for d in gpus if d in there and d != target]
    rest = [d for d in (*gpus, target) if d not in shared]
    choice = _choice(plan, shared, rest, predicted, room) if made <= room else ""
    if cut is None:
        return f"{SMALLER}, or look for what to move, park and compute again: {choice}{own}" if choice else SMALLER
    to: object = {device.index: target.index} if others else str(target)
    call = f"shift_modules(program, {dict.fromkeys(cut.modules, to)})"
    peaks = f"{nbytes_text(cut.before)} to {nbytes_text(cut.after)}"
    moves = (
        f"{SMALLER}, or move modules: {call}{own} (predicted: the peak of {device} falls from {peaks}, for "
        f"{nbytes_text(cut.copied)} of copies a step)"
    )
    return f"{moves}, or let the best be chosen: {choice}" if choice else moves


def _cut(plan: Plan, device: Device, target: Device, predicted: Memory, room: int) -> Cut | None:
    taken = [use for use in predicted.uses if use.device == target]
    return cheapest_cut(plan, device, taken, predicted, room)


def _choice(plan: Plan, shared: Sequence[Device], others: Sequence[Device], predicted: Memory, room: int) -> str:
    """The call of ``balance`` that keeps devices within the room that they have; empty where it would be refused.

    Args:
        plan: what was executed.
        shared: the gpus that have the room together.
        others: those that have as much each, or what they hold already.
        predicted: what the plan holds.
        room: bytes.
    """
    each = room // len(shared)
    if each < 1 or not plan.program.interface.module_state:
        return ""
    limits = {str(d): each for d in shared} | {str(d): max(room, predicted.peak.get(d, 0)) for d in others}
    call = f"balance(program, {limits})"
    if all(plan.program.dims.get(dim) == size for dim, size in predicted.dims.items()):
        return call
    sizes: dict[str, list[int]] = {}
    for dim, size in predicted.dims.items():
        sizes.setdefault(base_name(dim), []).append(size)
    # The mean of the replicas' rows; of equal shares, the largest.
    captured = ", ".join(f"{dim}={-(-sum(found) // len(found))}" for dim, found in sizes.items())
    return f"{call}, of a program captured at {captured}"
