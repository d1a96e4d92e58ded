"""Changes of a program that leave it well-formed where they can: versions follow the new order, nothing is declared
that is not made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import torch

from graphir.errors import GraphirError
from graphir.ir.blob import Blob, bound_layout
from graphir.ir.calls import call_of, evaluate, filled
from graphir.ir.net import Net
from graphir.ir.operator import Operator, stored_versions
from graphir.ir.opset import effects_of, overload
from graphir.ir.program import Program
from graphir.ir.size import Dims, Polynomial, Shape, Size, bind, size_dims
from graphir.ir.symbols import to_symbol, to_torch

__all__ = [
    "alike",
    "declared",
    "effects",
    "exchanged",
    "fitted",
    "inserted",
    "named",
    "renumbered",
    "replaced",
    "shuffled",
    "with_net",
    "with_ops",
]

T = TypeVar("T")


def shuffled(items: Sequence[T] | Iterator[T], draw: Random) -> list[T]:
    """The items in a drawn order."""
    found = list(items)
    draw.shuffle(found)
    return found


def named(op: Operator) -> str:
    """An operator in the description of a mutant."""
    return f"{op.type} -> {', '.join(op.outputs)}"


def renumbered(net: Net) -> Net:
    """The net whose operators read and make versions as its order has them."""
    latest = dict.fromkeys(net.external_inputs, 0)
    ops = []
    for op in net.ops:
        reads = [latest.get(name, 0) for name in op.inputs]
        makes = []
        for name in op.outputs:
            latest[name] = latest.get(name, -1) + 1
            makes.append(latest[name])
        ops.append(op._replace(input_versions=stored_versions(reads), output_versions=stored_versions(makes)))
    kept = {name: blob for name, blob in net.blobs.items() if name in latest}
    gradients = {name: grad for name, grad in net.gradients.items() if name in kept and grad in kept}
    return net.with_(ops=tuple(ops), blobs=kept, gradients=gradients)


def with_net(program: Program, **changes: Any) -> Program:
    """The program with another step."""
    return program.with_(step=program.step.with_(**changes))


def with_ops(program: Program, ops: Sequence[Operator], blobs: Mapping[str, Blob] | None = None) -> Program:
    """The program with other operators in its step, and more blobs; versions are made to fit."""
    net = program.step.with_(ops=tuple(ops), blobs={**program.step.blobs, **(blobs or {})})
    return program.with_(step=renumbered(net))


def exchanged(program: Program, position: int, **changes: Any) -> Program:
    """The program with a changed operator at a position of its step; versions stay as they are."""
    ops = list(program.step.ops)
    ops[position] = ops[position]._replace(**changes)
    return with_net(program, ops=tuple(ops))


def replaced(program: Program, position: int, op: Operator, *blobs: Blob) -> Program:
    """The program with another operator at a position of its step, which makes these blobs."""
    ops = list(program.step.ops)
    ops[position] = op
    return with_ops(program, ops, {blob.name: blob for blob in blobs})


def inserted(program: Program, position: int, op: Operator, *blobs: Blob) -> Program:
    """The program with one more operator, before a position of its step."""
    ops = [*program.step.ops[:position], op, *program.step.ops[position:]]
    return with_ops(program, ops, {blob.name: blob for blob in blobs})


def alike(program: Program, position: int, k: int, *, shaped: bool = True) -> list[str]:
    """The blobs that operand *k* of the operator at a position could be instead: of its element type, there by then
    and not written over; of its shape, or else of others."""
    net = program.step
    op = net.ops[position]
    mine = net.blobs[op.inputs[k]]
    there = dict.fromkeys(net.external_inputs, -1)
    written: dict[str, int] = {}
    for place, other in enumerate(net.ops[:position]):
        fresh = {output for output, _ in other.effects.views}
        for output, name in enumerate(other.outputs):
            if output not in fresh:
                written[net.blobs[name].storage] = place
            there[name] = place
    return [
        name
        for name, place in there.items()
        if name != mine.name
        and net.blobs[name].dtype == mine.dtype
        and (net.blobs[name].shape == mine.shape) == shaped
        and place >= written.get(net.blobs[name].storage, -1)
    ]


def effects(op: Operator) -> Operator:
    """The operator with the effects that its type and arguments give; raises GraphirError where there is no such."""
    return op._replace(effects=effects_of(op.type, op.args, op.operands, len(op.inputs), op.results))


def fitted(sizes: Sequence[int], dims: Sequence[Dims], names: Sequence[str]) -> Size:
    """The size that has these values at these dimensions, if one of *names* tells them: constant or affine."""
    if len(set(sizes)) == 1:
        return sizes[0]
    for name in names:
        points = [(at[name], size) for at, size in zip(dims, sizes, strict=True)]
        (x, y), (u, v) = points[:2]
        slope = (v - y) // (u - x)
        size = Polynomial.of({(name,): slope, (): y - slope * x})
        if all(bind(size, at) == value for at, value in zip(dims, sizes, strict=True)):
            return size
    raise GraphirError("no affine size")


def declared(program: Program, op: Operator) -> list[Blob]:
    """What the outputs of a torch operator are to be declared: their geometry on meta tensors at several sizes.

    Raises:
        GraphirError: torch refuses the operator, or its sizes are not affine in one dimension.
    """
    blobs = program.step.blobs
    dims = [{name: value + k for name, value in program.dims.items()} for k in range(3)]
    sources = dict(op.effects.views) | dict(op.effects.writes)
    sizes_read = [size for name in op.inputs for size in (*(blobs[name].shape or ()), blobs[name].offset)]
    names = list(dict.fromkeys(dim for size in sizes_read for dim in size_dims(size))) or list(program.dims)
    found = [_on_meta(op, [blobs[name] for name in op.inputs], at) for at in dims]
    made = []
    for k, name in enumerate(op.outputs):
        tensors = [each[k] for each in found]
        shape = tuple(fitted(sizes, dims, names) for sizes in zip(*(t.shape for t in tensors), strict=True))
        strides: Shape | None = None
        if not all(t.is_contiguous() for t in tensors):
            strides = tuple(fitted(sizes, dims, names) for sizes in zip(*(t.stride() for t in tensors), strict=True))
        offset = fitted([int(t.storage_offset()) for t in tensors], dims, names) if k in sources else 0
        old = blobs.get(name)
        storage = blobs[op.inputs[sources[k]]].storage if k in sources else name
        role = blobs[storage].role if k in sources else (old.role if old is not None else "activation")
        device = blobs[storage].device if k in sources else op.device
        made.append(Blob(name, shape, str(to_symbol(tensors[0].dtype)), device, role, storage, strides, offset))
    return made


def _on_meta(op: Operator, blobs: Sequence[Blob], dims: Dims) -> list[torch.Tensor]:
    tensors = []
    for blob in blobs:
        if blob.dtype is None:
            raise GraphirError("not known")
        shape, strides = bound_layout(blob, dims)
        offset = bind(blob.offset, dims)
        reach = offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size)
        storage = torch.empty(max(reach, 1), dtype=to_torch(blob.dtype), device="meta")
        tensors.append(storage.as_strided(shape, strides, offset))
    args = {name: arg for name, arg in op.args.items() if name != "device"}
    call = call_of(op.type, args, op.operands, len(tensors))
    positional, keywords = filled(call, tensors, lambda arg: evaluate(arg, dims), torch.device("meta"))
    try:
        returned = overload(op.type)(*positional, **keywords)
    except Exception as e:  # whatever torch has against it
        raise GraphirError(str(e)) from e
    flat = [t for t in (returned if isinstance(returned, (tuple, list)) else (returned,)) if t is not None]
    if len(flat) != len(op.outputs):
        raise GraphirError("another number of outputs")
    return flat
