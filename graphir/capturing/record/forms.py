"""Operators, and how a call of one becomes operands, their pattern, and arguments without defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from ...errors import CaptureError, GraphirError
from ...ir.operator import Arg
from ...ir.opset import effects_of, is_random, signature, type_of
from ...ir.optypes.table import operator_type
from ...ir.symbols import to_symbol, to_torch
from ..words.libraries import Outside

__all__ = ["BoundArguments", "Form", "form_of", "normal_arg"]

_DROPPED: Final = frozenset({"device", "layout", "pin_memory", "generator"})
"""Arguments that are not kept: executors know the device and the generator; every layout is strided."""


class BoundArguments(NamedTuple):
    """A call with its arguments in place.

    Attributes:
        tensors: the tensors read, in order.
        operands: the pattern over the tensor parameters; None if each takes one tensor, except absent ones at the end.
        args: the other arguments, without defaults.
        written: positions in ``tensors`` of the overwritten tensors.
    """

    tensors: list[torch.Tensor]
    operands: str | None
    args: dict[str, Arg]
    written: tuple[int, ...]


class Form:
    """The descriptor of an operator: facts that hold for every call of it.

    Attributes:
        type: such as ``aten.addmm.default``; a type of graphir's own where torch's runs on the CPU only.
        func: the operator.
        known: the record of torch's type in graphir's tables.
        random: it may draw random numbers.
        generator: the position of the generator among its arguments; None if it takes no generator.
        seedable: the overload that computes the same and takes a generator; None if there is none.
        rebinds: it changes a tensor's own geometry (``squeeze_``).
        by_onednn: the element types for which oneDNN may compute it, if oneDNN is switched on.
        repeats: the geometry of its results follows from its arguments and their geometry alone.
        returns_list: its one result is a list of tensors.
        default_dtype: without an argument ``dtype`` it may make a tensor of torch's default element type.
        label: its name without the marks of torch's variants: ``add`` of ``add_``, ``softmax`` of ``_softmax``.
    """

    __slots__ = (
        "_params",
        "_plain",
        "_train",
        "_unread",
        "_writes",
        "by_onednn",
        "default_dtype",
        "func",
        "generator",
        "known",
        "label",
        "random",
        "rebinds",
        "repeats",
        "returns_list",
        "seedable",
        "type",
    )

    def __init__(self, func: torch._ops.OpOverload) -> None:
        self.func = func
        torch_type = type_of(func)
        self.known = known = operator_type(torch_type)
        self.type = known.own_type or torch_type
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.rebinds = torch.Tag.inplace_view in func.tags
        self.by_onednn = frozenset(map(to_torch, known.onednn))
        self.repeats = func.namespace == "aten" and not self.rebinds
        returns = func._schema.returns
        self.returns_list = len(returns) == 1 and "List" in str(returns[0].type)
        kept = {p.name: p for p in signature(self.type).params}
        params = [kept.get(p.name, p) for p in signature(torch_type).params]
        self.generator = next((i for i, a in enumerate(func._schema.arguments) if a.name == "generator"), None)
        self.seedable = _with_generator(func) if self.random else None
        self.label = known.label or _label(func._opname)
        self.default_dtype = "dtype" in kept and (
            known.bounded or all(p.kind == "value" for p in signature(self.type).params)
        )
        self._params = [
            (p.name, p.kind, not p.required, normal_arg(p.default), p.name in _DROPPED or p.name not in kept)
            for p in params
        ]
        self._plain = not any(p.written for p in params) and not self._hides_writes()
        names = [argument.name for argument in func._schema.arguments]
        self._unread = frozenset(map(names.index, operator_type(self.type).unread_in_training))
        self._train = names.index("train") if self._unread else 0
        self._writes: dict[tuple[object, ...], tuple[int, ...]] = {}

    def without_unread(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call, with None for tensors that the operator does not read.

        A batch norm's backward in training takes running statistics, which the next micro-batch overwrites.
        """
        if not self._unread or len(args) <= self._train or not args[self._train]:
            return args
        return tuple([None if i in self._unread else arg for i, arg in enumerate(args)])

    def _hides_writes(self) -> bool:
        tensors = signature(self.type).tensors
        return bool(effects_of(self.type, {"training": True}, None, len(tensors), None).writes)

    def draws(self, args: Mapping[str, Arg]) -> bool:
        """Whether the operator draws random numbers if it is given these arguments."""
        return self.random and is_random(self.type, args)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundArguments:
        """Arrange the arguments of a call.

        Raises:
            GraphirError: an argument is of a kind that programs don't have.
        """
        tensors: list[torch.Tensor] = []
        kept: dict[str, Arg] = {}
        pattern: list[str] = []
        count = len(args)
        for i, (name, kind, optional, default, dropped) in enumerate(self._params):
            given = i < count or name in kwargs
            value = args[i] if i < count else kwargs.get(name)
            if kind == "value":
                if dropped or not given:
                    if name == "layout" and value not in (None, torch.strided):
                        raise GraphirError(
                            f"{value} tensors are not supported",
                            fix=Outside("use dense tensors (for an embedding, sparse=False)"),
                        )
                    continue
                normal = normal_arg(value)
                if not (optional and normal == default and type(normal) is type(default)):
                    kept[name] = normal
            elif kind == "tensor":
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                    pattern.append("t")
                else:
                    pattern.append("_")
                    if value is not None:
                        kept[name] = normal_arg(value)
            elif value is None:
                pattern.append("_")
            else:
                present = [t for t in value if t is not None]
                tensors += present
                pattern.append("[" + "".join("_" if t is None else "t" for t in value) + "]")
        text = "".join(pattern).rstrip("_")
        operands = None if text == "t" * len(tensors) else text
        written = () if self._plain else self._written(tensors, operands, kept)
        return BoundArguments(tensors, operands, kept, written)

    def _written(self, tensors: list[torch.Tensor], operands: str | None, args: Mapping[str, Arg]) -> tuple[int, ...]:
        # A batch norm overwrites its statistics only in training; no other argument decides what is overwritten.
        key = operands, len(tensors), args.get("training")
        found = self._writes.get(key)
        if found is None:
            writes = effects_of(self.type, args, operands, len(tensors), None).writes
            found = self._writes[key] = tuple(sorted({source for _, source in writes}))
        return found


