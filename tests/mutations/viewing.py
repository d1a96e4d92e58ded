"""Mutations of views, of what copies where it might alias, and of what reads beyond a view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.operator import PURE, Operator, Symbol
from graphir.ir.program import Program
from graphir.ir.size import bind, bind_shape
from mutations.edits import declared, effects, inserted, named, replaced, shuffled, with_ops

__all__ = ["VIEWING"]

Found = Iterator[tuple[str, Program]]

_ELSEWHERE = gpu(7)


def _tried(program: Program, position: int, op: Operator) -> Program | None:
    """With another operator, whose results are declared as it gives them; None where it does not take its operands."""
    try:
        op = effects(op)
        return replaced(program, position, op, *declared(program, op))
    except (GraphirError, IndexError, ValueError):
        return None


def _views(program: Program, draw: Random) -> list[int]:
    ops = program.step.ops
    return shuffled([k for k, op in enumerate(ops) if op.effects.views and len(op.outputs) == 1], draw)


def end_for_start(program: Program, draw: Random) -> Found:
    """``x[-1]`` is ``x[7]`` at batch 8, and so on: indices, starts and ends that agree at the captured size only."""
    blobs = program.step.blobs
    for position in _views(program, draw):
        op = program.step.ops[position]
        if op.type not in ("aten.select.int", "aten.slice.Tensor"):
            continue
        shape = blobs[op.inputs[0]].shape
        dim = op.args.get("dim", 0)
        assert shape is not None and isinstance(dim, int)
        size = shape[dim]
        now = bind(size, program.dims)
        changes: list[dict[str, Any]] = []
        for name, arg in op.args.items():
            if name == "dim" or not isinstance(arg, int) or not -now <= arg < now:
                continue
            changes.append({**op.args, name: arg + now if arg < 0 else arg - now})
        if op.type == "aten.slice.Tensor" and "end" not in op.args:
            changes += [{**op.args, "end": now}, {**op.args, "end": now + 1}]
        for args in changes:
            found = _tried(program, position, op._replace(args=args))
            if found is not None:
                yield f"{args} in {named(op)} of {size}", found


def other_view(program: Program, draw: Random) -> Found:
    """A view is another one of the same shape: of another operator, or other dimensions or places."""
    blobs = program.step.blobs
    for position in _views(program, draw):
        op = program.step.ops[position]
        source, made = blobs[op.inputs[0]], blobs[op.outputs[0]]
        if source.shape is None or made.shape is None:
            continue
        rank = len(source.shape)
        candidates: list[tuple[str, dict[str, Any]]] = [("aten.alias.default", {}), ("aten.t.default", {})]
        candidates += [("aten.view.default", {"size": made.shape}), ("aten.expand.default", {"size": made.shape})]
        for dim in range(rank):
            now = bind(source.shape[dim], program.dims)
            candidates += [("aten.select.int", {"dim": dim, "index": k}) for k in range(min(now, 4))]
            candidates += [("aten.slice.Tensor", {"dim": dim, "start": k}) for k in range(min(now, 3))]
            candidates += [
                ("aten.slice.Tensor", {"dim": dim, "step": 2}),
                ("aten.slice.Tensor", {"dim": dim, "end": -1}),
            ]
            candidates += [("aten.transpose.int", {"dim0": dim, "dim1": other}) for other in range(dim)]
            candidates += [("aten.unsqueeze.default", {"dim": dim}), ("aten.squeeze.dim", {"dim": dim})]
        if source.dtype in ("c64", "c128"):
            candidates += [("aten._conj.default", {})]
        for type_, args in shuffled([c for c in candidates if c != (op.type, dict(op.args))], draw):
            found = _tried(program, position, op._replace(type=type_, args=args, operands=None))
            if found is not None and found.step.blobs[op.outputs[0]].shape == made.shape:
                yield f"{type_} {args} for {named(op)} {dict(op.args)}", found
                break


_BITS = ("aten._conj.default", "aten._neg_view.default", "aten.alias.default")


def conjugate(program: Program, draw: Random) -> Found:
    """A conjugate or negative view is a plain one, and a plain one is that."""
    blobs = program.step.blobs
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if len(op.inputs) != 1 or len(op.outputs) != 1 or not op.effects.views:
            continue
        dtype = blobs[op.inputs[0]].dtype or ""
        mine = op.type in _BITS
        others = [t for t in _BITS if t != op.type and (dtype.startswith("c") or t != "aten._conj.default")]
        if mine or (dtype.startswith("c") and op.type in ("aten.t.default", "aten.view.default")):
            for other in others:
                found = _tried(program, position, op._replace(type=other, args={}))
                if found is not None:
                    yield f"{other} for {named(op)}", found
    # A plain view of what is read is put in between.
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if not op.inputs or op.effects.writes or op.type in ("Copy", "AllReduce"):
            continue
        source = op.inputs[0]
        dtype = blobs[source].dtype or ""
        bit = "aten._conj.default" if dtype.startswith("c") else "aten._neg_view.default"
        if dtype[:1] not in ("c", "f"):
            continue
        new = f"{source}.bit"
        between = Operator(bit, (source,), (new,), {}, blobs[source].device, op.phase)
        try:
            between = effects(between)
            ops = list(program.step.ops)
            ops[position] = op._replace(inputs=(new, *op.inputs[1:]))
            made = {blob.name: blob for blob in declared(program, between)}
            if op.effects.views:
                continue
            yield f"{bit} before {named(op)}", with_ops(program, [*ops[:position], between, *ops[position:]], made)
        except GraphirError:
            continue


_COPYING = ("aten.clone.default", "aten._to_copy.default", "aten.view_copy.default", "aten.mul.Scalar")


def copy_as_view(program: Program, draw: Random) -> Found:
    """What copies is written as what aliases, where the operand has the result's shape and element type."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if op.type not in _COPYING[:2] or len(op.inputs) != 1:
            continue
        made = program.step.blobs[op.outputs[0]]
        for type_, args in (
            ("aten.alias.default", {}),
            ("aten.view.default", {"size": made.shape}),
            ("aten.detach.default", {}),
        ):
            found = _tried(program, position, op._replace(type=type_, args=args))
            found = found and _moved_storages(found, op.outputs[0], made)
            if found is not None:
                yield f"{type_} for {named(op)}", found


