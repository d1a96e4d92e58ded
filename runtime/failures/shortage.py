"""What is said when a device runs out of memory: what is live there, largest first, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from graphir.analysis.memory import StorageUse, memory
from graphir.errors import GraphirError
from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.plan import Instruction, Plan, lane_device
from graphir.ir.size import Dims
from graphir.ir.text import nbytes_text

from .remedy import SMALLER, remedy

__all__ = ["is_shortage", "shortage"]

_SAID: Final = re.compile(
    r"can't allocate memory|not enough memory: you tried to allocate"  # of the host
    r"|CUDA error: out of memory"  # page-locked
)
"""What torch's allocators say in errors of no type of their own."""

_NAMED: Final = 3
"""How many storages of a category are named."""

_CATEGORIES: Final = 5
"""How many categories are listed, so that the message stays short."""


def is_shortage(cause: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on another device."""
    if isinstance(cause, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(cause, RuntimeError) and _SAID.search(str(cause)) is not None


def shortage(
    plan: Plan, instruction: Instruction, dims: Dims, binding: Mapping[Device, torch.device]
) -> tuple[str, str]:
    """What is live where *instruction* ran out of memory, and what to do.

    The bytes are those that :func:`graphir.memory` predicts at the instruction's position in the plan; what operators
    allocate inside and what the allocator keeps is not in them.

    Args:
        plan: what was executed.
        instruction: the one that ran out of memory.
        dims: the value of each dimension in this step.
        binding: the real device of each logical one; each has its own where it is not given.

    Returns:
        The table, and the remedy; the table is empty where the bytes cannot be predicted.
    """
    copied = instruction.kind == "copy"  # from a device to the host, by a lane of that device
    device = (
        plan.step.blobs[plan.step.ops[instruction.op].outputs[0]].device if copied else lane_device(instruction.lane)
    )
    try:
        predicted = memory(plan, dims)
    except GraphirError:
        return "", SMALLER
    place = binding.get(device)
    there = [d for d in predicted.peak if d == device or (place is not None and binding.get(Device.parse(d)) == place)]
    position = plan.instructions.index(instruction)
    live = [use for use in predicted.uses if use.device in there and use.start <= position < use.end]
    live.sort(key=lambda use: (-use.nbytes, use.blob))
    own = sum(use.nbytes for use in live if use.start == position)
    at = ", ".join(there) if place is None else f"{place} ({', '.join(there)})"
    made = f", {nbytes_text(own)} of it for what this operator makes" if own else ""
    peak = int(np.sum([predicted.timeline(d) for d in there], axis=0).max())
    head = f"{nbytes_text(_total(live))} on {at}{made}; the step's peak there: {nbytes_text(peak)} (predicted)"
    table = "\n       ".join([head, *_categories(plan, live)])
    return table, remedy(plan, device, there, predicted, _total(live) - own, own)


def _categories(plan: Plan, live: Sequence[StorageUse]) -> Iterator[str]:
    by_category: dict[str, list[StorageUse]] = {}
    for use in live:
        if use.nbytes:
            by_category.setdefault(use.category, []).append(use)
    ordered = sorted(by_category.items(), key=lambda item: -_total(item[1]))
    for category, uses in ordered[:_CATEGORIES]:
        named = [f"{use.blob} {nbytes_text(use.nbytes)}{_module(plan, use.blob)}" for use in uses[:_NAMED]]
        more = [f"{len(uses) - _NAMED} more"] if len(uses) > _NAMED else []
        yield f"{category} {nbytes_text(_total(uses))}: {', '.join([*named, *more])}"


def _module(plan: Plan, blob: str) -> str:
    """The module that a storage came from, where its name does not begin with it."""
    op = next((op for op in plan.step.ops if blob in op.outputs), None)
    return f" (module {op.module!r})" if op is not None and not base_name(blob).startswith(op.module) else ""


def _total(uses: Sequence[StorageUse]) -> int:
    return sum(use.nbytes for use in uses)
