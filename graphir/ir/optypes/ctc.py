"""Types of connectionist temporal classification: their schemas, fakes, operations and scratch.

Torch's kernel keeps a table for the backward that is as wide as the longest target, which data decide. ``ctc_loss``
returns the losses alone, and ``ctc_loss_backward`` fills the table again: the shapes follow from the operands' shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

from torch import Tensor

from ..dtype import ITEMSIZE
from ..symbols import to_symbol
from .fakes import Refused
from .record import OperatorType
from .sized import SizedOperator

__all__ = ["CTC"]

_OPERANDS: Final = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
_OPTIONS: Final = "*, int blank=0, bool zero_infinity=False"


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, **options: Any
) -> Tensor:
    """A loss for each sequence.

    Raises:
        Refused: the operands are not those of one batch.
    """
    if log_probs.dim() != 3 or targets.dim() not in (1, 2):
        raise Refused(
            f"a CTC loss takes log_probs of [frames, batch, classes] and targets of [batch, labels] or [labels], not "
            f"{_shown(log_probs)} and {_shown(targets)}"
        )
    batch = log_probs.shape[1]
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if lengths.dim() > 1 or lengths.numel() != batch or lengths.dtype.is_floating_point:
            raise Refused(
                f"a CTC loss of {batch} sequences takes as many whole numbers as {name}, not {_shown(lengths)}"
            )
    if targets.dim() == 2 and targets.shape[0] != batch:
        raise Refused(f"a CTC loss of {batch} sequences takes as many rows of targets, not {_shown(targets)}")
    return log_probs.new_empty((batch,))


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """The gradient of the logarithms of probabilities, without gaps.

    Raises:
        Refused: the operands are not those of one batch.
    """
    losses = _ctc_loss(log_probs, *others)
    if grad.shape != losses.shape or grad.dtype != losses.dtype:
        raise Refused(f"the gradient of a CTC loss is {_shown(losses)}, not {_shown(grad)}")
    return log_probs.new_empty(log_probs.shape)


def _shown(tensor: Tensor) -> str:
    return f"{to_symbol(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def _cells(call: SizedOperator, first: int) -> int:
    """At most how many numbers the table has: a row for each frame, with the blanks between the longest labels."""
    frames, batch, _ = call.operand(first).shape
    return batch * frames * (2 * call.operand(first + 1).shape[-1] + 1)


def _flops(first: int, tables: int) -> Callable[[SizedOperator], int]:
    """Each number of a table is the logarithm of a sum of three exponentials, and a product."""
    return lambda call: 8 * tables * _cells(call, first)


def _scratch(first: int, tables: int) -> Callable[[SizedOperator], int]:
    """So many tables; a backward also has the losses. Before, labels are looked at: their positions and a mask."""

    def nbytes(call: SizedOperator) -> int:
        probabilities, targets = call.operand(first), call.operand(first + 1)
        itemsize = ITEMSIZE[probabilities.dtype]
        losses = probabilities.shape[1] * itemsize if tables > 1 else 0
        labels = 8 * targets.shape[-1] + 9 * prod(targets.shape)
        return max(tables * _cells(call, first) * itemsize + losses, labels)

    return nbytes


_RECORDS: Final = (
    OperatorType(
        "graphir.ctc_loss",
        f"ctc_loss({_OPERANDS}, {_OPTIONS}) -> Tensor",
        _ctc_loss,
        only_elements=True,
        flops=_flops(0, 1),
        scratch=_scratch(0, 1),
    ),
    OperatorType(
        "graphir.ctc_loss_backward",
        f"ctc_loss_backward(Tensor grad, {_OPERANDS}, {_OPTIONS}) -> Tensor",
        _ctc_loss_backward,
        only_elements=True,
        nondeterministic="adds in no fixed order on CUDA",
        flops=_flops(1, 3),
        scratch=_scratch(1, 2),
    ),
)

CTC: Final[Mapping[str, OperatorType]] = {record.type: record for record in _RECORDS}
"""The records of these types."""
