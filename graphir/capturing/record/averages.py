"""Batch norms whose running statistics are averages over all batches: ``momentum=None``.

torch's forward reads the number of batches, and hands its reciprocal to the operator as a number. A step has another
number each time, so the call is recorded as the type that takes the number of batches as a tensor.
"""

from __future__ import annotations

from types import FrameType
from typing import Final

from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import CaptureError
from ..words.libraries import Outside
from ..words.places import where
from .values import RecordedCall, Value

__all__ = ["BATCHES", "average", "batches_read_in"]

BATCHES: Final = 1
"""What torch's forward reads instead. It makes the momentum of it, which the recorded type does not take."""


def batches_read_in(frame: FrameType, scope: str) -> bool:
    """Whether the code that runs in *frame* is torch's, reading a number of batches.

    Raises:
        CaptureError: it is another forward of such a batch norm, which may make anything of the number.
    """
    module = frame.f_locals.get("self")
    if not isinstance(module, _BatchNorm) or module.momentum is not None:
        return False
    if frame.f_code is _BatchNorm.forward.__code__ and module.running_mean is not None:
        return True
    raise CaptureError(
        f"the forward of {type(module).__name__} with momentum=None reads the number of batches as a Python number",
        where=where(scope),
        fix=Outside("set a momentum, such as 0.1, or leave the forward to torch.nn's, which is captured"),
    )


def average(call: RecordedCall, batches: Value) -> None:
    """Make a call of torch's batch norm one that averages over so many batches."""
    call.type = "graphir.cumulative_batch_norm"
    call.inputs = (*call.inputs, batches)
    call.operands = call.operands and f"{call.operands}t"
    call.args = {"eps": call.args["eps"]}
