"""Connectionist temporal classification by torch's own kernels, which a backward runs again.

On CUDA eager PyTorch may take cuDNN's instead, for concatenated targets in 32 bits; a program never does. There torch's
kernels bring the lengths to the host, which waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from .bounds import check_within

__all__ = ["CTC"]

_FORWARD: Final[Callable[..., Any]] = torch.ops.aten._ctc_loss.Tensor
_BACKWARD: Final[Callable[..., Any]] = torch.ops.aten._ctc_loss_backward.Tensor


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """The negative logarithm of each sequence's likelihood.

    Args:
        log_probs: ``[frames, batch, classes]``.
        targets: labels, ``[batch, labels]``, or those of all sequences one after the other.
        input_lengths: how many frames each sequence has, ``[batch]``.
        target_lengths: how many labels.
        blank: the class of no label.
        zero_infinity: only a backward asks: the gradient of a loss that is infinite is zero.

    Raises:
        IndexError: a label is not one of the classes.
    """
    _check_labels(log_probs, targets, target_lengths)
    given = (log_probs, targets, input_lengths, target_lengths)
    losses: Tensor = _FORWARD(*given, blank, zero_infinity)[0]
    return losses


def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """The gradient of *log_probs*; *grad* is that of the losses."""
    _check_labels(log_probs, targets, target_lengths)
    given = (log_probs, targets, input_lengths, target_lengths)
    found: Tensor = _BACKWARD(grad, *given, *_FORWARD(*given, blank, zero_infinity), blank, zero_infinity)
    return found


def _check_labels(log_probs: Tensor, targets: Tensor, lengths: Tensor) -> None:
    """Labels are classes: torch's kernel looks them up unseen. What pads a row of targets is not read."""
    if targets.is_cpu and targets.dim() == 2:
        targets = targets[torch.arange(targets.shape[1]) < lengths.view(-1, 1)]
    check_within(targets, 0, log_probs.shape[-1], "the label")


CTC: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.ctc_loss": _ctc_loss,
    "graphir.ctc_loss_backward": _ctc_loss_backward,
}
"""The kernels of these types."""
