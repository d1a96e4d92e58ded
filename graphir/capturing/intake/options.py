"""What ``capture`` is given beside tensors: model, loss, clipping, micro-batches, loss scaling; and what is refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch

from ...errors import CaptureError
from ...ir.size import LARGEST, Dims
from ..words.places import where

__all__ = [
    "LossScaler",
    "Options",
    "read_loss_scale",
    "read_options",
    "read_sizes",
    "refuse_loss",
    "refuse_model",
    "refuse_output",
]


class LossScaler(NamedTuple):
    """A ``torch.amp.GradScaler`` as it is now.

    Attributes:
        scale: ``f32[]``.
        growth_tracker: ``i32[]``; steps since the scale last changed or a gradient was not finite.
        growth_factor, backoff_factor: factors by which the scale grows and shrinks.
        growth_interval: the number of finite steps after which the scale grows.
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int


class Options(NamedTuple):
    """What a step does to its loss and gradients, see :func:`.capture`.

    Attributes:
        clip_grad_norm: the largest norm of all gradients together; None: no limit.
        clip_grad_value: the largest magnitude of a gradient's element; None: no limit.
        accumulate: the number of micro-batches.
        loss_scale: a constant factor of the loss, or the scaler that chooses the factor; None: 1.
    """

    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    accumulate: int = 1
    loss_scale: float | LossScaler | None = None


def read_options(
    clip_grad_norm: float | None,
    clip_grad_value: float | None,
    accumulate: int,
    loss_scale: float | torch.amp.GradScaler | None,
    *,
    backward: bool,
    optimizer: bool,
) -> Options:
    """The options of a capture, from the arguments of ``capture`` that have these names.

    Args:
        clip_grad_norm, clip_grad_value, accumulate, loss_scale: as given.
        backward: whether there is a loss.
        optimizer: whether there is an optimizer.

    Raises:
        CaptureError: an argument has a wrong type or value, or does not go with the others.
    """
    norm = _positive("clip_grad_norm", clip_grad_norm)
    value = _positive("clip_grad_value", clip_grad_value)
    if norm is not None and value is not None:
        raise CaptureError(
            "clip_grad_norm and clip_grad_value are both given, and their results depend on which comes first",
            fix="pass one of them",
        )
    if type(accumulate) is not int or accumulate < 1:
        raise CaptureError(
            f"accumulate={accumulate!r} is not a number of micro-batches", fix="pass a whole number of at least 1"
        )
    scale = read_loss_scale(loss_scale, optimizer) if loss_scale is not None else None
    if not backward:
        used = (norm is not None, value is not None, accumulate > 1, scale is not None)
        for name in [name for name, given in zip(Options._fields, used, strict=True) if given]:
            raise CaptureError(
                f"{name} is given, but no loss, so that there are no gradients",
                fix=f"pass loss=, or leave {name} out",
            )
    return Options(norm, value, accumulate, scale)


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise CaptureError(
            f"{name}={value!r} is not a positive number", fix="pass a finite number above 0, such as 1.0"
        )
    return float(value)


def read_loss_scale(given: object, optimizer: bool) -> float | LossScaler | None:
    """The factor of a loss, or the scaler that chooses the factor.

    Raises:
        CaptureError: it is neither, the scaler is disabled, or there is no *optimizer* whose steps it could skip.
    """
    if not isinstance(given, torch.amp.GradScaler):
        if not isinstance(given, (int, float)):
            raise CaptureError(
                f"loss_scale is a {type(given).__name__}", fix="pass a number, or a torch.amp.GradScaler"
            )
        return _positive("loss_scale", given)
    if not given.is_enabled():
        # torch disables a scaler for a device that is missing. It looks like a scaler that was disabled on purpose.
        raise CaptureError(
            "loss_scale is a disabled GradScaler, so the program would not scale the loss; without a GPU torch "
            "disables GradScaler('cuda')",
            fix='to scale, pass torch.amp.GradScaler("cpu", init_scale=65536.0), which scales on every device; not to '
            "scale, leave loss_scale out",
        )
    if not optimizer:
        raise CaptureError(
            "loss_scale is a GradScaler, but there is no optimizer whose steps it could skip",
            fix="pass optimizer=, or a number as loss_scale",
        )
    state = given.state_dict()
    return LossScaler(
        torch.tensor(state["scale"], dtype=torch.float32, device="cpu"),
        torch.tensor(state["_growth_tracker"], dtype=torch.int32, device="cpu"),
        float(state["growth_factor"]),
        float(state["backoff_factor"]),
        int(state["growth_interval"]),
    )


