"""What to do where a device ran out of memory: take less at a time, or let ``balance`` choose what to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from graphir.analysis.memory import Memory
from graphir.ir.device import Device, gpu
from graphir.ir.names import base_name
from graphir.ir.plan import Plan

__all__ = ["SMALLER", "remedy"]

SMALLER: Final = "give a smaller batch"


def remedy(plan: Plan, device: Device, there: Sequence[str], predicted: Memory, room: int, made: int) -> str:
    """What to do, as a line with a call to paste.

    Args:
        plan: what was executed.
        device: where it ran out.
        there: the logical devices that share the memory that ran out.
        predicted: what the plan holds, at the sizes of the step.
        room: bytes that there were, together.
        made: bytes that the operator makes by itself; where there are fewer on any device, no placement helps.
    """
    if device.kind != "gpu" or made > room or not plan.program.interface.module_state:
        return SMALLER
    gpus = [found for d in predicted.peak if (found := Device.parse(d)).kind == "gpu"]
    shared = [d for d in gpus if d in there]
    others = [d for d in gpus if d not in there]
    each, own = room // len(shared), ""
    if each < 1:
        return SMALLER
    if all(predicted.peak[d] >= room for d in others):
        # No device of the plan has memory to spare: one more takes part.
        others.append(gpu(max(found.index for found in gpus) + 1))
        own = f", with {others[-1]} bound to memory of its own"
    limits = {str(d): each for d in shared} | {str(d): max(room, predicted.peak.get(d, 0)) for d in others}
    call = f"balance(program, {limits}){_captured(plan, predicted)}{own}"
    return f"{SMALLER}, or look for what to move, park and compute again: {call}"


def _captured(plan: Plan, predicted: Memory) -> str:
    """The sizes to capture the program at; empty where they are the program's own."""
    if all(plan.program.dims.get(dim) == size for dim, size in predicted.dims.items()):
        return ""
    sizes: dict[str, list[int]] = {}
    for dim, size in predicted.dims.items():
        sizes.setdefault(base_name(dim), []).append(size)
    # The mean of the replicas' rows; of equal shares, the largest.
    captured = ", ".join(f"{dim}={-(-sum(found) // len(found))}" for dim, found in sizes.items())
    return f", of a program captured at {captured}"
