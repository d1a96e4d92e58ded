"""What is said when a step fails, and whether its session can go on."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Final

import torch

from graphir.errors import RunError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.operator import origin_of
from graphir.ir.plan import Instruction, Plan
from graphir.ir.size import Dims
from graphir.ir.text import operator_text

from .shortage import is_shortage, shortage

__all__ = ["UNUSABLE", "fault", "reason_of", "writes_state"]

UNUSABLE: Final = "the session is unusable now: make a new one from a state() taken before, or from program.state"
_USABLE: Final = "no state was written: the session can go on with other arguments"
_LOST: Final = (
    "CUDA tells late of a kernel that failed, and refuses everything afterwards: CUDA_LAUNCH_BLOCKING=1 shows which "
    "it was, and a new process has a device again"
)


def fault(
    plan: Plan,
    instruction: Instruction | None,
    step: int,
    cause: BaseException,
    *,
    dims: Dims | None = None,
    binding: Mapping[Device, torch.device] | None = None,
    usable: bool = False,
) -> RunError:
    """The error for an exception that *instruction* raised in step number *step*; None where none is to blame.

    What the failed step's frames hold is let go first, so that memory that ran out is there again.

    Args:
        plan: what is executed.
        instruction: which instruction raised.
        step: how many steps were done before.
        cause: what it raised.
        dims: the value of each dimension in this step; the plan's where not given.
        binding: the real device of each logical one, which says what shares a memory that ran out.
        usable: whether no state had been written, on any lane.
    """
    traceback.clear_frames(cause.__traceback__)
    reason = reason_of(cause)
    lost = isinstance(cause, torch.AcceleratorError) and not is_shortage(cause)
    usable = usable and not (lost or isinstance(cause, TimeoutError))
    place, fix = f"plan {plan.name!r}, step {step}", _LOST if lost else _USABLE if usable else UNUSABLE
    if isinstance(cause, RunError):  # a probe's, which says what and where
        return RunError(cause.what, at=cause.at, where=cause.where, fix=fix, usable=usable)
    if instruction is None:
        return RunError(f"a step failed: {reason}", where=place, fix=fix, usable=usable)
    if instruction.op < 0:
        where = f"{place}, lane {instruction.lane}"
        return RunError(f"{instruction.kind} failed: {reason}", where=where, fix=fix, usable=usable)
    op, live = plan.step.ops[instruction.op], ""
    what = f"{op.type} failed: {reason}"
    if is_shortage(cause):
        what = f"{op.type} ran out of memory: {reason}"
        live, remedy = shortage(plan, instruction, dims or {}, binding or {})
        fix = f"{remedy}; {fix}"
    return RunError(
        what,
        at=operator_text(op, plan.step),
        where=", ".join([*origin_of(op), place, f"lane {instruction.lane}"]),
        live=live,
        fix=fix,
        usable=usable,
    )


def reason_of(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def writes_state(plan: Plan, instruction: Instruction) -> bool:
    """Whether an instruction changes what lasts from step to step."""
    if instruction.op < 0:
        return False
    op, blobs = plan.step.ops[instruction.op], plan.step.blobs
    views = {op.outputs[output] for output in op.effects.viewing}
    written = (name for name in instruction.makes(op.outputs) if name not in views)
    return any(blobs[blobs[name].storage].role in STATE_ROLES for name in written)
