"""What an operator type takes, returns, overwrites and aliases.

One notation serves all types: torch's schema language. For ``aten`` types the schema is torch's own; graphir's own
types declare theirs. Schemas do not say everything; what they leave out is in the records of :mod:`.optypes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from ..errors import GraphirError
from .operator import Arg, Effects, Group, groups, positions
from .optypes.own import OWN
from .optypes.record import OperatorType
from .optypes.table import operator_type

__all__ = [
    "ACCUMULATES",
    "NAMESPACES",
    "Param",
    "Signature",
    "effects_of",
    "geometry_operands",
    "is_composite",
    "is_random",
    "overload",
    "signature",
    "type_of",
    "without_defaults",
]

NAMESPACES: Final = frozenset({"aten", "prims"})
"""Namespaces of torch operators that a program may name without registration."""

ACCUMULATES: Final = "aten.add.Tensor"
"""The type with which autograd adds up the gradients of a value that is read more than once."""


class Param(NamedTuple):
    """A parameter of a type.

    Attributes:
        name: as in the schema.
        kind: ``tensor``, ``tensors`` (a list) or ``value``.
        type: torch's text for the type of a value (``int``, ``Optional[ScalarType]``, ``List[int]``, …).
        required: it has no default.
        default: the default, as torch gives it.
        keyword: it can be passed by keyword only.
        alias: the name of its alias set; empty where it has none.
        written: it is overwritten.
    """

    name: str
    kind: str
    type: str
    required: bool
    default: Any
    keyword: bool
    alias: str
    written: bool


class Result(NamedTuple):
    """One thing that a type returns: ``many`` for a list of tensors; aliases as in :class:`Param`."""

    many: bool
    alias: str
    written: bool


class Signature(NamedTuple):
    """The parameters and results of a type.

    Attributes:
        params: all of its parameters.
        results: what it returns.
        tensors: the parameters that take tensors, in order. An operator's ``operands`` pattern runs over them.
    """

    params: tuple[Param, ...]
    results: tuple[Result, ...]
    tensors: tuple[Param, ...]

    def filled(self, operands: str | None, count: int) -> list[tuple[Param, Group]]:
        """The parameters that take tensors, as far as *operands* goes, and which of *count* inputs each is given."""
        return list(zip(self.tensors, groups(operands, count), strict=False))

    def names(self, operands: str | None, count: int) -> list[str]:
        """For each of *count* inputs, the name of the parameter that it is given for."""
        found = [""] * count
        for param, group in self.filled(operands, count):
            for i in positions(group):
                found[i] = param.name
        return found


def type_of(overload: torch._ops.OpOverload) -> str:
    """The type of an operator of torch, such as ``aten.addmm.default``."""
    return f"{overload.namespace}.{overload._opname}.{overload._overloadname}"


@cache
def overload(type: str) -> torch._ops.OpOverload:
    """The torch operator of a type such as ``aten.addmm.default``.

    Raises:
        GraphirError: the type's namespace is not allowed and nobody has registered the type; this torch does not have
            it; it does more than compute tensors from tensors; or it is composite, see :func:`is_composite`.
    """
    namespace, _, rest = type.partition(".")
    name, _, variant = rest.partition(".")
    registered = operator_type(type).registered
    if namespace not in NAMESPACES and not registered:
        allowed = ", ".join(sorted(NAMESPACES))
        raise GraphirError(
            f"unknown operator type {type!r}",
            fix=f"types are graphir's own, those of {allowed}, and what graphir.register_operator has registered",
        )
    packet = getattr(getattr(torch.ops, namespace), name, None)
    found = getattr(packet, variant, None) if variant and isinstance(packet, torch._ops.OpOverloadPacket) else None
    if not isinstance(found, torch._ops.OpOverload):
        raise GraphirError(
            f"torch {torch.__version__} has no operator {type!r}", fix="check the name and torch's version"
        )
    if not registered and not _only_computes(found._schema, operator_type(type)):
        raise GraphirError(
            f"operator {type!r} is not allowed in a program",
            fix="programs compute tensors from tensors: no files, storages, streams or Python values",
        )
    if is_composite(found):
        raise GraphirError(
            f"operator {type!r} is not allowed in a program: torch decides what it consists of when it runs, "
            "and whether its result is a view",
            fix="write the operators that it consists of, as a capture records them",
        )
    return found


_has_kernel: Final = torch._C._dispatch_has_kernel_for_dispatch_key


def is_composite(overload: torch._ops.OpOverload) -> bool:
    """Whether torch composes an operator of others, and has no kernel for it.

    Layouts decide which others: ``contiguous`` makes a copy or nothing at all, ``reshape`` a copy or a view. Neither a
    schema nor a program could say which. So a program holds the operators that were called instead.
    """
    name = overload.name()
    if not _has_kernel(name, "CompositeImplicitAutograd") or operator_type(type_of(overload)).composite:
        return False
    return not any(_has_kernel(name, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd"))


def _only_computes(schema: torch.FunctionSchema, known: OperatorType) -> bool:
    """Whether a torch operator takes and returns nothing that reaches beyond the values of tensors.

    A plan may come from a stranger, and torch has operators that map files into memory or exchange storages.
    """
    given = " ".join(f"{arg.name}:{arg.real_type}" for arg in schema.arguments)
    reaches = re.search(r"filename|Storage|Stream|Any|Future|__torch__", given)
    returns_tensors = any("Tensor" in str(result.real_type) for result in schema.returns)
    return (returns_tensors or known.checks) and not reaches and not known.rebinds


@cache
def signature(type: str) -> Signature:
    """The signature of a type.

    Raises:
        GraphirError: there is no such type.
    """
    schema = torch._C.parse_schema("graphir::" + OWN[type].schema) if type in OWN else overload(type)._schema
    params = tuple(map(_param, schema.arguments))
    return Signature(params, tuple(map(_result, schema.returns)), tuple(p for p in params if p.kind != "value"))


def _alias(info: Any) -> tuple[str, bool]:
    return (next(iter(info.before_set), ""), info.is_write) if info is not None else ("", False)


def _param(arg: Any) -> Param:
    text = str(arg.real_type)
    kind = {"Tensor": "tensor", "Optional[Tensor]": "tensor"}.get(text, "tensors" if "Tensor" in text else "value")
    alias, written = _alias(arg.alias_info)
    required = not arg.has_default_value()
    return Param(arg.name, kind, text, required, arg.default_value, arg.kwarg_only, alias, written)


def _result(returned: Any) -> Result:
    return Result(str(returned.real_type) == "List[Tensor]", *_alias(returned.alias_info))


def effects_of(type: str, args: Mapping[str, Arg], operands: str | None, inputs: int, results: str | None) -> Effects:
    """The effects of an operator of *type* with these arguments, patterns of operands and results, and so many inputs.

    Operands that are overwritten but not returned are the outputs beyond the ``results`` pattern, in the order of the
    parameters.
    """
    sig = signature(type)
    written: dict[int, None] = {}
    by_alias: dict[str, list[int]] = {}
    known = operator_type(type)
    hidden = known.hidden_writes(args) if known.hidden_writes is not None else ()
    for param, group in sig.filled(operands, inputs):
        if param.alias:
            by_alias.setdefault(param.alias, []).extend(positions(group))
        if param.written or param.name in hidden:
            written.update(dict.fromkeys(positions(group)))

    writes: list[tuple[int, int]] = []
    views: list[tuple[int, int]] = []
    returned = groups(results, len(sig.results) if results is None else results.count("t"))
    count = 0
    for result, group in zip(sig.results, returned, strict=False):
        produced = positions(group)
        count += len(produced)
        # Torch does not expose the alias set of a returned list ("Tensor(a)[]"): the one aliased operand has it too.
        sources = (
            by_alias.get(result.alias, [])
            if not result.many
            else [s for s in by_alias.get("a", []) if s not in written]
        )
        if known.hidden_views:
            sources = [0]
        for k, output in enumerate(produced):
            if sources:
                source = sources[min(k, len(sources) - 1)]
                (writes if source in written else views).append((output, source))
    taken = {source for _, source in writes}
    for source in written:
        if source not in taken:
            writes.append((count, source))
            count += 1
    return Effects(tuple(writes), tuple(views), is_random(type, args))


def geometry_operands(type: str, args: Mapping[str, Arg], operands: str | None, inputs: int) -> frozenset[int]:
    """The positions of the operands whose geometry an operator of *type* takes, and not their value: the operator
    overwrites all of them, or makes new memory like them."""
    of = operator_type(type).geometry_only
    if of is None:
        return frozenset()
    taken = of(args)
    return frozenset([i for i, name in enumerate(signature(type).names(operands, inputs)) if name in taken])


@cache
def _may_be_random(type: str) -> bool:
    return type not in OWN and torch.Tag.nondeterministic_seeded in overload(type).tags


def is_random(type: str, args: Mapping[str, Arg]) -> bool:
    """Whether an operator of *type* draws random numbers with these arguments."""
    if not _may_be_random(type):
        return False
    # Attention kernels draw random numbers for their own dropout only.
    return args.get("dropout_p", 0.0) != 0.0 or all(p.name != "dropout_p" for p in signature(type).params)


@cache
def _defaults(type: str) -> Mapping[str, Any]:
    return {param.name: param.default for param in signature(type).params if not param.required}


def without_defaults(type: str, args: Mapping[str, Arg]) -> dict[str, Arg]:
    """The arguments as an operator holds them: those that are not the type's defaults."""
    defaults = _defaults(type)
    missing = object()

    def default(name: str) -> object:
        value = defaults.get(name, missing)
        return tuple(value) if isinstance(value, list) else value

    return {name: value for name, value in args.items() if not _same(value, default(name))}


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b
