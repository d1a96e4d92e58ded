"""Kernels of the optimizer types: updates bit for bit as ``torch.optim`` makes them.

Each has torch's two forms: ``for_loop``, the sequence of operators of ``foreach=False``, and ``fused``. They are built
once for an operator's options and called with tensors every step. As in torch they take lists, an item a parameter, so
that an executor can make one call of many updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

__all__ = ["FORMS", "KERNELS", "Update", "adam", "adamw", "sgd"]

FORMS: Final = ("for_loop", "fused")

Tensors: TypeAlias = list[Tensor]


class Update(Protocol):
    """Updates parameters and their optimizer states in place.

    It is given the type's tensors in order: of each a list with an item a parameter (None where the operator has no
    such tensor), and last the learning rate, which they share, as a tensor or a number.
    """

    def __call__(self, params: Tensors, grads: Tensors, *rest: Any) -> None: ...


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

    def update(params: Tensors, grads: Tensors, buffers: list[Tensor | None], lr: Tensor | float) -> None:
        rate = float(lr)
        for param, grad, buffer in zip(params, grads, buffers, strict=True):
            if maximize:
                grad = -grad
            if weight_decay != 0:
                grad = grad.add(param, alpha=weight_decay)
            if buffer is not None:
                buffer.mul_(momentum).add_(grad)
                grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
            param.add_(grad, alpha=-rate)

    if momentum and not (weight_decay or nesterov or maximize):
        factors = {dtype: torch.tensor(momentum, dtype=dtype, device="cpu") for dtype in _EXACT}
        return partial(_momentum_sgd, update, factors)
    return update


_EXACT: Final = (torch.float32, torch.float64)
"""Types in which torch multiplies by a Python number as by a tensor of the type; others keep more of its digits."""


def _momentum_sgd(
    update: Update,
    factors: Mapping[torch.dtype, Tensor],
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    lr: Tensor | float,
) -> None:
    """*update* for its commonest options; the tensors have one dtype.

    On the CPU torch's calls for a list make the same calls for each item, in half the time that ours take. A tensor as
    the factor takes half as long as a number.
    """
    factor = factors.get(buffers[0].dtype)
    if factor is None or not buffers[0].is_cpu:
        update(params, grads, buffers, lr)
        return
    torch._foreach_mul_(buffers, factor)
    torch._foreach_add_(buffers, grads)
    torch._foreach_add_(params, buffers, alpha=-float(lr))


def _fused_sgd(
    params: Tensors, grads: Tensors, buffers: list[Tensor | None], lr: Tensor | float, **options: Any
) -> None:
    torch._fused_sgd_(params, grads, _given(buffers), lr=float(lr), **options)


def _given(tensors: list[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


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
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        maxima: list[Tensor | None],
        steps: Tensors,
        lr: Tensor | float,
    ) -> None:
        rate = float(lr)
        for param, grad, exp_avg, exp_avg_sq, maximum, step in zip(
            params, grads, exp_avgs, exp_avg_sqs, maxima, steps, strict=True
        ):
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
            if maximum is not None:
                exp_avg_sq = torch.maximum(maximum, exp_avg_sq, out=maximum)
            param.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / scale).add_(eps), value=-step_size)

    return update


def _fused_adam(
    kernel: Callable[..., Any],
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    maxima: list[Tensor | None],
    steps: Tensors,
    lr: Tensor | float,
    **options: Any,
) -> None:
    for step in steps:
        step.add_(1)
    given = _given(maxima)
    kernel(params, grads, exp_avgs, exp_avg_sqs, given, steps, lr=float(lr), amsgrad=bool(given), **options)


KERNELS: Final[Mapping[str, Callable[..., Update]]] = {
    "graphir.sgd": sgd,
    "graphir.adam": adam,
    "graphir.adamw": adamw,
}
"""For each optimizer type, what builds its kernel from the operator's arguments."""
