"""Updates as ``torch.optim`` makes them with ``foreach=True``, its default on CUDA: by functions over lists of tensors.

Their kernels on CUDA round otherwise than those of single tensors: division by a number is one there, and is not
multiplication by its reciprocal. On the CPU the sequence of operators is what differs. Each list has one item, the
tensor of one parameter, so that no update holds what it computes for another one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["adagrad", "adam", "rmsprop", "sgd"]


def sgd(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    lr: float,
    *,
    momentum: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
) -> None:
    """``torch.optim.SGD``."""
    adjusted = _adjusted(param, grad, maximize, weight_decay)
    if buffer is not None and momentum != 0:
        torch._foreach_mul_([buffer], momentum)
        torch._foreach_add_([buffer], adjusted, alpha=1 - dampening)
        # torch adds to the gradient itself, which others read here.
        adjusted = list(torch._foreach_add(adjusted, [buffer], alpha=momentum)) if nesterov else [buffer]
    torch._foreach_add_([param], adjusted, alpha=-lr)


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    maximum: Tensor | None,
    step: Tensor,
    lr: float,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    decoupled: bool,
    eps: float,
    maximize: bool,
) -> None:
    """``torch.optim.Adam``; ``AdamW`` (*decoupled*)."""
    step.add_(1)
    if decoupled and weight_decay != 0:
        torch._foreach_mul_([param], 1 - lr * weight_decay)
    adjusted = _adjusted(param, grad, maximize, 0.0 if decoupled else weight_decay)
    torch._foreach_lerp_([exp_avg], adjusted, 1 - beta1)
    torch._foreach_mul_([exp_avg_sq], beta2)
    torch._foreach_addcmul_([exp_avg_sq], adjusted, adjusted, 1 - beta2)
    del adjusted  # the scale would be made beside it
    t = step.item()
    if maximum is not None:
        torch._foreach_maximum_([maximum], [exp_avg_sq])
    scale = torch._foreach_sqrt([exp_avg_sq if maximum is None else maximum])
    torch._foreach_div_(scale, [(1 - beta2**t) ** 0.5])
    torch._foreach_add_(scale, eps)
    torch._foreach_addcdiv_([param], [exp_avg], scale, [lr / (1 - beta1**t) * -1])


def adagrad(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    step: Tensor,
    lr: float,
    *,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """``torch.optim.Adagrad``."""
    step.add_(1)
    adjusted = _adjusted(param, grad, maximize, weight_decay)
    step_size = -lr / (1 + (step.item() - 1) * lr_decay)
    torch._foreach_addcmul_([total], adjusted, adjusted, value=1)
    scale = torch._foreach_sqrt([total])
    torch._foreach_add_(scale, eps)
    if adjusted[0] is grad:
        adjusted = list(torch._foreach_mul(adjusted, [step_size]))
    else:
        torch._foreach_mul_(adjusted, [step_size])
    torch._foreach_addcdiv_([param], adjusted, scale)


def rmsprop(
    param: Tensor,
    grad: Tensor,
    square_avg: Tensor,
    buffer: Tensor | None,
    grad_avg: Tensor | None,
    step: Tensor,
    lr: float,
    *,
    momentum: float,
    weight_decay: float,
    alpha: float,
    eps: float,
    maximize: bool,
) -> None:
    """``torch.optim.RMSprop``."""
    step.add_(1)
    adjusted = _adjusted(param, grad, maximize, weight_decay)
    torch._foreach_mul_([square_avg], alpha)
    torch._foreach_addcmul_([square_avg], adjusted, adjusted, value=1 - alpha)
    if grad_avg is None:
        scale = torch._foreach_sqrt([square_avg])
    else:
        torch._foreach_lerp_([grad_avg], adjusted, 1 - alpha)
        scale = torch._foreach_addcmul([square_avg], [grad_avg], [grad_avg], value=-1)
        torch._foreach_sqrt_(scale)
    torch._foreach_add_(scale, eps)
    if buffer is None or not momentum > 0:
        torch._foreach_addcdiv_([param], adjusted, scale, value=-lr)
    else:
        torch._foreach_mul_([buffer], momentum)
        torch._foreach_addcdiv_([buffer], adjusted, scale)
        torch._foreach_add_([param], [buffer], alpha=-lr)


def _adjusted(param: Tensor, grad: Tensor, maximize: bool, weight_decay: float) -> list[Tensor]:
    """The gradient to descend by: another tensor where it is not *grad* itself."""
    adjusted = list(torch._foreach_neg([grad])) if maximize else [grad]
    if weight_decay == 0:
        return adjusted
    if not maximize:
        return list(torch._foreach_add(adjusted, [param], alpha=weight_decay))
    torch._foreach_add_(adjusted, [param], alpha=weight_decay)
    return adjusted
