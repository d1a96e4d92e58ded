"""Kernels of the optimizer types: updates bit for bit as ``torch.optim`` makes them.

Each has torch's forms where torch has them: ``for_loop``, the sequence of operators of ``foreach=False``, ``foreach``,
and ``fused``. They are built once for an operator's options and called with tensors every step. As in torch they take
lists, an item a parameter, so that an executor can make one call of many updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from operator import not_
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim._adafactor import _single_tensor_adafactor
from torch.optim._muon import _single_tensor_muon
from torch.optim.adadelta import _single_tensor_adadelta
from torch.optim.adamax import _single_tensor_adamax
from torch.optim.asgd import _single_tensor_asgd
from torch.optim.nadam import _single_tensor_nadam
from torch.optim.radam import _single_tensor_radam
from torch.optim.rprop import _single_tensor_rprop

from graphir.ir.moved import MOVED, NOW
from graphir.ir.opset import signature
from graphir.ir.tensor import GRAIN_SIZE
from graphir.optim import update_dense

from . import foreach
from .bounds import check_dense
from .joined import Joined
from .one_by_one import one_by_one
from .short import in_one_thread
from .sparse import SPARSE_UPDATES

__all__ = ["FORMS", "UPDATES", "Operands", "Update", "as_torch_has_it", "operands_of", "updater"]

FORMS: Final = ("for_loop", "foreach", "fused")
_Item = TypeVar("_Item")

Tensors: TypeAlias = list[Tensor]
Given: TypeAlias = list[Tensor | None]


class Update(Protocol):
    """Updates parameters and their optimizer states in place.

    It is given the type's tensors in order: of each a list with an item a parameter (None where the operator has no
    such tensor), and last the learning rate, which they share, as a tensor or a number. The other numbers that they
    share and that move from step to step are given by name (``momentum=0.9``), and take the place of the options.
    """

    def __call__(self, params: Tensors, grads: Tensors, *rest: Any, **numbers: Any) -> None: ...


@dataclass(frozen=True)
class Operands(Generic[_Item]):
    """The operands of an update.

    Attributes:
        tensors: of the parameter: itself, its gradient, its state.
        rate: the learning rate.
        found_inf: what says whether to skip the update.
        numbers: the other numbers that move from step to step, by the options' names; None where they do not.
    """

    tensors: tuple[_Item, ...]
    rate: _Item
    found_inf: _Item
    numbers: dict[str, _Item]


def operands_of(type: str, positional: Sequence[_Item]) -> Operands[_Item]:
    """What an update's operands are, given one for each tensor parameter of its type."""
    names = [param.name for param in signature(type).tensors]
    at = names.index("lr")
    named = zip(names[at + 2 :], positional[at + 2 :], strict=True)
    numbers = {name.removesuffix(NOW): item for name, item in named}
    return Operands(tuple(positional[:at]), positional[at], positional[at + 1], numbers)


def updater(type: str, options: Mapping[str, Any]) -> Update:
    """The kernel of an optimizer type with these options; the others are the defaults of its signature."""
    given = {p.name: p.default for p in signature(type).params if p.kind == "value"} | dict(options)
    numbers = {name: given.pop(name) for name in MOVED if name in given}
    update = UPDATES[type](**given)
    return partial(update, **numbers) if numbers else update


def as_torch_has_it(kept: Mapping[str, Joined], optimizer: str) -> dict[str, Any]:
    """The state that ``torch.optim`` has of a parameter for *kept*, the state of an operator, by the operator's names.

    A momentum buffer that no update has changed yet is left out: torch has none before the first update, and does not
    dampen that one. ``SparseAdam`` counts its steps in Python: powers of a tensor would be rounded otherwise.
    """
    own = {"next_dampening"}
    if "next_dampening" in kept and kept["next_dampening"].clone() == 0:
        own.add("momentum_buffer")
    counts = {"step"} if optimizer == "SparseAdam" else set()
    return {key: int(t.clone()) if key in counts else t.clone() for key, t in kept.items() if key not in own}