def _label(name: str) -> str:
    return name.strip("_").removeprefix("native_").removesuffix("_backward").removesuffix("_backward_data")


def _with_generator(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    packet = func.overloadpacket
    for candidate in (func, *(getattr(packet, name) for name in packet.overloads())):
        arguments = candidate._schema.arguments
        if any(a.name == "generator" for a in arguments) and _others(candidate) == _others(func):
            return candidate  # type: ignore[no-any-return]
    return None


def _others(func: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in func._schema.arguments if a.name != "generator"]


@cache
def form_of(func: torch._ops.OpOverload) -> Form:
    """The form of an operator."""
    return Form(func)


_COMPLEX: Final = (
    "use a tensor, torch.tensor(1j); in place of torch.polar and angle, whose gradients have complex arguments, use "
    "torch.complex(r * phi.cos(), r * phi.sin()) and torch.atan2(z.imag, z.real)"
)
_SCALARS: Final = frozenset({bool, int, float, str, type(None)})


def normal_arg(value: Any) -> Arg:
    """*value* as programs hold it: lists become tuples, torch's constants symbols, and every NaN the one ``math.nan``.

    Raises:
        GraphirError: programs have no arguments of this type.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value if value == value else math.nan
    if kind in (list, tuple) or isinstance(value, (list, tuple)):
        return tuple([normal_arg(item) for item in value])
    if isinstance(value, (torch.dtype, torch.memory_format)):
        return to_symbol(value)
    if isinstance(value, (torch.device, torch.layout, torch.Generator)):
        return None
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise CaptureError(
        f"an argument of type {kind.__name__} is not supported",
        fix=_COMPLEX if kind is complex else "pass numbers and tensors",
    )
