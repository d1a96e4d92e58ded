"""Whether a step is the same each time that it is run: Python that no program sees may make another one of it."""

from __future__ import annotations

from ...errors import CaptureError
from ...ir.size import Dims
from ..record.values import Call
from ..step.comparison import differing_part, same_step
from ..step.recorded_step import Recording
from ..step.recording import Step, record
from ..words.places import where

__all__ = ["check_repeats"]


def check_repeats(step: Step, first: Recording, dims: Dims) -> None:
    """Record *step* once more at the sizes *dims* of its first recording.

    What modules hold and the random states are as they were then, and so is what the step does, unless it asks
    something else: a global, a closure, a class, an iterator, the clock.

    Raises:
        CaptureError: it has become another step, or fails.
    """
    again = record(step, dims, named=False)
    if not same_step(first, again):
        call, how = _difference(first, again)
        raise CaptureError(
            f"the step is another one when it is run again{how}",
            where=where(call.scope, call.line) if call is not None else where(""),
            fix="keep what changes in a buffer, or pass it to the step as a tensor: a program sees no globals, "
            "closures, classes, iterators or clocks; if only the first steps differ, as with functions that "
            "TorchScript compiled, run three before the capture",
        )
    again.release()


def _difference(first: Recording, again: Recording) -> tuple[Call | None, str]:
    """The first call that is another one, and how."""
    for mine, its in zip(first.calls, again.calls, strict=False):
        if mine.type != its.type:
            return mine, f": {mine.type} the first time, {its.type} the second"
        for name, value in mine.args.items():
            if repr(value) != repr(its.args.get(name)):
                return mine, f": {name} of {mine.type} was {value}, then {its.args.get(name)}"
    part = differing_part(first, again)
    return None, f", in {part}" if part else ""