def _sgd(*, form: str, nesterov: bool, maximize: bool, dampening: float = 0.0) -> Update:
    """``torch.optim.SGD``. A momentum buffer starts at -0.0, the neutral element of addition. While the momentum is 0,
    buffers stay as they are."""
    if form == "fused":
        return partial(_fused_sgd, dampening=dampening, nesterov=nesterov, maximize=maximize, is_first_step=False)
    if form == "foreach":
        return one_by_one(foreach.sgd, dampening=dampening, nesterov=nesterov, maximize=maximize)
    plain = not (nesterov or dampening or maximize)

    def update(
        params: Tensors,
        grads: Tensors,
        buffers: Given,
        lr: Tensor | float,
        *,
        momentum: Tensor | float,
        weight_decay: Tensor | float,
    ) -> None:
        rate, momentum, weight_decay = float(lr), float(momentum), float(weight_decay)
        if plain and momentum != 0 and weight_decay == 0 and params[0].is_cpu and params[0].dtype in _EXACT:
            _momentum_sgd(params, grads, _present(buffers), rate, _factor(momentum, params[0].dtype))
            return
        for param, grad, buffer in zip(params, grads, buffers, strict=True):
            if maximize:
                grad = -grad
            if weight_decay != 0:
                grad = grad.add(param, alpha=weight_decay)
            if buffer is not None and momentum != 0:
                buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
                grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
            param.add_(grad, alpha=-rate)

    return update


_EXACT: Final = (torch.float32, torch.float64)
"""Types in which torch multiplies by a Python number as by a tensor of the type; others keep more of its digits."""


@lru_cache(maxsize=64)
def _factor(number: float, dtype: torch.dtype) -> Tensor:
    """*number* as a tensor: as a factor it takes half as long as a number."""
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device="cpu")


def _momentum_sgd(params: Tensors, grads: Tensors, buffers: Tensors, rate: float, momentum: Tensor) -> None:
    """The commonest update; the tensors have one dtype.

    On the CPU torch's functions over lists make the same calls for each item, in half the time that calls from here
    take. A long parameter is updated by itself, while caches hold it: three calls over all parameters would read each
    long one from memory three times.
    """
    short, long = _by_length((params, grads, buffers))
    if short:
        params, grads, buffers = short
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads)
        torch._foreach_add_(params, buffers, alpha=-rate)
    for param, grad, buffer in zip(*long, strict=True):
        param.add_(buffer.mul_(momentum).add_(grad), alpha=-rate)


def _by_length(lists: Sequence[Tensors]) -> tuple[Sequence[Tensors], Sequence[Tensors]]:
    """The items of *lists* for short parameters, which are in the first one, and those for long ones."""
    sizes = [param.numel() for param in lists[0]]
    if max(sizes) < GRAIN_SIZE:
        return lists, ()
    if min(sizes) >= GRAIN_SIZE:
        return (), lists
    short = [n < GRAIN_SIZE for n in sizes]
    return [list(compress(of, short)) for of in lists], [list(compress(of, map(not_, short))) for of in lists]


def _fused_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Given,
    lr: Tensor | float,
    *,
    momentum: Tensor | float,
    weight_decay: Tensor | float,
    **options: Any,
) -> None:
    momentum = float(momentum)
    kept = _present(buffers) if momentum != 0 else []
    options |= {"lr": float(lr), "momentum": momentum, "weight_decay": float(weight_decay)}
    _call(torch._fused_sgd_, (params, grads, kept), **options)


def _call(fused: Callable[..., None], lists: Sequence[Tensors], of_elements: int | None = None, **options: Any) -> None:
    """Call one of torch's fused kernels with *lists*, of which the first has the parameters. A list is empty where the
    kernel shall have no tensors of its kind. The tensors of the first *of_elements* lists, by default of all, have an
    element for each element of the parameter.

    On the CPU it wakes all threads for each parameter. They get parts that end at multiples of a vector, so that the
    bits are the same in one thread.
    """
    params = lists[0]
    if not params[0].is_cpu:
        fused(*lists, **options)
        return
    check_dense([given for given in lists[:of_elements] if given])
    short, long = _by_length(lists)
    if short:
        in_one_thread(fused, *short, **options)
    if long:
        fused(*long, **options)


