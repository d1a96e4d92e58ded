"""Kernels of the optimizer types: one parameter's update, bit for bit as ``torch.optim`` makes it.

Each has torch's two forms: ``for_loop``, the sequence of operators of ``foreach=False``, and ``fused``. They are built
once for an operator's options and called with its tensors every step. Learning rates are tensors or Python floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

__all__ = ["FORMS", "KERNELS", "Update", "adam", "adamw", "sgd"]

FORMS: Final = ("for_loop", "fused")


class Update(Protocol):
    """Updates a parameter and its optimizer state in place, given the type's tensors in order."""

    def __call__(self, param: Tensor, grad: Tensor, *rest: Any) -> None: ...


def sgd(
    *,
    form: str = "for_loop",
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Update:
    """``torch.optim.SGD`` without dampening. A momentum buffer starts at -0.0, the neutral element of addition."""
    if form == "fused":
        return partial(
            _fused_sgd,
            weight_decay=weight_decay,
            momentum=momentum,
            dampening=0.0,
            nesterov=nesterov,
            maximize=maximize,
            is_first_step=False,
        )
    if momentum and not (weight_decay or nesterov or maximize):
        return partial(_momentum_sgd, momentum, {t: torch.tensor(momentum, dtype=t, device="cpu") for t in _EXACT})

    def update(param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, lr: Tensor | float) -> None:
        if maximize:
            grad = -grad
        if weight_decay != 0:
            grad = grad.add(param, alpha=weight_decay)
        if momentum_buffer is not None:
            momentum_buffer.mul_(momentum).add_(grad)
            grad = grad.add(momentum_buffer, alpha=momentum) if nesterov else momentum_buffer
        param.add_(grad, alpha=-float(lr))

    return update


_EXACT: Final = (torch.float32, torch.float64)
"""Types in which torch multiplies by a Python number as by a tensor of the type; others keep more of its digits."""


def _momentum_sgd(
    momentum: float,
    factors: Mapping[torch.dtype, Tensor],
    param: Tensor,
    grad: Tensor,
    buffer: Tensor,
    lr: Tensor | float,
) -> None:
    """The commonest case; a tensor as the factor takes half as long as a number."""
    buffer.mul_(factors.get(buffer.dtype, momentum)).add_(grad)
    param.add_(buffer, alpha=-float(lr))


def _fused_sgd(param: Tensor, grad: Tensor, buffer: Tensor | None, lr: Tensor | float, **options: Any) -> None:
    torch._fused_sgd_([param], [grad], [] if buffer is None else [buffer], lr=float(lr), **options)


def adam(**options: Any) -> Update:
    """``torch.optim.Adam``: weight decay is added to the gradient."""
    return _adam(decoupled=False, **options)


def adamw(**options: Any) -> Update:
    """``torch.optim.AdamW``: weight decay scales the parameter."""
    return _adam(decoupled=True, **options)


def _adam(
    *,
    decoupled: bool,
    form: str = "for_loop",
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Update:
    if form == "fused":
        return partial(
            _fused_adam,
            torch._fused_adamw_ if decoupled else torch._fused_adam_,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )

    def update(
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        max_exp_avg_sq: Tensor | None,
        step: Tensor,
        lr: Tensor | float,
    ) -> None:
        rate = float(lr)
        if maximize:
            grad = -grad
        step.add_(1)
        if weight_decay != 0:
            if decoupled:
                param.mul_(1 - rate * weight_decay)
            else:
                grad = grad.add(param, alpha=weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        t = step.item()
        step_size = rate / (1 - beta1**t)
        scale = (1 - beta2**t) ** 0.5
        if max_exp_avg_sq is not None:
            exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        param.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / scale).add_(eps), value=-step_size)

    return update


def _fused_adam(
    kernel: Callable[..., Any],
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    step: Tensor,
    lr: Tensor | float,
    **options: Any,
) -> None:
    step.add_(1)
    amsgrad = max_exp_avg_sq is not None
    maxima = [max_exp_avg_sq] if amsgrad else []
    kernel([param], [grad], [exp_avg], [exp_avg_sq], maxima, [step], lr=float(lr), amsgrad=amsgrad, **options)


KERNELS: Final[Mapping[str, Callable[..., Update]]] = {
    "graphir.sgd": sgd,
    "graphir.adam": adam,
    "graphir.adamw": adamw,
}
"""For each optimizer type, what builds its kernel from the operator's arguments."""
