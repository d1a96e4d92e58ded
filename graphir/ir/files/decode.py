"""Values from their file form: what the models cannot check is checked here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

from pydantic import JsonValue

from ...errors import GraphirError, nearest
from ..admitted import admitted
from ..blob import Blob
from ..covers import Covers
from ..device import Device
from ..dialect import TORCH, dialect_called
from ..dtype import ITEMSIZE
from ..frozen import EMPTY, FrozenDict
from ..guard import parse_guard
from ..net import Net
from ..operator import PURE, SYMBOLS, Arg, Effects, Operator, Symbol
from ..plan import Instruction, Plan
from ..program import Note, Program
from ..size import LARGEST, Dims, Shape, Size, parse_size
from .records import (
    AnyFile,
    BlobRecord,
    NetFile,
    NetRecord,
    OperatorRecord,
    PlanFile,
    ProgramRecord,
    SizeText,
)

__all__ = ["value_of"]

_SIZES: Final = f"sizes, strides and offsets are from 0 to {LARGEST}"


def value_of(file: AnyFile) -> Net | Program | Plan:
    """What a file holds; a program without its state.

    Raises:
        GraphirError: the file says something impossible; ``where`` is the place in the file.
    """
    if isinstance(file, NetFile):
        return _net(file.net, "net")
    program = _program(file.program)
    if not isinstance(file, PlanFile):
        return program
    for i, instruction in enumerate(file.instructions):
        try:
            _check(instruction, len(program.step.ops))
        except GraphirError as e:
            raise _placed(f"instructions[{i}]", e) from None
    return Plan(program, _dims(file.dims, "dims"), file.instructions, file.values, file.buffers)


def _size(text: SizeText) -> Size:
    """A size of a blob. All its numbers must be possible sizes."""
    if isinstance(text, int):
        if not 0 <= text <= LARGEST:
            raise GraphirError(f"{text} is not a possible size", fix=_SIZES)
        return text
    size = parse_size(text)
    numbers = (size,) if isinstance(size, int) else [k for _, k in size.terms]
    if max(map(abs, numbers)) > LARGEST or (isinstance(size, int) and size < 0):
        raise GraphirError(f"{text} is not a possible size", fix=_SIZES)
    return size


def _shape(texts: tuple[SizeText, ...] | None) -> Shape | None:
    return None if texts is None else tuple([_size(text) for text in texts])


def _dims(dims: Dims, place: str) -> Dims:
    for name, value in dims.items():
        if not 1 <= value <= LARGEST:
            what = f"dimension {name!r} cannot be {value}"
            raise GraphirError(what, where=f"{place}.{name}", fix=f"a dimension is from 1 to {LARGEST}")
    return dims


def _arg(value: JsonValue) -> Arg:
    if isinstance(value, list):
        return tuple([_arg(item) for item in value])
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, text),) = value.items()
        if kind == "size" and isinstance(text, str):
            return parse_size(text)
        if kind == "symbol" and isinstance(text, str) and text in SYMBOLS:
            return Symbol(text)
        if kind == "float" and isinstance(text, str) and text in ("inf", "-inf", "nan"):
            return math.nan if text == "nan" else float(text)
    raise GraphirError(f"{value} is not an argument", fix="an object holds one size, one symbol or one float")


def _placed(place: str, e: GraphirError) -> GraphirError:
    return GraphirError(e.what, where=place, fix=e.fix)


def _blob(record: BlobRecord) -> Blob:
    if record.dtype is not None and record.dtype not in ITEMSIZE:
        raise GraphirError(f"{record.dtype!r} is not an element type{nearest(record.dtype, ITEMSIZE)}")
    shape, strides = _shape(record.shape), _shape(record.strides)
    if strides is not None and (shape is None or len(strides) != len(shape)):
        raise GraphirError(f"{len(strides)} strides", fix="a blob has one stride for each dimension of its shape")
    elements = prod(size for size in shape or () if isinstance(size, int))
    if elements > LARGEST:
        raise GraphirError(f"a shape has {elements} elements or more", fix=f"a blob has at most {LARGEST}")
    return Blob(
        record.name,
        shape,
        record.dtype,
        Device.parse(record.device),
        record.role,
        record.name if record.storage is None else record.storage,
        strides,
        _size(record.offset),
    )


def _operator(
    record: OperatorRecord,
    effects: tuple[Effects, ...],
    sources: tuple[str, ...],
    blobs: Sequence[str],
    known: Mapping[str, str],
) -> Operator:
    of = record.of
    if isinstance(of, int):
        if not 0 <= of < len(blobs):
            raise GraphirError(f"of blob {of}, which is not in the table", fix=f"it has {len(blobs)} entries")
        of = blobs[of]
    if record.effects is not None and not 0 <= record.effects < len(effects):
        raise GraphirError(f"effects {record.effects} are not in the table", fix=f"it has {len(effects)} entries")
    if record.source is not None and not 0 <= record.source < len(sources):
        raise GraphirError(f"source {record.source} is not in the table", fix=f"it has {len(sources)} entries")
    for names, versions in ((record.inputs, record.input_versions), (record.outputs, record.output_versions)):
        if versions is not None and len(versions) != len(names):
            raise GraphirError(f"{len(versions)} versions of {len(names)} operands", fix="each operand has one version")
    return Operator(
        admitted(record.type),
        tuple([known.get(name, name) for name in record.inputs]),
        tuple([known.get(name, name) for name in record.outputs]),
        FrozenDict({name: _arg(value) for name, value in record.args.items()}) if record.args else EMPTY,
        Device.parse(record.device),
        record.phase,
        record.module,
        record.by,
        record.seed,
        record.operands,
        record.results,
        PURE if record.effects is None else effects[record.effects],
        record.input_versions,
        record.output_versions,
        record.proto,
        of,
        record.issue,
        record.received,
        "" if record.source is None else sources[record.source],
    )


def _net(record: NetRecord, place: str) -> Net:
    blobs: dict[str, Blob] = {}
    ops: list[Operator] = []
    try:
        for blob in record.blobs:
            if blob.name in blobs:
                raise GraphirError(f"blob {blob.name!r} is declared twice")
            blobs[blob.name] = _blob(blob)
    except GraphirError as e:
        raise _placed(f"{place}.blobs[{len(blobs)}]", e) from None
    names, known = tuple(blobs), {name: name for name in blobs}  # one object a name: found by identity
    if len(set(record.external_inputs)) != len(record.external_inputs):
        twice = next(name for name, count in Counter(record.external_inputs).items() if count > 1)
        raise _placed(f"{place}.external_inputs", GraphirError(f"external input {twice!r} is listed twice"))
    try:
        for op in record.ops:
            ops.append(_operator(op, record.effects, record.sources, names, known))
    except GraphirError as e:
        raise _placed(f"{place}.ops[{len(ops)}]", e) from None
    return Net(
        record.name,
        tuple(ops),
        blobs,
        record.external_inputs,
        record.external_outputs,
        record.gradients,
        TORCH if record.proto is None else dialect_called("caffe2"),
        record.proto or "",
    )


def _program(record: ProgramRecord) -> Program:
    return Program(
        record.name,
        _net(record.init, "program.init"),
        _net(record.step, "program.step"),
        _dims(record.dims, "program.dims"),
        _covers(record),
        record.replicas,
        record.interface,
        record.history,
        record.ahead,
        record.reduction,
        record.caveats,
        record.shares,
        {name: _note(value) for name, value in record.notes.items()},
    )


def _note(value: JsonValue) -> Note:
    """A note, its lists as tuples."""
    if isinstance(value, dict):
        return {name: _note(part) for name, part in value.items()}
    return tuple([_note(part) for part in value]) if isinstance(value, list) else value


def _covers(record: ProgramRecord) -> Covers:
    try:
        guards = tuple([parse_guard(guard.guard, guard.reason) for guard in record.guards])
    except GraphirError as e:
        raise _placed("program.guards", e) from None
    recorded = tuple([_dims(point, f"program.recorded[{i}]") for i, point in enumerate(record.recorded)])
    return Covers(guards, record.fixed, record.only, recorded)


def _check(instruction: Instruction, ops: int) -> None:
    kind, op = instruction.kind, instruction.op
    if not (0 <= op < ops if kind in ("run", "copy", "collective") else op == -1):
        raise GraphirError(f"{kind} of operator {op}", fix=f"the step has {ops} operators")
    if (instruction.event is not None) != (kind in ("record", "wait")):
        raise GraphirError(f"{kind} with the wrong fields", fix="only record and wait have an event")
