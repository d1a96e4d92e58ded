"""Values to their file form, the JSON of :mod:`.records`.

An argument is plain JSON if JSON can tell it from all others. A size, a symbol and a float that JSON cannot write are
objects with one key: ``{"size": "2*batch+1"}``, ``{"symbol": "f32"}``, ``{"float": "inf"}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import GraphirError
from ..blob import Blob
from ..dialect import TORCH
from ..net import Net
from ..operator import PURE, Effects, Operator, Symbol, map_arg
from ..plan import Instruction, Plan
from ..program import Interface, Program
from ..size import Polynomial, Shape, Size
from .records import VERSION, BlobRecord, OperatorRecord, SizeText, TensorRecord

__all__ = ["Document", "document_of"]

Document: TypeAlias = dict[str, Any]
"""The content of a file or of a part of it, ready for JSON, where tuples become lists."""

_NOTHING: Final = object()


def document_of(x: Net | Program | Plan, state: Mapping[str, TensorRecord] | None = None) -> Document:
    """The document of a net, a program or a plan. *state* describes the tensors beside a program; None: no tensors."""
    if isinstance(x, Net):
        return {"format": "graphir.net", "version": VERSION, "net": _net(x)}
    if isinstance(x, Program):
        return {"format": "graphir.program", "version": VERSION, "program": _program(x, state)}
    return {
        "format": "graphir.plan",
        "version": VERSION,
        "program": _program(x.program, None),
        "dims": dict(x.dims),
        "instructions": _rows(x.instructions, Instruction),
        "values": dict(x.values),
        "buffers": dict(x.buffers),
    }


def _rows(found: Iterable[tuple[object, ...]], kind: type[NamedTuple]) -> list[tuple[object, ...]]:
    """Each tuple without the defaults at its end."""
    given = [kind._field_defaults.get(name, _NOTHING) for name in kind._fields]
    rows = []
    for row in found:
        end = len(row)
        while row[end - 1] == given[end - 1]:
            end -= 1
        rows.append(row[:end])
    return rows


def _size(size: Size) -> SizeText:
    return size if isinstance(size, int) else str(size)


def _shape(shape: Shape | None) -> tuple[SizeText, ...] | None:
    return None if shape is None else tuple([_size(size) for size in shape])


def _json(arg: Any) -> Any:
    return map_arg(arg, _scalar, list)


def _scalar(arg: Any) -> Any:
    if isinstance(arg, Polynomial):
        return {"size": str(arg)}
    if isinstance(arg, Symbol):
        return {"symbol": str(arg)}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": repr(arg)}
    return arg


def _blob(blob: Blob) -> BlobRecord:
    storage = blob.storage if blob.is_view else None
    shape, strides = _shape(blob.shape), _shape(blob.strides)
    return BlobRecord(blob.name, blob.device, blob.role, blob.dtype, shape, storage, strides, _size(blob.offset))


def _net(net: Net) -> Document:
    effects: dict[Effects, int] = {}
    sources: dict[str, int] = {}
    blobs = {name: i for i, name in enumerate(net.blobs)}

    def operator(op: Operator) -> OperatorRecord:
        return OperatorRecord(
            op.type,
            op.device,
            op.inputs,
            op.outputs,
            op.phase,
            op.module,
            op.by,
            {name: _json(arg) for name, arg in op.args.items()} if op.args else {},
            sources.setdefault(op.source, len(sources)) if op.source else None,
            blobs.get(op.of, op.of) if op.of else "",
            None if op.effects == PURE else effects.setdefault(op.effects, len(effects)),
            op.operands,
            op.results,
            op.output_versions,
            op.input_versions,
            op.seed,
            op.proto,
            op.issue,
            op.received,
        )

    ops = _rows(map(operator, net.ops), OperatorRecord)
    return {
        "name": net.name,
        "external_inputs": net.external_inputs,
        "external_outputs": net.external_outputs,
        "effects": tuple(effects),
        "sources": tuple(sources),
        "blobs": _rows(map(_blob, net.blobs.values()), BlobRecord),
        "ops": ops,
        "gradients": dict(net.gradients),
        **({} if net.dialect is TORCH else {"proto": net.proto}),
    }


def _interface(interface: Interface) -> Document:
    """The fields of an interface that differ from their defaults."""
    empty = Interface()
    given = [(field.name, getattr(interface, field.name)) for field in fields(Interface)]
    return {name: _plain(value) for name, value in given if value != getattr(empty, name)}


def _plain(value: Any) -> Any:
    """A part of an interface: tuples, mappings and scalars."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else _scalar(value)


def _notes(program: Program) -> Document:
    """The notes of a program.

    Raises:
        GraphirError: a note is not a JSON value.
    """

    def note(value: Any) -> Any:
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {key: note(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [note(part) for part in value]
        if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        raise GraphirError(
            f"a note of program {program.name!r} holds {value!r}, which JSON cannot hold",
            fix="notes hold numbers, texts, booleans, None, lists, and mappings from texts to such values",
        )

    return {name: note(value) for name, value in program.notes.items()}


def _program(program: Program, state: Mapping[str, TensorRecord] | None) -> Document:
    covers = program.covers
    return {
        "name": program.name,
        "dims": dict(program.dims),
        "fixed": covers.fixed,
        "replicas": program.replicas,
        "history": program.history,
        "guards": [(str(guard), guard.reason) for guard in covers.guards],
        **({"only": covers.only} if covers.only else {}),
        **({"recorded": [dict(point) for point in covers.recorded]} if covers.recorded else {}),
        **({} if program.ahead is None else {"ahead": program.ahead}),
        **({} if program.reduction == "mean" else {"reduction": program.reduction}),
        **({"caveats": program.caveats} if program.caveats else {}),
        **({"shares": program.shares} if program.shares else {}),
        **({"notes": _notes(program)} if program.notes else {}),
        "interface": _interface(program.interface),
        **({} if state is None else {"state": dict(state)}),
        "init": _net(program.init),
        "step": _net(program.step),
    }
