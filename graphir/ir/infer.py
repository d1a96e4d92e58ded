"""What an operator returns: shapes, element types, strides, and the operands whose memory its results show.

Torch finds a result's geometry in some ten microseconds on the meta device, and in a good hundred on fake tensors. The
geometry depends only on the operator and the geometries of its operands. So every answer is kept, with every size bound
to a number: the repeated layers of a model, its replicas, the next capture and the next verification cost a lookup
each. :func:`infer` asks the meta device. A capture asks with fake tensors, which have a device, and keeps the
description that :func:`described` makes of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import nearest
from .blob import reach
from .calls import call_of, evaluate, filled, flatten
from .geometry import Geometry, geometry_of
from .meta import rule_of
from .operator import Arg, Effects, Operator, Symbol, bind_arg, groups, positions
from .opset import NAMESPACES, Signature, effects_of, signature
from .optypes.fakes import Refused
from .optypes.own import OWN
from .optypes.table import operator_type
from .size import Dims, Polynomial, bind
from .symbols import has_symbol, to_torch

__all__ = [
    "Inferred",
    "MadeResult",
    "Result",
    "Returned",
    "described",
    "forget",
    "infer",
    "is_known",
    "keep",
    "kept",
]


class Inferred(NamedTuple):
    """What is known of a call.

    Attributes:
        outputs: the geometry of each output, None for an output whose geometry can't be known; None in place of all for
            an operator that can't be computed on the meta device.
        effects: the effects by the type's schema; None for an unknown type.
        complaint: why the call is wrong; empty for a right call.
        loose: strides are the backend's choice, so that any strides may be declared.
    """

    outputs: tuple[Geometry | None, ...] | None
    effects: Effects | None
    complaint: str = ""
    loose: bool = False


class MadeResult(NamedTuple):
    """A result that an operator makes: its geometry, and the position of the operand whose memory it shows."""

    geometry: Geometry
    source: int | None


Result: TypeAlias = "MadeResult | int | None"
"""What an operator returns at one place: a tensor that it makes, the operand at a position itself, or nothing."""


class Returned(NamedTuple):
    """What an operator returns: a list or tuple of results, or (``kind`` None) one alone."""

    kind: type | None
    results: tuple[Result, ...]


Inputs: TypeAlias = Sequence[Geometry | None]

_MOST_KEPT: Final = 100_000
"""The most answers kept. A step of thousands of different operators has tens of thousands of answers."""
_kept: Final[dict[tuple[Any, ...], Any]] = {}
kept: Final = _kept.get
"""The answer kept under a key; None where there is none."""


def keep(key: tuple[Any, ...], found: Any) -> None:
    """Keep an answer under *key*, for this process."""
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = found


def forget() -> None:
    """Start anew with no answer kept."""
    _kept.clear()


def described(returned: Any, operands: Sequence[torch.Tensor]) -> Returned | None:
    """What an operator returned on these operands, without its tensors; None if a description would lose something."""
    owners = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(operands)))}
    fresh: set[int] = set()
    results: list[Result] = []
    kind = type(returned) if isinstance(returned, (tuple, list)) else None
    for leaf in (returned,) if kind is None else returned:
        found: Result = None
        if leaf is not None:
            found = next((i for i, t in enumerate(operands) if t is leaf), None)
            if found is None:
                found = _made(leaf, operands, owners, fresh)
            if found is None:
                return None
        results.append(found)
    return Returned(kind, tuple(results))


def _made(leaf: Any, operands: Sequence[torch.Tensor], owners: Mapping[int, int], fresh: set[int]) -> MadeResult | None:
    """The result *leaf*, given the operand that owns each storage, and the storages of earlier results."""
    if type(leaf) is not FakeTensor or leaf.layout != torch.strided or leaf.is_conj() or leaf.is_neg():
        return None
    storage, geometry = leaf.untyped_storage(), geometry_of(leaf)
    source = owners.get(storage._cdata)
    if source is not None:
        operand = operands[source]
        alike = leaf.dtype == operand.dtype and not (operand.is_conj() or operand.is_neg())
        return MadeResult(geometry, source) if alike else None
    nbytes = reach(geometry.shape, geometry.strides) * leaf.itemsize
    if storage._cdata in fresh or geometry.offset or storage.nbytes() != nbytes or leaf.constant is not None:
        return None
    fresh.add(storage._cdata)
    return MadeResult(geometry, None)


def is_known(type: str) -> bool:
    """Whether operators of *type* can be checked: graphir's own, those of torch's namespaces, and registered ones."""
    return type in OWN or type.partition(".")[0] in NAMESPACES or operator_type(type).registered


def infer(op: Operator, inputs: Inputs, dims: Dims) -> Inferred:
    """What *op* returns on inputs of these geometries.

    Raises:
        GraphirError: a dimension has no value, or torch does not have the operator.
    """
    op_type, op_args, outputs = op.type, op.args, len(op.outputs)
    args = _args_key(op_args, dims) if op_args else ()
    key = (op_type, args, op.operands, op.results, outputs, *inputs)
    found: Inferred | None = kept(key)
    if found is None:
        found = _infer(op, inputs, {name: bind_arg(arg, dims) for name, arg in op_args.items()})
        if is_known(op_type):  # an unknown type may be registered later
            keep(key, found)
    return found


def _args_key(args: Mapping[str, Arg], dims: Dims) -> tuple[Any, ...]:
    """The arguments as a hashable value. It differs wherever torch tells arguments apart, even if ``==`` does not."""
    key: list[Any] = []
    for name, arg in args.items():
        key += (name, arg if arg.__class__ is int else _identity(arg, dims))
    return tuple(key)


def _identity(arg: Any, dims: Dims) -> Any:
    """The argument in a key. 1, 1.0 and True differ, as in type promotion; so do 0.0 and -0.0, a text and a symbol."""
    kind = arg.__class__
    if kind is tuple:
        return tuple([item if item.__class__ is int else _identity(item, dims) for item in arg])
    if kind is float:
        return arg.hex()  # equals no text: a text stands beside its type
    if kind is Polynomial:
        return bind(arg, dims)
    return arg if kind is int or arg is None else (kind, arg)


def _infer(op: Operator, inputs: Inputs, args: Mapping[str, Arg]) -> Inferred:
    if not is_known(op.type):
        return Inferred(None, None, _unknown(op.type))
    sig = signature(op.type)
    effects = effects_of(op.type, args, op.operands, len(inputs), op.results)
    complaint = _complaint(op, sig, effects)
    known_type = operator_type(op.type)
    if complaint or None in inputs or known_type.shapes_vary:
        return Inferred(None, effects, complaint)
    known = [g for g in inputs if g is not None]
    try:
        returned = _on_meta(op, known, args)
    except _Refused as e:
        return Inferred(None, effects, str(e))
    if returned is None:
        return Inferred(None, effects)
    outputs: _Outputs = [*returned, *[None] * (len(op.outputs) - len(returned))]
    for output, source in effects.writes:
        if output >= len(returned):
            outputs[output] = known[source]
    if known_type.kept_varies or (known_type.kept_varies_in_evaluation and not args.get("training")):
        outputs[1:] = [None] * (len(outputs) - 1)
    return Inferred(tuple(outputs), effects, loose=known_type.strides_vary)


def _unknown(type: str) -> str:
    what = f"neither torch nor graphir has an operator {type!r}"
    if type.count(".") == 2 and not type.startswith("graphir."):
        return f"{what}; graphir.register_operator registers one of yours"
    return what + nearest(type, OWN)


def _complaint(op: Operator, sig: Signature, effects: Effects) -> str:
    """Why the call does not fit the signature: unknown or missing arguments, wrong numbers of inputs or outputs."""
    types = {p.name: p.type for p in sig.params}
    for name, arg in op.args.items():
        if name not in types:
            return f"{op.type} has no argument {name!r}"
        kind = next((kind for word, kind in _CONSTANTS.items() if word in types[name]), None)
        if kind and arg is not None and not (isinstance(arg, Symbol) and isinstance(to_torch(arg), kind)):
            return f"{op.type} takes a torch.{kind.__name__} as {name}, not {arg!r}"
    arranged = groups(op.operands, len(op.inputs))
    tensors, count = sig.tensors, len(op.inputs)
    used = sum(map(len, map(positions, arranged)))
    if used != count:
        return f"{op.type} has {count} inputs, but its pattern {op.operands!r} takes {used}"
    if len(arranged) > len(tensors):
        taken = ", ".join(p.name for p in tensors) or "none"
        return f"{op.type} has {len(arranged)} inputs, but its signature takes {len(tensors)} ({taken})"
    given = {p.name for p, g in zip(sig.tensors, arranged, strict=False) if g is not None} | set(op.args)
    optional = {p.name for p in sig.params if not p.required or p.type.startswith("Optional")}
    missing = types.keys() - given - optional - {"generator", "device"}
    if missing:
        return f"{op.type} needs an argument {min(missing)!r}"
    count = len(sig.results) if op.results is None else op.results.count("t")
    count += sum(output >= count for output, _ in effects.writes)
    if count != len(op.outputs):
        return f"{op.type} makes {count} outputs but {len(op.outputs)} are named"
    return ""


_CONSTANTS: Final = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
"""The class of a parameter's values, by the parameter's type. Torch would accept any number in their place, and read
beyond its tables."""


class _Refused(Exception):
    """The operator does not accept these operands; the text says why."""


_Outputs: TypeAlias = "list[Geometry | None]"


def _on_meta(op: Operator, inputs: Sequence[Geometry], args: Mapping[str, Arg]) -> _Outputs | None:
    """The geometry of each output that the operator returns, by its fake; None if the fake cannot compute it."""
    here = {name: arg for name, arg in args.items() if name != "device"}
    call = call_of(op.type, here, op.operands, len(inputs), op.results)
    tensors = [_tensor(g) for g in inputs]
    positional, keywords = filled(call, tensors, lambda arg: evaluate(arg, {}), torch.device("meta"))
    try:
        with torch.no_grad():
            returned = rule_of(op.type)(*positional, **keywords)
    except (NotImplementedError, ArithmeticError, AssertionError, AttributeError):
        # The meta kernel is missing, fails on odd sizes, or is for fake tensors alone.
        return None
    except Refused as e:
        raise _Refused(str(e)) from None
    except Exception as e:  # for one, rules in Python look element types up in tables
        text = str(e).strip().partition("\n")[0] or type(e).__name__
        if "meta" in text.lower():  # the value of a tensor is needed, and a meta tensor has none
            return None
        raise _Refused(f"{op.type} refuses its operands: {text}") from None
    try:
        made = flatten(call, returned)
    except ValueError as e:
        raise _Refused(f"{op.type}: {e}") from None
    for position, tensor in made.items():
        if not isinstance(tensor, torch.Tensor):
            raise _Refused(f"{op.type} does not return its output {position}")
    return [_geometry(tensor) for tensor in made.values()]


def _tensor(g: Geometry) -> torch.Tensor:
    if not g.offset:
        return torch.empty_strided(g.shape, g.strides, dtype=g.dtype, device="meta")
    storage = torch.empty(g.offset + max(reach(g.shape, g.strides), 1), dtype=g.dtype, device="meta")
    return storage.as_strided(g.shape, g.strides, g.offset)


def _geometry(tensor: torch.Tensor) -> Geometry | None:
    """The geometry of a result as a blob declares it: without the bits for conjugates and negatives."""
    if tensor.layout is not torch.strided or not has_symbol(tensor.dtype):
        return None
    return geometry_of(tensor)._replace(conj=False, neg=False)
