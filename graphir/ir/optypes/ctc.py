"""Types of connectionist temporal classification: their schemas and fakes.

Torch's kernel keeps a table for the backward. The table is as wide as the longest target, which data decide.
``ctc_loss`` returns the losses alone, and ``ctc_loss_backward`` fills the table again: all shapes follow from the
operands' shapes.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from .fakes import Refused, typed
from .record import OperatorType

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
            f"{typed(log_probs)} and {typed(targets)}"
        )
    batch = log_probs.shape[1]
    for name, lengths in (("input_lengths", input_lengths), ("target_lengths", target_lengths)):
        if lengths.dim() > 1 or lengths.numel() != batch or lengths.dtype.is_floating_point:
            raise Refused(
                f"a CTC loss of {batch} sequences takes as many whole numbers as {name}, not {typed(lengths)}"
            )
    if targets.dim() == 2 and targets.shape[0] != batch:
        raise Refused(f"a CTC loss of {batch} sequences takes as many rows of targets, not {typed(targets)}")
    return log_probs.new_empty((batch,))


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *others: Tensor, **options: Any) -> Tensor:
    """The gradient of the logarithms of probabilities, without gaps.

    Raises:
        Refused: the operands are not those of one batch.
    """
    losses = _ctc_loss(log_probs, *others)
    if grad.shape != losses.shape or grad.dtype != losses.dtype:
        raise Refused(f"the gradient of a CTC loss is {typed(losses)}, not {typed(grad)}")
    return log_probs.new_empty(log_probs.shape)


CTC: Final = (
    OperatorType("graphir.ctc_loss", f"ctc_loss({_OPERANDS}, {_OPTIONS}) -> Tensor", _ctc_loss, only_elements=True),
    OperatorType(
        "graphir.ctc_loss_backward",
        f"ctc_loss_backward(Tensor grad, {_OPERANDS}, {_OPTIONS}) -> Tensor",
        _ctc_loss_backward,
        only_elements=True,
        nondeterministic="adds in no fixed order on CUDA",
    ),
)
