"""How an operator becomes a call: its operands and arguments over the parameters of its type, its outputs over what it
returns.

The patterns of an operator (:func:`.operator.groups`) say which parameters its inputs fill, and which things that its
type returns are its outputs::

    inputs x, i, v    operands "t[_t]t"     aten.index_put(self=x, indices=[None, i], values=v)
    outputs y, m      results  "t_t"        y, _, m = …

Verification, executors and the host's evaluation of fills work from the same :class:`Call`; generated code prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ..errors import PlanError
from .operator import Arg, Group, Operator, Symbol, groups, leaves, map_arg, positions
from .opset import Param, Signature, signature
from .optypes.own import OWN
from .size import Dims, Polynomial, bind
from .symbols import to_torch

__all__ = [
    "Argument",
    "Bound",
    "Call",
    "Constant",
    "Default",
    "Operand",
    "OperandList",
    "arrange",
    "call_of",
    "depends_on_dims",
    "evaluate",
    "filled",
    "flatten",
]


class Operand(NamedTuple):
    """The operator's input at this position."""

    position: int


class OperandList(NamedTuple):
    """A list of the operator's inputs; None stands for an absent one."""

    positions: tuple[int | None, ...]


class Constant(NamedTuple):
    """An argument stored with the operator; sizes in it are bound by the step's dimensions."""

    arg: Arg


class Default(NamedTuple):
    """The schema's default of an argument that the operator does not store."""

    value: object


class Bound(Enum):
    """An argument that the executor supplies."""

    DEVICE = "the real device that the operator's logical device is bound to"
    GENERATOR = "that device's random generator, freshly seeded"


Argument: TypeAlias = "Operand | OperandList | Constant | Default | Bound"


class Call(NamedTuple):
    """One call of an operator's type.

    Attributes:
        positional: the arguments passed by position.
        keyword: the arguments passed by keyword, under the schema's names.
        single: the type returns one thing, not a tuple.
        returned: how the operator's outputs fill what the type returns, as :func:`.operator.groups` gives.
    """

    positional: tuple[Argument, ...]
    keyword: tuple[tuple[str, Argument], ...]
    single: bool
    returned: tuple[Group, ...]


_SUPPLIED: Final = {"device": Bound.DEVICE, "generator": Bound.GENERATOR}


def arrange(op: Operator) -> Call:
    """The call that executes *op*.

    Raises:
        PlanError: the operator has operands, arguments or outputs that its type does not take or return.
    """
    try:
        call = call_of(op.type, op.args, op.operands, len(op.inputs), op.results, drawn=op.seed is not None)
        count = sum([len(positions(group)) for group in call.returned])
        if count > len(op.outputs):
            raise _misfit(op.type, f"returns {count} tensors, the operator has {len(op.outputs)} outputs")
    except PlanError as e:
        raise PlanError(e.what, at=f"{op.type} -> {', '.join(op.outputs)}", fix=e.fix) from None
    return call


def call_of(
    type: str,
    args: Mapping[str, Arg],
    operands: str | None,
    inputs: int,
    results: str | None = None,
    *,
    drawn: bool = False,
) -> Call:
    """The call of *type* with these arguments and this number of inputs.

    graphir's own types take every tensor by position, and all other arguments by keyword.

    Args:
        type: of an operator.
        args: its arguments.
        operands: the pattern by which its inputs fill the type's parameters.
        inputs: the number of its inputs.
        results: the pattern by which its outputs fill what the type returns.
        drawn: the operator draws random numbers.

    Raises:
        PlanError: the type does not take these arguments or inputs.
    """
    sig = signature(type)
    tensors = _tensors(type, sig, args, operands, inputs)
    if args:
        known = {param.name for param in sig.params}
        for name in args:
            if name not in known:
                raise _misfit(type, f"takes no argument {name!r}")
    alone: list[Group] = [[i] if result.many else i for i, result in enumerate(sig.results)]
    returned = tuple(alone if results is None else groups(results, 0))
    single = len(sig.results) == 1
    if type in OWN:
        options = tuple((param.name, Constant(args[param.name])) for param in sig.params if param.name in args)
        return Call(tuple(tensors.values()), options, single, returned)
    passed = {param.name: _argument(param, tensors, args, drawn) for param in sig.params}
    ordered = [param for param in sig.params if not param.keyword]
    while ordered and isinstance(passed[ordered[-1].name], Default) and not ordered[-1].required:
        ordered.pop()
    keyword = tuple(
        (param.name, passed[param.name])
        for param in sig.params
        if param.keyword and (param.required or not isinstance(passed[param.name], Default))
    )
    return Call(tuple(passed[param.name] for param in ordered), keyword, single, returned)


