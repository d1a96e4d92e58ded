"""Batch norms whose running statistics are averages over all batches: ``momentum=None``.

torch's forward reads the number of batches as a Python number, and passes its reciprocal to the operator. The number
grows with every step. So the call is recorded as a type of graphir's that takes the number of batches as a tensor.
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
"""The number that torch's forward is told. It serves for the momentum alone, which the recorded type does not take."""


def batches_read_in(frame: FrameType, scope: str) -> bool:
    """Whether the code that runs in *frame* is torch's batch norm, which reads the number of batches.

    Raises:
        CaptureError: the code is another forward of such a batch norm, which may compute anything from the number.
    """
    module = frame.f_locals.get("self")
    if not isinstance(module, _BatchNorm) or module.momentum is not None:
        return False
    if frame.f_code is _BatchNorm.forward.__code__ and module.running_mean is not None:
        return True
    raise CaptureError(
        f"the forward of {type(module).__name__} with momentum=None reads the number of batches as a Python number",
        where=where(scope),
        fix=Outside("set a momentum, such as 0.1, or use the forward of torch.nn, which can be captured"),
    )


def average(call: RecordedCall, batches: Value) -> None:
    """Turn a call of torch's batch norm into one that averages over the number of *batches*."""
    call.type = "graphir.cumulative_batch_norm"
    call.inputs = (*call.inputs, batches)
    call.operands = call.operands and f"{call.operands}t"
    call.args = {"eps": call.args["eps"]}
