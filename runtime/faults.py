"""What is said when an operator fails while a plan runs."""

from __future__ import annotations

from graphir.errors import RunError
from graphir.ir.text import operator_text
from graphir.plan import Instruction, Plan

__all__ = ["fault"]


def fault(plan: Plan, instruction: Instruction | None, step: int, cause: BaseException) -> RunError:
    """The error for an exception that *instruction* raised in step number *step*; None where none is to blame."""
    if isinstance(cause, RunError):  # a probe's, which says it all
        return cause
    reason = str(cause).strip().partition("\n")[0]
    reason = f"{type(cause).__name__}: {reason}" if reason else type(cause).__name__
    place = f"plan {plan.name!r}, step {step}"
    if instruction is None:
        return RunError(f"a step failed: {reason}", where=place)
    if instruction.op < 0:
        return RunError(f"{instruction.kind} failed: {reason}", where=f"{place}, lane {instruction.lane}")
    op = plan.step.ops[instruction.op]
    module = f"module {op.module!r}, " if op.module else ""
    return RunError(
        f"{op.type} failed: {reason}",
        at=operator_text(op, plan.step),
        where=f"{module}{place}, lane {instruction.lane}",
    )
