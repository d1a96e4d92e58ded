"""The optimizer's update as graphir's own operators, one per parameter.

Each is bit for bit what ``torch.optim`` does in its ``fused`` or in its for-loop form (``foreach`` computes the same
bits as the latter). State that torch makes in the first step exists here from the start: a momentum buffer that was
never written is -0.0, to which adding a gradient gives that gradient, signs of zeros included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from ..errors import CaptureError
from ..ir.operator import Arg
from ..ir.opset import signature
from ..ir.program import Scalar

__all__ = ["Group", "OptimizerState", "ParamUpdate", "read_optimizer"]

_SUPPORTED: Final = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_FIX: Final = f"supported: {', '.join(c.__name__ for c in _SUPPORTED)}"


class OptimizerState(NamedTuple):
    """One tensor of the optimizer's state.

    Attributes:
        key: the optimizer's own name for it, which is also the operator's parameter.
        tensor: its value before the first step.
        on_host: it lives on the cpu.
    """

    key: str
    tensor: torch.Tensor
    on_host: bool


class ParamUpdate(NamedTuple):
    """What happens to one parameter.

    Attributes:
        param: its blob.
        type: of the operator.
        args: of the operator.
        state: in the order of the operator's parameters.
        started: the optimizer holds state for it already.
    """

    param: str
    type: str
    args: Mapping[str, Arg]
    state: tuple[OptimizerState, ...]
    started: bool


class Group(NamedTuple):
    """A parameter group: its parameters' blobs, its options (``lr`` among them), and the updates."""

    params: tuple[str, ...]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]
    updates: tuple[ParamUpdate, ...]


def read_optimizer(optimizer: torch.optim.Optimizer, blobs: Mapping[int, str]) -> tuple[Group, ...]:
    """The optimizer's groups.

    Args:
        optimizer: not changed.
        blobs: the blob of each of the model's parameters, by the ``id`` of the tensor.

    Raises:
        CaptureError: the optimizer, or an option of a group, is not supported.
    """
    if type(optimizer) not in _SUPPORTED:
        raise CaptureError(f"optimizer {type(optimizer).__name__} is not supported", fix=_FIX)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CaptureError("the optimizer has step hooks, which a program would not run", fix="remove the hooks")
    return tuple(_group(optimizer, i, group, blobs) for i, group in enumerate(optimizer.param_groups))


def _group(optimizer: torch.optim.Optimizer, i: int, group: Mapping[str, Any], blobs: Mapping[int, str]) -> Group:
    place = f"parameter group {i} of {type(optimizer).__name__}"
    for option, unset in (("differentiable", False), ("capturable", False), ("dampening", 0)):
        if group.get(option, unset) != unset:
            raise CaptureError(
                f"{option}={group[option]} is not supported", where=place, fix=f"set {option}={unset} in this group"
            )
    for option, value in group.items():
        if option != "params" and isinstance(value, torch.Tensor):
            raise CaptureError(f"{option} is a tensor", where=place, fix=f"pass {option} as a Python float")
    params = []
    for k, param in enumerate(group["params"]):
        if id(param) not in blobs:
            raise CaptureError(
                f"parameter {k} (shape {list(param.shape)}) does not belong to the model",
                where=place,
                fix="pass only model.parameters() to the optimizer",
            )
        if param.is_complex():
            raise CaptureError(f"parameter {blobs[id(param)]!r} is complex", where=place, fix="use real parameters")
        params.append(blobs[id(param)])
    options = {
        key: tuple(value) if isinstance(value, (list, tuple)) else value
        for key, value in group.items()
        if key != "params"
    }
    _check_options(options, place)
    make = _sgd if type(optimizer) is torch.optim.SGD else _adam
    updates = tuple(
        make(type(optimizer).__name__, name, param, options, optimizer.state.get(param, {}))
        for name, param in zip(params, group["params"], strict=True)
    )
    return Group(tuple(params), options, updates)


def _check_options(options: Mapping[str, Any], place: str) -> None:
    for key, value in options.items():
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, (bool, int, float, str, type(None))):
                raise CaptureError(
                    f"option {key} is a {type(item).__name__}", where=place, fix="use numbers and strings"
                )


def _form(options: Mapping[str, Any]) -> str:
    return "fused" if options.get("fused") else "for_loop"


def _plain(type: str, args: Mapping[str, Arg]) -> dict[str, Arg]:
    """*args* without those that equal the operator's defaults."""
    defaults = {p.name: p.default for p in signature(type).params if not p.required}
    return {name: value for name, value in args.items() if name not in defaults or defaults[name] != value}


def _state(
    param: torch.Tensor, kept: Mapping[str, Any], key: str, fill: float, device: torch.device | None = None
) -> OptimizerState:
    """The state that the optimizer has under *key*, or else the parameter's shape filled with *fill*."""
    value = kept.get(key)
    if key == "step":
        step = fill if value is None else float(value)
        return OptimizerState(key, torch.full((), step, dtype=torch.float32, device=device), device is None)
    if value is None:
        return OptimizerState(key, torch.full_like(param.detach(), fill), False)
    return OptimizerState(key, torch.empty_like(param.detach()).copy_(value.detach()), False)


def _sgd(
    optimizer: str, name: str, param: torch.Tensor, options: Mapping[str, Any], kept: Mapping[str, Any]
) -> ParamUpdate:
    args: dict[str, Arg] = {"form": _form(options), "momentum": float(options["momentum"])}
    args |= {"weight_decay": float(options["weight_decay"])}
    args |= {key: bool(options.get(key)) for key in ("nesterov", "maximize")}
    state: tuple[OptimizerState, ...] = ()
    if options["momentum"]:
        state = (_state(param, kept, "momentum_buffer", -0.0),)
    return ParamUpdate(name, "graphir.sgd", _plain("graphir.sgd", args), state, bool(kept))


def _adam(
    optimizer: str, name: str, param: torch.Tensor, options: Mapping[str, Any], kept: Mapping[str, Any]
) -> ParamUpdate:
    decoupled = optimizer == "AdamW" or bool(options.get("decoupled_weight_decay"))
    type = "graphir.adamw" if decoupled else "graphir.adam"
    beta1, beta2 = options["betas"]
    args: dict[str, Arg] = {"form": _form(options), "beta1": float(beta1), "beta2": float(beta2)}
    args |= {"eps": float(options["eps"]), "weight_decay": float(options["weight_decay"])}
    args |= {"maximize": bool(options.get("maximize"))}
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])]
    state = [_state(param, kept, key, 0.0) for key in keys]
    state.append(_state(param, kept, "step", 0.0, param.device if options.get("fused") else None))
    return ParamUpdate(name, type, _plain(type, args), tuple(state), bool(kept))