def _moved_storages(program: Program, name: str, before: Blob) -> Program:
    """Views of what was a storage and is a view now are views of that one's storage."""
    blob = program.step.blobs[name]
    if blob.storage == name or before.storage != name:
        return program
    moved = {
        n: b._replace(storage=blob.storage, role=blob.role, device=blob.device)
        for n, b in program.step.blobs.items()
        if b.storage == name
    }
    return with_ops(program, program.step.ops, moved)


_COPIES_OF = {
    "aten.alias.default": "aten.clone.default",
    "aten.detach.default": "aten.clone.default",
    **{f"aten.{name}": f"aten.{name.replace('.', '_copy.', 1)}" for name in (
        "t.default", "view.default", "select.int", "slice.Tensor", "permute.default", "transpose.int",
        "expand.default", "unsqueeze.default", "squeeze.dim", "diagonal.default", "as_strided.default",
        "_conj.default", "_neg_view.default", "view_as_real.default", "split.Tensor",
    )},
}  # fmt: skip


def view_as_copy(program: Program, draw: Random) -> Found:
    """A view is written as the operator that copies it."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        type_ = _COPIES_OF.get(op.type)
        if type_ is None or len(op.outputs) != 1:
            continue
        try:
            new = effects(op._replace(type=type_))
            made = declared(program, new)[0]
        except GraphirError:
            continue
        name = op.outputs[0]
        views = {n for n, _ in _reached(program, name)}
        moved = {}
        for view in views:
            blob = program.step.blobs[view]
            moved[view] = blob._replace(storage=name, role=made.role)
        ops = list(program.step.ops)
        ops[position] = new
        changed = with_ops(program, ops, {**moved, name: made._replace(role="activation")})
        changed = _redeclared(changed, position + 1, views)
        if changed is not None:
            yield f"{type_} for {named(op)}", changed


def _reached(program: Program, name: str) -> Iterator[tuple[str, int]]:
    """The views made of a view, one after the other."""
    known = {name}
    for place, op in enumerate(program.step.ops):
        for output, source in op.effects.views:
            if op.inputs[source] in known:
                known.add(op.outputs[output])
                yield op.outputs[output], place


def _redeclared(program: Program, start: int, views: set[str]) -> Program | None:
    """With the geometry of these views as their operators give it now."""
    for place in range(start, len(program.step.ops)):
        op = program.step.ops[place]
        if op.effects.views and views & set(op.outputs):
            try:
                made = {blob.name: blob for blob in declared(program, op)}
            except GraphirError:
                return None
            program = with_ops(program, program.step.ops, made)
    return program


def sometimes(program: Program, draw: Random) -> Found:
    """A copy or a view is written as what aliases only sometimes: ``contiguous``, ``reshape``, ``flatten``, ``ravel``,
    ``_to_copy``, and so on."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.effects.writes:
            continue
        if op.type not in ("aten.clone.default", "aten.view.default", "aten._unsafe_view.default", "aten.alias.default",
                           "aten._to_copy.default", "aten.t.default"):  # fmt: skip
            continue
        made = program.step.blobs[op.outputs[0]]
        dtype = Symbol(str(made.dtype))
        candidates: list[tuple[str, dict[str, Any]]] = [
            ("aten.contiguous.default", {}),
            ("aten.reshape.default", {"shape": made.shape}),
            ("aten._reshape_alias.default", {"size": made.shape, "stride": _strides(program, made)}),
            ("aten.to.dtype", {"dtype": dtype}),
            ("aten.flatten.using_ints", {}),
            ("aten.ravel.default", {}),
            ("aten._reshape_copy.default", {"size": made.shape}),
        ]
        for type_, args in shuffled(candidates, draw):
            found = _tried(program, position, op._replace(type=type_, args=args))
            found = found and _moved_storages(found, op.outputs[0], made)
            if found is not None and found.step.blobs[op.outputs[0]].shape == made.shape:
                yield f"{type_} for {named(op)}", found


