"""The optimizer's update as graphir's own operators, one per parameter.

Each operator computes, bit for bit, what ``torch.optim`` computes in its for-loop form, in its ``foreach`` form (the
default on CUDA) or in its ``fused`` form. State that torch makes in the first step exists here from the start. A
momentum buffer that was never written is -0.0: adding a gradient to -0.0 gives that gradient, signs of zeros included.
torch does not dampen the first gradient, so the dampening of the next gradient is state, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ...errors import CaptureError
from ...ir.blob import contiguous_strides
from ...ir.moved import MOVED, NOW, moved
from ...ir.operator import Arg
from ...ir.opset import signature
from ...ir.optypes.table import operator_type
from ...ir.program import Scalar
from ...optim import RowWiseAdagrad
from .state import has_data

__all__ = ["Group", "OptimizerState", "ParamUpdate", "read_optimizers", "with_forms_of_cuda", "with_layout"]


class OptimizerState(NamedTuple):
    """One tensor of the optimizer's state.

    Attributes:
        key: the name of the operator's parameter and of the optimizer's state; ``next_dampening`` is graphir's alone.
        tensor: the value before the first step.
        strides: of the state's blob.
        on_host: whether the state lives on the CPU.
    """

    key: str
    tensor: torch.Tensor
    strides: tuple[int, ...]
    on_host: bool


class ParamUpdate(NamedTuple):
    """The update of one parameter.

    Attributes:
        param: the parameter's blob.
        type: of the operator.
        args: of the operator.
        numbers: the present values of numbers that are operands, the learning rate apart.
        state: in the order of the operator's parameters.
        started: whether the optimizer already holds state of the parameter.
    """

    param: str
    type: str
    args: Mapping[str, Arg]
    numbers: Mapping[str, float]
    state: tuple[OptimizerState, ...]
    started: bool


class Group(NamedTuple):
    """A parameter group: its parameters' blobs, its options (``lr`` among them), and the updates.

    ``numbers`` are the names of the numbers that move from step to step, the learning rate apart; ``optimizer`` is the
    position of its optimizer among all of the step.
    """

    params: tuple[str, ...]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]
    updates: tuple[ParamUpdate, ...]
    optimizer: int = 0

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for update in self.updates for name in update.numbers))


def read_optimizers(optimizers: Sequence[object], blobs: Mapping[int, str]) -> tuple[Group, ...]:
    """The groups of all optimizers.

    Args:
        optimizers: are only read.
        blobs: the blob of each of the model's parameters, by the ``id`` of the tensor.

    Raises:
        CaptureError: an optimizer, an option of a group, or the state of a parameter is not supported; or two
            optimizers have one parameter.
    """
    found = [(i, group) for i, optimizer in enumerate(optimizers) for group in _groups(optimizer, blobs)]
    owner: dict[str, int] = {}
    for i, group in found:
        for param in group.params:
            if owner.setdefault(param, i) != i:
                kinds = [type(optimizers[number]).__name__ for number in (owner[param], i)]
                raise CaptureError(
                    f"parameter {param!r} has two optimizers, {kinds[0]} and {kinds[1]}",
                    fix="give each parameter to one optimizer",
                )
    return tuple([group._replace(optimizer=i) for i, group in found])


def _groups(optimizer: object, blobs: Mapping[int, str]) -> list[Group]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else f"a {type(optimizer).__name__}"
        raise CaptureError(
            f"optimizer is {given}, not an optimizer",
            fix="make one: torch.optim.SGD(model.parameters(), lr=0.1)",
        )
    if type(optimizer) not in _RULES:
        raise CaptureError(
            f"optimizer {type(optimizer).__name__} is not supported",
            fix=f"supported: {', '.join(kind.__name__ for kind in _RULES)}; or capture without an optimizer: "
            "any optimizer can take the gradients that gradients() returns after each step",
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CaptureError("the optimizer has step hooks, which a program would not run", fix="remove the hooks")
    return [_group(optimizer, i, group, blobs) for i, group in enumerate(optimizer.param_groups)]


def with_forms_of_cuda(groups: Sequence[Group]) -> tuple[Group, ...]:
    """The *groups* with the forms of CUDA: torch updates a group that names no form by lists."""
    return tuple([group if _names_form(group.options) else _by_lists(group) for group in groups])


def _names_form(options: Mapping[str, Any]) -> bool:
    return any(options.get(form) is not None for form in ("foreach", "fused"))


def _by_lists(group: Group) -> Group:
    formed = [
        update._replace(args={"form": "foreach", **update.args}) if "form" in _parameters(update.type) else update
        for update in group.updates
    ]
    return group._replace(updates=tuple(formed))


def _parameters(type: str) -> set[str]:
    return {p.name for p in signature(type).params}


def _group(optimizer: torch.optim.Optimizer, i: int, group: Mapping[str, Any], blobs: Mapping[int, str]) -> Group:
    place = f"parameter group {i} of {type(optimizer).__name__}"
    for option in ("differentiable", "capturable"):
        if group.get(option):
            raise CaptureError(f"{option}=True is not supported", where=place, fix=f"set {option}=False in this group")
    for option, value in group.items():
        if option != "params" and isinstance(value, torch.Tensor):
            raise CaptureError(f"{option} is a tensor", where=place, fix=f"pass {option} as a Python float")
    options = {
        key: tuple(value) if isinstance(value, (list, tuple)) else value
        for key, value in group.items()
        if key != "params"
    }
    _check_options(options, place)
    updates = []
    for k, param in enumerate(group["params"]):
        if id(param) not in blobs:
            raise CaptureError(
                f"parameter {k} (shape {list(param.shape)}) does not belong to the model",
                where=place,
                fix="pass only model.parameters() to the optimizer",
            )
        name = blobs[id(param)]
        _check_param(name, param, place)
        if type(optimizer) is torch.optim.SGD:
            _check_fused_sgd(name, param, options, place)
        updates.append(_update(optimizer, name, param, options, place))
    return Group(tuple([update.param for update in updates]), options, tuple(updates))


def with_layout(update: ParamUpdate, sparse: bool, alone: bool) -> ParamUpdate:
    """*update* with the operator for a dense or a sparse gradient.

    Args:
        update: the update by a dense gradient.
        sparse: whether the gradient is sparse.
        alone: whether torch updates the parameter in its for-loop even where it updates others by lists.

    Raises:
        CaptureError: torch does not update by such a gradient, or updates with momentum, whose buffer would be sparse.
    """
    ours = operator_type(update.type).sparse or None
    if alone and update.args.get("form") == "foreach":
        update = update._replace(args={key: value for key, value in update.args.items() if key != "form"})
    if not sparse:
        if ours == update.type:
            raise CaptureError(
                f"SparseAdam does not take the dense gradient of {update.param!r}", fix="give that parameter to Adam"
            )
        return update
    taken = _parameters(ours) if ours is not None else set()
    unfit = [f"{key}={value!r}" for key, value in update.args.items() if key not in taken]
    unfit += [f"{name}={value!r}" for name, value in update.numbers.items() if name + NOW not in taken]
    if ours is None or unfit:
        what = unfit[0] if ours is not None else update.type
        raise CaptureError(
            f"{what} does not support the sparse gradient of {update.param!r}",
            fix="use SGD without momentum and weight decay, Adagrad without weight decay, SparseAdam or "
            "RowWiseAdagrad, without fused=True; or use sparse=False",
        )
    return update._replace(type=ours)


def _check_options(options: Mapping[str, Any], place: str) -> None:
    for key, value in options.items():
        for item in value if isinstance(value, tuple) else (value,):
            if not isinstance(item, (bool, int, float, str, type(None))):
                raise CaptureError(
                    f"option {key} is a {type(item).__name__}", where=place, fix="use numbers and strings"
                )


def _form(options: Mapping[str, Any]) -> str:
    """The form in which torch makes the updates of a group on the host."""
    return "fused" if options.get("fused") else "foreach" if options.get("foreach") else "for_loop"


def _check_param(name: str, param: torch.Tensor, place: str) -> None:
    if param.is_complex():
        raise CaptureError(f"parameter {name!r} is complex", where=place, fix="use real parameters")


def _check_fused_sgd(name: str, param: torch.Tensor, options: Mapping[str, Any], place: str) -> None:
    """Refuse ``fused=True`` for 16-bit parameters that are not on a GPU.

    torch's kernel on the CPU takes their buffers to be twice as long as they are, and does not write the parameters.
    """
    half = param.dtype in (torch.float16, torch.bfloat16) and param.device.type != "cuda"
    if options.get("fused") and half and param.requires_grad:
        kind = str(param.dtype).removeprefix("torch.")
        raise CaptureError(
            f"fused=True is not supported for {name!r} of type {kind}: torch's fused SGD on the CPU does not update "
            "such parameters, and reads beyond the end of their momentum buffers",
            where=place,
            fix="set fused=False in this group",
        )


def _update(
    optimizer: torch.optim.Optimizer, name: str, param: torch.Tensor, options: Mapping[str, Any], place: str
) -> ParamUpdate:
    kept = {key: value for key, value in optimizer.state.get(param, {}).items() if value is not None}
    rule = _RULES[type(optimizer)](options, optimizer.defaults, kept)
    if rule.type in _FOR_LOOPS and options.get("foreach"):
        raise CaptureError(
            f"foreach=True of {type(optimizer).__name__} is not supported",
            where=place,
            fix="set foreach=False in this group: a program has the for-loop form",
        )
    if rule.type == "graphir.adafactor":  # which has a variance for each row and column of a matrix
        unused = ("variance",) if param.dim() > 1 else ("row_var", "col_var")
        rule = rule._replace(state={key: first for key, first in rule.state.items() if key not in unused})
    values = {**options, **rule.args, "form": _form(options)}
    params = signature(rule.type).params
    taken = {p.name for p in params}
    now = moved(options).items()
    numbers = {name: value for name, value in now if name + NOW in taken and _may_move(name, value)}
    args: dict[str, Arg] = {}
    for p in params:
        if p.kind != "value" or p.name in MOVED:  # a moved number that is no operand is 0, its default
            continue
        if (value := type(p.default)(values[p.name])) != p.default:
            args[p.name] = value
    if kept:
        _check_kept(name, param, kept, rule, place)
    on_card = bool(options.get("fused")) or rule.on_card
    state = [_state(key, first, param, kept, on_card) for key, first in rule.state.items()]
    return ParamUpdate(name, rule.type, args, numbers, tuple(state), bool(kept))


def _may_move(name: str, value: Any) -> bool:
    """Whether a number is an operand: torch computes differently for a momentum or weight decay of 0, but no beta."""
    return value != 0 or name.startswith("beta")


def _check_kept(name: str, param: torch.Tensor, kept: Mapping[str, Any], rule: _Rule, place: str) -> None:
    for key in rule.state:
        value = kept.get(key)
        if value is None:
            if key in rule.late:
                continue
            what = f"the optimizer's state of parameter {name!r} has no {key!r}"
        elif key in _SCALARS and not _is_number(value):
            what = f"{key!r} of parameter {name!r} is no number"
        elif key not in _SCALARS and not _is_like(value, param, _shape(key, param)):
            what = f"{key!r} of parameter {name!r} is not a dense tensor of the expected shape and type"
        else:
            continue
        raise CaptureError(what, where=place, fix="make a new optimizer with these options, or load a state that fits")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _is_like(value: object, param: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and (value.layout, tuple(value.shape), value.dtype) == (
        torch.strided,
        shape,
        param.dtype,
    )


def _shape(key: str, param: torch.Tensor) -> tuple[int, ...]:
    """The shape of a parameter's state: that of the parameter, or one number for each row, or for each column."""
    shape = tuple(param.shape)
    of_part = {"row_sum": shape[:1], "row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
    return of_part.get(key, shape)


def _state(key: str, first: float, param: torch.Tensor, kept: Mapping[str, Any], fused: bool) -> OptimizerState:
    """The state that the optimizer has under *key*; before its first step, *first* throughout."""
    value = kept.get(key)
    if key == "next_dampening":
        return OptimizerState(key, torch.tensor(first, dtype=torch.float64, device="cpu"), (), True)
    if key in _SCALARS:
        # As torch's _get_scalar_dtype has it.
        double = torch.get_default_dtype() == torch.float64 and not fused
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float64 if double else torch.float32
        on_host = not fused and _SCALARS[key]
        device = "cpu" if on_host else param.device
        done = first if value is None or (isinstance(value, torch.Tensor) and not has_data(value)) else float(value)
        step = torch.full((), done, dtype=dtype, device=device)
        return OptimizerState(key, step, (), on_host)
    shape = _shape(key, param)
    whole = shape == tuple(param.shape) and not param.is_contiguous()
    strides = torch.empty_like(param, device="meta").stride() if whole else contiguous_strides(shape)
    if value is None or not (has_data(param) and has_data(value)):
        # One element, expanded to the shape: sessions make tensors of their own.
        filled = torch.full((), first, dtype=param.dtype, device=param.device).expand(shape)
        return OptimizerState(key, filled, strides, False)
    held = torch.empty_like(param.detach()) if whole else param.detach().new_empty(shape)
    return OptimizerState(key, held.copy_(value.detach()), strides, False)


class _Rule(NamedTuple):
    """How an optimizer's class updates a parameter.

    Attributes:
        type: of the operator.
        args: arguments of the operator that are no options of the same name.
        state: names of the optimizer's state, in the order of the operator's parameters, and the values before the
            first step.
        late: the state that torch may make later than the rest.
        on_card: whether numbers of the state are where the parameter is.
    """

    type: str
    args: Mapping[str, Arg]
    state: Mapping[str, float]
    late: tuple[str, ...] = ()
    on_card: bool = False


_Options: TypeAlias = Mapping[str, Any]


def _sgd(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    momentum = {"momentum_buffer": -0.0} if options["momentum"] else {}
    if not (momentum and options["dampening"]):
        return _Rule("graphir.sgd", {}, momentum, ("momentum_buffer",))
    dampening = {"next_dampening": float(options["dampening"]) if "momentum_buffer" in kept else 0.0}
    return _Rule("graphir.dampened_sgd", {}, {**momentum, **dampening}, ("momentum_buffer", "next_dampening"))


def _adam(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    type = "graphir.adamw" if options.get("decoupled_weight_decay") else "graphir.adam"
    maximum = {"max_exp_avg_sq": 0.0} if options.get("amsgrad") else {}
    state = {"exp_avg": 0.0, "exp_avg_sq": 0.0, **maximum, "step": 0.0}
    return _Rule(type, {}, state)


def _adamw(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _adam(options, defaults, kept)._replace(type="graphir.adamw")


def _adagrad(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    # If the state of Adagrad's constructor is gone, torch makes it from the defaults, not from the group's options.
    return _Rule("graphir.adagrad", {}, {"sum": float(defaults["initial_accumulator_value"]), "step": 0.0})


def _rmsprop(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    momentum = {"momentum_buffer": 0.0} if options["momentum"] > 0 else {}
    centered = {"grad_avg": 0.0} if options["centered"] else {}
    return _Rule("graphir.rmsprop", {}, {"square_avg": 0.0, **momentum, **centered, "step": 0.0})


def _sparse_adam(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _Rule("graphir.sparse_adam", {}, {"exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 0.0})


def _row_wise_adagrad(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    first = options["initial_accumulator_value"]  # made in the first step, by the group's options
    return _Rule("graphir.row_wise_adagrad", {}, {"row_sum": float(first)})


def _adadelta(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _Rule("graphir.adadelta", {}, {"square_avg": 0.0, "acc_delta": 0.0, "step": 0.0})


def _adamax(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _Rule("graphir.adamax", {}, {"exp_avg": 0.0, "exp_inf": 0.0, "step": 0.0})


def _nadam(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _Rule("graphir.nadam", {}, {"exp_avg": 0.0, "exp_avg_sq": 0.0, "mu_product": 1.0, "step": 0.0})


def _radam(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    return _Rule("graphir.radam", {}, {"exp_avg": 0.0, "exp_avg_sq": 0.0, "step": 0.0})


def _asgd(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    first = {"ax": 0.0, "mu": 1.0, "eta": float(options["lr"]), "step": 0.0}
    return _Rule("graphir.asgd", {}, first, on_card=True)


def _rprop(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    minus, plus = options["etas"]
    least, most = options["step_sizes"]
    args: dict[str, Arg] = {"etaminus": minus, "etaplus": plus, "step_size_min": least, "step_size_max": most}
    return _Rule("graphir.rprop", args, {"prev": 0.0, "step_size": float(options["lr"]), "step": 0.0})


def _adafactor(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    first, second = options["eps"]
    args: dict[str, Arg] = {"eps1": -1.0 if first is None else first, "eps2": second}
    return _Rule("graphir.adafactor", args, {"row_var": 0.0, "col_var": 0.0, "variance": 0.0, "step": 0.0})


def _muon(options: _Options, defaults: _Options, kept: _Options) -> _Rule:
    a, b, c = options["ns_coefficients"]
    args: dict[str, Arg] = {"a": a, "b": b, "c": c, "adjust_lr_fn": options["adjust_lr_fn"] or "original"}
    return _Rule("graphir.muon", args, {"momentum_buffer": 0.0})


_SCALARS: Final = {"step": True, "mu_product": True, "mu": False, "eta": False}
"""State that is one number, and whether torch keeps it on the host."""

_FOR_LOOPS: Final = frozenset(
    [f"graphir.{name}" for name in ("adadelta", "adamax", "nadam", "radam", "asgd", "rprop", "adafactor", "muon")]
)
"""Types that have the for-loop form alone."""

_RULES: Final[Mapping[type[torch.optim.Optimizer], Callable[[_Options, _Options, _Options], _Rule]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.SparseAdam: _sparse_adam,
    RowWiseAdagrad: _row_wise_adagrad,
    torch.optim.Adadelta: _adadelta,
    torch.optim.Adamax: _adamax,
    torch.optim.NAdam: _nadam,
    torch.optim.RAdam: _radam,
    torch.optim.ASGD: _asgd,
    torch.optim.Rprop: _rprop,
    torch.optim.Adafactor: _adafactor,
    torch.optim.Muon: _muon,
}
"""By class, the function from a group's options, the optimizer's defaults and the parameter's state to the rule."""