def _misfit(type: str, what: str) -> PlanError:
    return PlanError(f"{type} {what}", fix="capture and emit the program again")


def _tensors(
    type: str, sig: Signature, args: Mapping[str, Arg], operands: str | None, inputs: int
) -> dict[str, Argument]:
    arranged = groups(operands, inputs)
    if len(arranged) > len(sig.tensors):
        raise _misfit(type, f"takes {len(sig.tensors)} tensors, {len(arranged)} given")
    arranged += [None] * (len(sig.tensors) - len(arranged))
    found: dict[str, Argument] = {}
    for param, group in zip(sig.tensors, arranged, strict=True):
        if isinstance(group, list):
            found[param.name] = OperandList(tuple(group))
        elif group is not None:
            found[param.name] = Operand(group)
        elif param.name in args:
            found[param.name] = Constant(args[param.name])
        else:
            found[param.name] = Default(param.default if param.kind == "tensor" else ())
    return found


def _argument(param: Param, tensors: Mapping[str, Argument], args: Mapping[str, Arg], drawn: bool) -> Argument:
    if param.name in tensors:
        return tensors[param.name]
    if param.name in args:
        return Constant(args[param.name])
    if param.name == "device" or (param.name == "generator" and drawn):
        return _SUPPLIED[param.name]
    return Default(param.default)


def filled(
    call: Call,
    inputs: Sequence[Any],
    constant: Callable[[Arg], Any],
    device: torch.device,
    generator: Callable[[], Any] = lambda: None,
) -> tuple[list[Any], dict[str, Any]]:
    """The positional and keyword arguments of a call.

    Args:
        call: of an operator.
        inputs: the operator's inputs, in order.
        constant: gives the value that is passed for a stored argument.
        device: the real device that the operator's logical device is bound to.
        generator: gives the random generator of *device*, freshly seeded.
    """

    def value(argument: Argument) -> Any:
        if isinstance(argument, Operand):
            return inputs[argument.position]
        if isinstance(argument, OperandList):
            return [None if i is None else inputs[i] for i in argument.positions]
        if isinstance(argument, Constant):
            return constant(argument.arg)
        if isinstance(argument, Default):
            return argument.value
        return device if argument is Bound.DEVICE else generator()

    return [value(argument) for argument in call.positional], {name: value(given) for name, given in call.keyword}


def flatten(call: Call, returned: Any) -> dict[int, Any]:
    """The returned tensors by the operator's output positions.

    Raises:
        ValueError: the type returned more or fewer tensors than the operator has outputs.
    """
    found: dict[int, Any] = {}
    things = [returned] if call.single else returned or ()
    if len(things) != len(call.returned):
        raise ValueError(f"the kernel returns {len(things)} results, but {len(call.returned)} are named")
    for group, thing in zip(call.returned, things, strict=True):
        if isinstance(group, list):
            if not isinstance(thing, list | tuple) or len(thing) != len(group):
                count = len(thing) if isinstance(thing, list | tuple) else 1
                raise ValueError(f"the kernel returns {count} tensors, but {len(group)} are named")
            found.update({i: tensor for i, tensor in zip(group, thing, strict=True) if i is not None})
        elif group is not None:
            found[group] = thing
    return found


def evaluate(arg: Arg, dims: Dims) -> Any:
    """The Python value of a stored argument: sizes bound, symbols as torch's constants."""
    return map_arg(arg, lambda scalar: _value(scalar, dims)) if arg.__class__ is tuple else _value(arg, dims)


def _value(scalar: Any, dims: Dims) -> Any:
    kind = scalar.__class__
    if kind is Polynomial:
        return bind(scalar, dims)
    return to_torch(scalar) if kind is Symbol else scalar


def depends_on_dims(arg: Arg) -> bool:
    """Whether a stored argument has another value at other sizes."""
    return any(isinstance(leaf, Polynomial) for leaf in leaves(arg))