def _strides(program: Program, blob: Blob) -> Any:
    if blob.strides is not None:
        return blob.strides
    shape, step = bind_shape(blob.shape or (), program.dims), 1
    strides = []
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def strided(program: Program, draw: Random) -> Found:
    """A view or a read beyond one is at other places of the storage: size, stride or offset of ``as_strided`` and its
    relatives; a view is written as one of them."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if op.type.startswith("aten.as_strided"):
            for name in ("size", "stride", "storage_offset"):
                arg = op.args.get(name, 0)
                for step in (1, -1, 2):
                    new = arg + step if isinstance(arg, int) else _bumped(arg, step)
                    found = _tried(program, position, op._replace(args={**op.args, name: new}))
                    if found is not None:
                        yield f"{name}={new} in {named(op)}", found
        elif op.effects.views and len(op.outputs) == 1 and op.inputs:
            made = program.step.blobs[op.outputs[0]]
            offset = made.offset
            for shift in (0, 1):
                if not isinstance(offset, int):
                    continue
                args = {"size": made.shape, "stride": _strides(program, made), "storage_offset": offset + shift}
                found = _tried(program, position, op._replace(type="aten.as_strided.default", args=args))
                if found is not None:
                    yield f"as_strided {args} for {named(op)}", found


def _bumped(arg: Any, step: int) -> Any:
    if not isinstance(arg, tuple) or not arg or not isinstance(arg[-1], int):
        return arg
    return (*arg[:-1], max(arg[-1] + step, 0))


def behind_a_copy(program: Program, draw: Random) -> Found:
    """What an operator reads is copied elsewhere before, and the operator moved there: as a shift and its copies do."""
    blobs = program.step.blobs
    ops = program.step.ops
    order = shuffled(range(len(ops)), draw)
    order.sort(key=lambda k: "strided" not in ops[k].type and "scatter" not in ops[k].type)
    for position in order:
        op = ops[position]
        if op.type in ("Copy", "AllReduce") or op.effects.writes or not op.inputs or op.phase == "update":
            continue
        k = draw.randrange(len(op.inputs))
        source = op.inputs[k]
        copy = f"{source}.copied"
        if copy in blobs or source in op.inputs[:k] + op.inputs[k + 1 :]:
            continue
        kept = blobs[source]._replace(name=copy, storage=copy, offset=0, device=_ELSEWHERE, role="activation")
        crossing = Operator("Copy", (source,), (copy,), {}, _ELSEWHERE, op.phase, effects=PURE)
        changed = inserted(program, position, crossing, kept)
        read = op._replace(inputs=(*op.inputs[:k], copy, *op.inputs[k + 1 :]))
        found = list(changed.step.ops)
        found[position + 1] = read
        changed = with_ops(changed, found)
        if op.effects.views:
            views = {op.outputs[output] for output, _ in op.effects.views}
            again = {view: blobs[view]._replace(storage=copy, role="activation", device=_ELSEWHERE) for view in views}
            more = {n for view in views for n, _ in _reached(program, view)}
            again |= {n: blobs[n]._replace(storage=copy, role="activation", device=_ELSEWHERE) for n in more}
            changed = with_ops(changed, changed.step.ops, again)
            redeclared = _redeclared(changed, position + 1, views | more)
            if redeclared is None:
                continue
            changed = redeclared
        yield f"{source!r} copied before {named(op)}", changed


VIEWING: Mapping[str, Callable[[Program, Random], Found]] = {
    "index from the other end": end_for_start,
    "another view of equal shape": other_view,
    "conjugate, negative": conjugate,
    "copy as a view": copy_as_view,
    "view as a copy": view_as_copy,
    "aliases only sometimes": sometimes,
    "as_strided and its like": strided,
    "read behind a copy": behind_a_copy,
}
