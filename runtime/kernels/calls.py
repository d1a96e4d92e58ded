"""How an operator becomes a call: its blobs and arguments arranged over the parameters of its type.

Every executor works from the same :class:`Call`; the reference evaluates it, generated code prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from graphir.errors import PlanError
from graphir.ir.operator import Arg, Operator, Symbol, groups, leaves
from graphir.ir.opset import OWN, Param, Signature, signature, to_torch
from graphir.ir.size import Dims, Polynomial, bind

__all__ = [
    "Argument",
    "Bound",
    "Call",
    "Constant",
    "Default",
    "Operand",
    "OperandList",
    "arrange",
    "depends_on_dims",
    "evaluate",
    "given",
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
    """What torch's schema gives where the operator stores nothing."""

    value: object


class Bound(Enum):
    """What the executor supplies."""

    DEVICE = "the real device that the operator's logical device is bound to"
    GENERATOR = "that device's random generator, freshly seeded"


Argument: TypeAlias = "Operand | OperandList | Constant | Default | Bound"


class Call(NamedTuple):
    """One call of an operator's type.

    Attributes:
        positional: the arguments passed by position.
        keyword: those passed by keyword, under the schema's names.
        single: the type returns one thing, not a tuple.
        returned: how the operator's outputs fill what the type returns, as :func:`graphir.ir.operator.groups` gives.
    """

    positional: tuple[Argument, ...]
    keyword: tuple[tuple[str, Argument], ...]
    single: bool
    returned: tuple[int | list[int | None] | None, ...]


_SUPPLIED: Final = {"device": Bound.DEVICE, "generator": Bound.GENERATOR}


def arrange(op: Operator) -> Call:
    """The call that executes *op*. Types of graphir's own take every tensor by position, and the rest by keyword.

    Raises:
        PlanError: the operator has operands or arguments that its type does not take.
    """
    sig = signature(op.type)
    tensors = _tensors(op, sig)
    known = {param.name for param in sig.params}
    for name in op.args:
        if name not in known:
            raise _misfit(op, f"takes no argument {name!r}")
    if op.type in OWN:
        options = tuple((param.name, Constant(op.args[param.name])) for param in sig.params if param.name in op.args)
        return Call(tuple(tensors.values()), options, *_returned(op, sig))
    passed = {param.name: _argument(op, param, tensors) for param in sig.params}
    ordered = [param for param in sig.params if not param.keyword]
    while ordered and isinstance(passed[ordered[-1].name], Default) and not ordered[-1].required:
        ordered.pop()
    keyword = tuple(
        (param.name, passed[param.name])
        for param in sig.params
        if param.keyword and (param.required or not isinstance(passed[param.name], Default))
    )
    return Call(tuple(passed[param.name] for param in ordered), keyword, *_returned(op, sig))


def _misfit(op: Operator, what: str) -> PlanError:
    return PlanError(
        f"{op.type} {what}", at=f"{op.type} -> {', '.join(op.outputs)}", fix="capture and emit the program again"
    )


def _tensors(op: Operator, sig: Signature) -> dict[str, Argument]:
    arranged = groups(op.operands, len(op.inputs))
    if len(arranged) > len(sig.tensors):
        raise _misfit(op, f"takes {len(sig.tensors)} tensors, {len(arranged)} given")
    arranged += [None] * (len(sig.tensors) - len(arranged))
    found: dict[str, Argument] = {}
    for param, group in zip(sig.tensors, arranged, strict=True):
        if isinstance(group, list):
            found[param.name] = OperandList(tuple(group))
        elif group is not None:
            found[param.name] = Operand(group)
        elif param.name in op.args:
            found[param.name] = Constant(op.args[param.name])
        else:
            found[param.name] = Default(param.default if param.kind == "tensor" else ())
    return found


def _argument(op: Operator, param: Param, tensors: Mapping[str, Argument]) -> Argument:
    if param.name in tensors:
        return tensors[param.name]
    if param.name in op.args:
        return Constant(op.args[param.name])
    if param.name == "device" or (param.name == "generator" and op.seed is not None):
        return _SUPPLIED[param.name]
    return Default(param.default)


def _returned(op: Operator, sig: Signature) -> tuple[bool, tuple[int | list[int | None] | None, ...]]:
    count = len(sig.results) if op.results is None else op.results.count("t")
    if count > len(op.outputs):
        raise _misfit(op, f"returns {count} tensors, the operator has {len(op.outputs)} outputs")
    return len(sig.results) == 1, tuple(groups(op.results, count))


def given(
    argument: Argument,
    inputs: Sequence[Any],
    constant: Callable[[Arg], Any],
    device: torch.device,
    generator: Callable[[], Any],
) -> Any:
    """What is passed for an argument.

    Args:
        argument: of a call.
        inputs: the operator's, in order.
        constant: gives what stands for a stored argument.
        device: that the operator's logical one is bound to.
        generator: gives the freshly seeded one.
    """
    if isinstance(argument, Operand):
        return inputs[argument.position]
    if isinstance(argument, OperandList):
        return [None if i is None else inputs[i] for i in argument.positions]
    if isinstance(argument, Constant):
        return constant(argument.arg)
    if isinstance(argument, Default):
        return argument.value
    return device if argument is Bound.DEVICE else generator()


def evaluate(arg: Arg, dims: Dims) -> Any:
    """The Python value of a stored argument: sizes bound, symbols as torch's constants."""
    if isinstance(arg, Polynomial):
        return bind(arg, dims)
    if isinstance(arg, Symbol):
        return to_torch(arg)
    if isinstance(arg, tuple):
        return tuple([evaluate(item, dims) for item in arg])
    return arg


def depends_on_dims(arg: Arg) -> bool:
    """Whether a stored argument has another value at other sizes."""
    return any(isinstance(leaf, Polynomial) for leaf in leaves(arg))