IN_A_FUNCTION: Final = {
    **dict.fromkeys(("loss", "optimizer", "output", "clip_grad_norm", "clip_grad_value", "loss_scale")),
    "targets": (),
    "backward": False,
    "accumulate": 1,
}
"""Arguments of ``capture`` that say what a step function says itself, and what they are where they are left out."""


def refuse_beside_function(given: Mapping[str, object]) -> None:
    """Raise if an argument of :data:`IN_A_FUNCTION` is given beside a step function.

    Raises:
        CaptureError: names the argument.
    """
    for name, value in given.items():
        if value is not IN_A_FUNCTION[name] and value != IN_A_FUNCTION[name]:
            raise CaptureError(
                f"{name} is given beside a step function, which does that itself",
                fix=f"do it in the function, or leave {name} out",
            )


def refuse_model(model: object, taker: str = "capture") -> None:
    """Raise if *taker* can't capture *model*, before anything of the model is touched.

    Raises:
        CaptureError: *model* is no module, or one of its modules was compiled by TorchScript.
    """
    if not isinstance(model, torch.nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise CaptureError(
            f"{taker} takes an nn.Module, not {None if model is None else kind}",
            fix="pass the model itself; a function goes into the forward of an nn.Module",
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                "modules that TorchScript compiled can't be captured",
                where=where(path),
                fix="pass the nn.Module that was scripted or traced",
            )


def read_sizes(sizes: Iterable[Mapping[str, int]], dims: Dims, fixed: str) -> list[Dims]:
    """The sizes that ``capture`` was told to record, with a value for each dimension of the program.

    Args:
        sizes: as they were given.
        dims: the captured value of each dimension of the program.
        fixed: why sizes don't follow other dimensions.

    Raises:
        CaptureError: a name is no dimension of the program, or a number is no size.
    """
    found: list[Dims] = []
    for given in sizes:
        for dim, size in given.items() if isinstance(given, Mapping) else [(given, 0)]:
            if dim not in dims or type(size) is not int or not 1 <= size <= LARGEST:
                raise CaptureError(
                    f"sizes has {given!r}, and the program has the dimensions {', '.join(dims) or 'none'}"
                    + (f"; sizes are fixed: {fixed}" if fixed else ""),
                    fix="give mappings from dimensions to sizes from 1 up: sizes=[{'batch': 64}]",
                )
        found.append({**dims, **given})
    return found


def refuse_loss(loss: object, targets: object) -> None:
    """Raise if *loss* can't be called with the model's output and the *targets*.

    Raises:
        CaptureError: *loss* is no function, or a module's class, or takes more or fewer arguments.
    """
    if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
        raise CaptureError(f"loss is the class {loss.__name__}, not a loss", fix=f"make one: loss={loss.__name__}()")
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"loss is a {type(loss).__name__}, not a function",
            fix="pass a function of the model's output and the targets, such as torch.nn.functional.mse_loss",
        )
    if loss is None or not isinstance(targets, (tuple, list)):
        return
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, torch.nn.Module) else loss)
    except (TypeError, ValueError):  # a function in C without signature
        return
    try:
        signature.bind(None, *targets)
    except TypeError as e:
        raise CaptureError(
            f"the loss can't be called with the model's output and the targets ({len(targets)}): {e}",
            fix="pass in targets=, as a tuple, the arguments that the loss takes after the output",
        ) from None


def refuse_output(output: object, loss: object) -> None:
    """Raise if *output* can't be called with the model's output, or a *loss* is given too.

    Raises:
        CaptureError: *output* is no function, or the step returns the loss.
    """
    if output is not None and not callable(output):
        raise CaptureError(
            f"output is a {type(output).__name__}, not a function",
            fix="pass a function of what the model returns, such as output=lambda out: out.logits",
        )
    if output is not None and loss is not None:
        raise CaptureError(
            "output and loss are both given, but a step with a loss returns the loss",
            fix="leave output out, and let the loss choose from the results of the model",
        )
