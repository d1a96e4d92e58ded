"""Values to their file form. Arguments stand as JSON where JSON can tell them apart; what it cannot tell is an object
with one key: ``{"size": "2*batch+1"}``, ``{"symbol": "f32"}``, ``{"float": "inf"}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from ..blob import Blob
from ..dialect import TORCH
from ..net import Net
from ..operator import PURE, Arg, Effects, Symbol, map_arg
from ..plan import Instruction, Plan
from ..program import Interface, Program, Slot
from ..size import Polynomial, Shape, Size
from .records import (
    VERSION,
    AnyFile,
    BlobRecord,
    EffectsRecord,
    EventRecord,
    GroupRecord,
    GuardRecord,
    InstructionRecord,
    InterfaceRecord,
    LeafRecord,
    NetFile,
    NetRecord,
    OperatorRecord,
    PlanFile,
    ProgramFile,
    ProgramRecord,
    SizeText,
    TensorRecord,
)

__all__ = ["file_of"]


def file_of(x: Net | Program | Plan, state: Mapping[str, TensorRecord] | None = None) -> AnyFile:
    """The file of a net, a program or a plan; of a program with its tensors beside it if *state* describes them."""
    if isinstance(x, Net):
        return NetFile(format="graphir.net", version=VERSION, net=_net(x))
    if isinstance(x, Program):
        return ProgramFile(format="graphir.program", version=VERSION, program=_program(x, state))
    return PlanFile(
        format="graphir.plan",
        version=VERSION,
        program=_program(x.program, None),
        dims=dict(x.dims),
        instructions=tuple(map(_instruction, x.instructions)),
        values=dict(x.values),
        buffers=dict(x.buffers),
    )


def _size(size: Size) -> SizeText:
    return size if isinstance(size, int) else str(size)


def _shape(shape: Shape | None) -> tuple[SizeText, ...] | None:
    return None if shape is None else tuple([_size(size) for size in shape])


def _json(arg: Arg) -> JsonValue:
    return map_arg(arg, _scalar, list)  # type: ignore[no-any-return]  # it is what those make


def _scalar(arg: Any) -> JsonValue:
    if isinstance(arg, Polynomial):
        return {"size": str(arg)}
    if isinstance(arg, Symbol):
        return {"symbol": str(arg)}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": repr(arg)}
    return arg  # type: ignore[no-any-return]  # a number, a text, or None


def _blob(blob: Blob) -> BlobRecord:
    return BlobRecord(
        name=blob.name,
        shape=_shape(blob.shape),
        dtype=blob.dtype,
        device=blob.device,
        role=blob.role,
        storage=blob.storage if blob.is_view else None,
        strides=_shape(blob.strides),
        offset=_size(blob.offset),
    )


def _net(net: Net) -> NetRecord:
    table: dict[Effects, int] = {}
    lines: dict[str, int] = {}
    ops = [
        OperatorRecord(
            type=op.type,
            inputs=op.inputs,
            outputs=op.outputs,
            args={name: _json(arg) for name, arg in op.args.items()} if op.args else {},
            device=op.device,
            phase=op.phase,
            module=op.module,
            by=op.by,
            seed=op.seed,
            operands=op.operands,
            results=op.results,
            effects=None if op.effects == PURE else table.setdefault(op.effects, len(table)),
            input_versions=op.input_versions,
            output_versions=op.output_versions,
            proto=op.proto,
            source=lines.setdefault(op.source, len(lines)) if op.source else None,
        )
        for op in net.ops
    ]
    return NetRecord(
        name=net.name,
        external_inputs=net.external_inputs,
        external_outputs=net.external_outputs,
        effects=tuple(EffectsRecord(writes=e.writes, views=e.views, random=e.random) for e in table),
        sources=tuple(lines),
        blobs=tuple(map(_blob, net.blobs.values())),
        ops=tuple(ops),
        gradients=dict(net.gradients),
        proto=None if net.dialect is TORCH else net.proto,
    )


def _leaf(leaf: Slot) -> LeafRecord:
    return LeafRecord(blob=leaf.blob, batch_dim=leaf.batch_dim, value=_json(leaf.value))


def _interface(interface: Interface) -> InterfaceRecord:
    return InterfaceRecord(
        arguments=interface.arguments,
        feeds=tuple(map(_leaf, interface.feeds)),
        loss=interface.loss,
        fetches=tuple(map(_leaf, interface.fetches)),
        results=interface.results,
        one_replica=interface.one_replica,
        gradients=dict(interface.gradients),
        module_state=dict(interface.module_state),
        optimizer=interface.optimizer,
        optimizer_state={param: dict(states) for param, states in interface.optimizer_state.items()},
        param_groups=tuple(
            GroupRecord(lr=g.lr, params=g.params, options={name: _json(value) for name, value in g.options.items()})
            for g in interface.param_groups
        ),
    )


def _program(program: Program, state: Mapping[str, TensorRecord] | None) -> ProgramRecord:
    return ProgramRecord(
        name=program.name,
        dims=dict(program.dims),
        fixed=program.fixed,
        replicas=program.replicas,
        history=program.history,
        guards=tuple([GuardRecord(guard=str(guard), reason=guard.reason) for guard in program.guards]),
        interface=_interface(program.interface),
        state=None if state is None else dict(state),
        init=_net(program.init),
        step=_net(program.step),
    )


def _instruction(i: Instruction) -> InstructionRecord:
    event = i.event and EventRecord(
        blob=i.event.blob, version=i.event.version, lane=None if i.event.lane == i.lane else i.event.lane
    )
    return InstructionRecord(kind=i.kind, lane=i.lane, op=i.op, part=i.part, event=event, storage=i.storage)