def _dampened_sgd(*, dampening: float, **options: Any) -> Update:
    """``torch.optim.SGD`` with dampening, from the second update with momentum on."""
    first, later = _sgd(**options), _sgd(dampening=dampening, **options)

    def update(
        params: Tensors,
        grads: Tensors,
        buffers: Tensors,
        dampenings: Tensors,
        lr: Tensor | float,
        *,
        momentum: Tensor | float,
        weight_decay: Tensor | float,
    ) -> None:
        numbers = {"momentum": momentum, "weight_decay": weight_decay}
        for param, grad, buffer, now in zip(params, grads, buffers, dampenings, strict=True):
            (later if now.item() else first)([param], [grad], [buffer], lr, **numbers)
            if momentum != 0:
                now.fill_(dampening)

    return update


def _present(tensors: Given) -> Tensors:
    return [tensor for tensor in tensors if tensor is not None]


def _adam(
    *,
    decoupled: bool,
    form: str,
    eps: float,
    maximize: bool,
) -> Update:
    """``torch.optim.Adam`` adds weight decay to the gradient; ``AdamW`` (*decoupled*) scales the parameter by it."""
    if form == "fused":
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        return partial(_fused_adam, kernel, eps=eps, maximize=maximize)
    if form == "foreach":
        return one_by_one(foreach.adam, decoupled=decoupled, eps=eps, maximize=maximize)

    def update(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        maxima: Given,
        steps: Tensors,
        lr: Tensor | float,
        *,
        beta1: Tensor | float,
        beta2: Tensor | float,
        weight_decay: Tensor | float,
    ) -> None:
        rate, weight_decay = float(lr), float(weight_decay)
        beta1, beta2 = float(beta1), float(beta2)
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
    maxima: Given,
    steps: Tensors,
    lr: Tensor | float,
    *,
    beta1: Tensor | float,
    beta2: Tensor | float,
    weight_decay: Tensor | float,
    **options: Any,
) -> None:
    torch._foreach_add_(steps, 1)
    given = _present(maxima)
    lists = params, grads, exp_avgs, exp_avg_sqs, given, steps
    options |= {"lr": float(lr), "beta1": float(beta1), "beta2": float(beta2), "weight_decay": float(weight_decay)}
    _call(kernel, lists, len(lists) - 1, amsgrad=bool(given), **options)


def _adagrad(*, form: str, lr_decay: float, eps: float, maximize: bool) -> Update:
    """``torch.optim.Adagrad``."""
    if form == "fused":
        return partial(_fused_adagrad, lr_decay=lr_decay, eps=eps, maximize=maximize)
    if form == "foreach":
        return one_by_one(foreach.adagrad, lr_decay=lr_decay, eps=eps, maximize=maximize)

    def update(
        params: Tensors,
        grads: Tensors,
        sums: Tensors,
        steps: Tensors,
        lr: Tensor | float,
        *,
        weight_decay: Tensor | float,
    ) -> None:
        rate, weight_decay = float(lr), float(weight_decay)
        for param, grad, total, step in zip(params, grads, sums, steps, strict=True):
            step.add_(1)
            if maximize:
                grad = -grad
            if weight_decay != 0:
                grad = grad.add(param, alpha=weight_decay)
            total.addcmul_(grad, grad, value=1)
            step_size = rate / (1 + (step.item() - 1) * lr_decay)
            param.addcdiv_(grad, total.sqrt().add_(eps), value=-step_size)

    return update


def _fused_adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    lr: Tensor | float,
    *,
    weight_decay: Tensor | float,
    **options: Any,
) -> None:
    torch._foreach_add_(steps, 1)
    options |= {"lr": float(lr), "weight_decay": float(weight_decay)}
    _call(torch._fused_adagrad_, (params, grads, sums, steps), 3, **options)


def _rmsprop(*, form: str, alpha: float, eps: float, maximize: bool) -> Update:
    """``torch.optim.RMSprop``, centered where it is given averages of the gradients. While the momentum is 0, buffers
    stay as they are."""
    if form == "foreach":
        return one_by_one(foreach.rmsprop, alpha=alpha, eps=eps, maximize=maximize)

    def update(
        params: Tensors,
        grads: Tensors,
        square_avgs: Tensors,
        buffers: Given,
        grad_avgs: Given,
        steps: Tensors,
        lr: Tensor | float,
        *,
        momentum: Tensor | float,
        weight_decay: Tensor | float,
    ) -> None:
        rate, momentum, weight_decay = float(lr), float(momentum), float(weight_decay)
        for param, grad, square_avg, buffer, grad_avg, step in zip(
            params, grads, square_avgs, buffers, grad_avgs, steps, strict=True
        ):
            step.add_(1)
            if maximize:
                grad = -grad
            if weight_decay != 0:
                grad = grad.add(param, alpha=weight_decay)
            square_avg.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
            if grad_avg is None:
                scale = square_avg.sqrt()
            else:
                grad_avg.lerp_(grad, 1 - alpha)
                scale = square_avg.addcmul(grad_avg, grad_avg, value=-1).sqrt_()
            scale.add_(eps)
            if buffer is None or not momentum > 0:
                param.addcdiv_(grad, scale, value=-rate)
            else:
                buffer.mul_(momentum).addcdiv_(grad, scale)
                param.add_(buffer, alpha=-rate)
            del scale  # the next parameter's would be made beside it

    return update


def _row_wise_adagrad(*, eps: float, maximize: bool) -> Update:
    """:class:`graphir.optim.RowWiseAdagrad`."""

    def update(params: Tensors, grads: Tensors, row_sums: Tensors, lr: Tensor | float) -> None:
        rate = float(lr)
        for param, grad, row_sum in zip(params, grads, row_sums, strict=True):
            update_dense(param, row_sum, -grad if maximize else grad, rate, eps)

    return update


def _for_loop(
    function: Callable[..., None], as_torch_has_it: Callable[[dict[str, Any]], dict[str, Any]] = dict, **fixed: Any
) -> Callable[..., Update]:
    """What builds the update of one of torch's functions for the for-loop form of an optimizer, with options that are
    *fixed*, of options *as torch has them*."""

    def build(**options: Any) -> Update:
        given = {**as_torch_has_it(options), **fixed}

        def update(params: Tensors, grads: Tensors, *rest: Any, **numbers: Any) -> None:
            *state, lr = rest
            moving = {name: float(number) for name, number in numbers.items()}
            if function is not _single_tensor_rprop:  # which reads the rate before its first step alone
                moving["lr"] = float(lr)
            for i, param in enumerate(params):
                function([param], [grads[i]], *[[kept[i]] for kept in state], **given, **moving)

        return update

    return build


_EAGER: Final[dict[str, Any]] = {"capturable": False, "differentiable": False, "has_complex": False}


def _adafactor(
    params: Tensors, grads: Tensors, rows: Given, columns: Given, variances: Given, steps: Tensors, **options: Any
) -> None:
    _single_tensor_adafactor(params, grads, rows, columns, variances, steps, None, None, **options)


def _of_adafactor(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "eps1": options["eps1"] if options["eps1"] >= 0 else None}


def _of_muon(options: dict[str, Any]) -> dict[str, Any]:
    coefficients = tuple([options.pop(name) for name in ("a", "b", "c")])
    return {**options, "ns_coefficients": coefficients}


UPDATES: Final[Mapping[str, Callable[..., Update]]] = {
    "graphir.sgd": _sgd,
    "graphir.dampened_sgd": _dampened_sgd,
    "graphir.adam": partial(_adam, decoupled=False),
    "graphir.adamw": partial(_adam, decoupled=True),
    "graphir.adagrad": _adagrad,
    "graphir.rmsprop": _rmsprop,
    "graphir.row_wise_adagrad": _row_wise_adagrad,
    "graphir.adadelta": _for_loop(_single_tensor_adadelta, **_EAGER),
    "graphir.adamax": _for_loop(_single_tensor_adamax, **_EAGER),
    "graphir.nadam": _for_loop(_single_tensor_nadam, **_EAGER),
    "graphir.radam": _for_loop(_single_tensor_radam, **_EAGER),
    "graphir.asgd": _for_loop(_single_tensor_asgd, **_EAGER),
    "graphir.rprop": _for_loop(_single_tensor_rprop, **_EAGER),
    "graphir.adafactor": _for_loop(_adafactor, _of_adafactor, has_complex=False),
    "graphir.muon": _for_loop(_single_tensor_muon, _of_muon, has_complex=False),
    **SPARSE_UPDATES,
}
"""For each optimizer type, what builds its kernel from all of the operator's arguments; :func:`updater` does."""
