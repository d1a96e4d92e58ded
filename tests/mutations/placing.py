"""Mutations of what placement makes: copies and their sources, collectives, replicas, devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from graphir import passes
from graphir.errors import GraphirError
from graphir.ir.device import gpu
from graphir.ir.operator import PURE, Operator
from graphir.ir.program import Program
from mutations.edits import exchanged, shuffled, with_net, with_ops

__all__ = ["PLACING"]

Found = Iterator[tuple[str, Program]]
Pairs = Iterator[tuple[str, Program, Program]]

_AWAY = gpu(6)


def _copies(program: Program, draw: Random) -> list[int]:
    return shuffled([k for k, op in enumerate(program.step.ops) if op.type == "Copy"], draw)


def stale_copy(program: Program, draw: Random) -> Pairs:
    """A copy is made before the operator that overwrites its source last: of what it held then."""
    for _, before in _away(program, draw):
        blobs, ops = before.step.blobs, before.step.ops
        for position in _copies(before, draw):
            storage = blobs[ops[position].inputs[0]].storage
            writers = [
                k
                for k, op in enumerate(ops[:position])
                if any(blobs[op.outputs[output]].storage == storage for output, _ in op.effects.writes)
                or (op.type == "Copy" and blobs[op.outputs[0]].storage == storage)
            ]
            for writer in writers[-1:]:
                rest = [*ops[:position], *ops[position + 1 :]]
                moved = with_ops(before, [*rest[:writer], ops[position], *rest[writer:]])
                yield f"{ops[position].outputs[0]} copied before {ops[writer].type}", moved, before
        # And one that is shared by readers before and after a write.
        for k, op in enumerate(ops):
            if not op.effects.writes or op.type in ("AllReduce",):
                continue
            source = op.inputs[op.effects.writes[0][1]]
            later = [place for place in range(k + 1, len(ops)) if source in ops[place].inputs]
            if not later:
                continue
            copy = f"{source}.stale"
            kept = blobs[source]._replace(name=copy, storage=copy, offset=0, role="activation")
            crossing = Operator("Copy", (source,), (copy,), {}, blobs[source].device, op.phase, effects=PURE)
            changed = list(ops)
            place = draw.choice(later)
            reader = changed[place]
            if reader.effects.writes:
                continue
            changed[place] = reader._replace(inputs=tuple(copy if n == source else n for n in reader.inputs))
            changed.insert(k, crossing)
            what = f"{source!r} copied before {op.type}, read by {reader.type}"
            yield what, with_ops(before, changed, {copy: kept}), before


def _away(program: Program, draw: Random) -> Iterator[tuple[str, Program]]:
    """The program with some of what overwrites on another device than what it overwrites, and the copies that this
    needs, with those that bring the result back."""
    ops = list(program.step.ops)
    writing = shuffled([k for k, op in enumerate(ops) if op.effects.writes and op.type != "AllReduce"], draw)
    for start in range(0, len(writing), 3):
        for k in writing[start : start + 3]:
            ops[k] = ops[k]._replace(device=_AWAY)
        try:
            yield "away", passes.inject_copies(with_ops(program, ops))
        except GraphirError:
            return


def write_back_dropped(program: Program, draw: Random) -> Pairs:
    """The copy that brings an update home is left out."""
    for _, before in _away(program, draw):
        ops = before.step.ops
        for position in _copies(before, draw):
            made = ops[position].outputs[0]
            earlier = {name for op in ops[:position] for name in op.outputs} | set(before.step.external_inputs)
            if made in earlier:
                rest = [*ops[:position], *ops[position + 1 :]]
                yield f"nobody brings {made!r} home", with_ops(before, rest), before


def copy_redirected(program: Program, draw: Random) -> Found:
    """A copy is of another blob of equal geometry."""
    net = program.step
    for position in _copies(program, draw):
        op = net.ops[position]
        source = net.blobs[op.inputs[0]]
        there = {*net.external_inputs, *(name for other in net.ops[:position] for name in other.outputs)}
        same = [
            name
            for name, blob in net.blobs.items()
            if name in there
            and name != source.name
            and (blob.shape, blob.dtype, blob.strides) == (source.shape, source.dtype, source.strides)
        ]
        for other in shuffled(same, draw)[:2]:
            ops = list(net.ops)
            ops[position] = op._replace(inputs=(other,))
            yield f"{op.outputs[0]} of {other!r} for {source.name!r}", with_ops(program, ops)


def copy_dropped(program: Program, draw: Random) -> Found:
    """A copy is left out, and its source is read where it lives; passes put another one in."""
    for position in _copies(program, draw):
        op = program.step.ops[position]
        source, made = op.inputs[0], op.outputs[0]
        if any(blob.storage == made and name != made for name, blob in program.step.blobs.items()):
            continue
        ops = [
            other._replace(inputs=tuple(source if name == made else name for name in other.inputs))
            for place, other in enumerate(program.step.ops)
            if place != position
        ]
        yield f"{source!r} for its copy {made!r}", with_ops(program, ops)


def collective(program: Program, draw: Random) -> Found:
    """A collective sums otherwise: with other shares, in another order, with other results, or a mean is a sum."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if op.type not in ("AllReduce", "graphir.sparse_sum"):
            continue
        args: dict[str, Any] = dict(op.args)
        other = {"mean": "sum", "sum": "mean"}[str(args.get("reduction", "sum"))]
        yield f"{other} of {op.outputs[0]}", exchanged(program, position, args={**args, "reduction": other})
        shares = args.get("shares")
        if isinstance(shares, tuple) and shares:
            others = {"reversed": shares[::-1], "equal": (shares[0],) * len(shares), "none": ()}
            for what, other_shares in others.items():
                changed = exchanged(program, position, args={**args, "shares": other_shares})
                yield f"shares of {op.outputs[0]} {what}", changed
        if op.type == "AllReduce":
            ops = list(program.step.ops)
            ops[position] = op._replace(inputs=op.inputs[::-1])
            yield f"operands of {op.outputs[0]} reversed", with_ops(program, ops)
            ops[position] = op._replace(outputs=op.outputs[::-1])
            yield f"results of {op.outputs[0]} reversed", with_ops(program, ops)
            ops[position] = op._replace(inputs=(op.inputs[0],) * len(op.inputs))
            yield f"{op.outputs[0]} of the first alone", with_ops(program, ops)


def replicas(program: Program, draw: Random) -> Found:
    """The replicas are in another order, or operators draw the numbers of another one."""
    if len(program.replicas) < 2:
        return
    yield "replicas reversed", program.with_(replicas=program.replicas[::-1])
    drawing = [k for k, op in enumerate(program.step.ops) if op.seed is not None]
    for position in shuffled(drawing, draw):
        op = program.step.ops[position]
        first, second = program.replicas[:2]
        name = op.outputs[0]
        ours, its = (first, second) if name.startswith(first) else (second, first)
        new = f"{its}{name.removeprefix(ours)}.drawn"
        blobs = dict(program.step.blobs)
        if blobs[name].is_view or len(op.outputs) > 1:
            continue
        ops = [
            other._replace(
                inputs=tuple(new if n == name else n for n in other.inputs),
                outputs=tuple(new if n == name else n for n in other.outputs),
            )
            for other in program.step.ops
        ]
        blobs = {
            (new if n == name else n): b._replace(
                name=new if n == name else n, storage=new if b.storage == name else b.storage
            )
            for n, b in blobs.items()
        }
        yield f"{name!r} is {new!r}", with_ops(program.with_(step=program.step.with_(blobs=blobs)), ops)
    dims = list(program.dims)
    if len(dims) == 2:
        from graphir.ir.size import Polynomial, rename_dims

        def other(size: Any) -> Any:
            return rename_dims(size, lambda dim: dims[1 - dims.index(dim)])

        for position, op in shuffled(list(enumerate(program.step.ops)), draw):
            sizes = {name: arg for name, arg in op.args.items() if isinstance(arg, Polynomial)}
            listed = {
                name: tuple(other(item) if isinstance(item, Polynomial) else item for item in arg)
                for name, arg in op.args.items()
                if isinstance(arg, tuple) and not isinstance(arg, Polynomial)
            }
            args = {**op.args, **{name: other(size) for name, size in sizes.items()}, **listed}
            if args != dict(op.args):
                what = f"sizes of the other replica in {op.type} -> {op.outputs[0]}"
                yield what, exchanged(program, position, args=args)


def device(program: Program, draw: Random) -> Found:
    """An operator is on another device, and passes put the copies in."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        if op.type in ("Copy", "AllReduce"):
            continue
        views = {output for output, _ in op.effects.views}
        if views:
            continue
        own = {
            name: blob.on(_AWAY)
            for name, blob in program.step.blobs.items()
            if blob.storage in op.outputs and blob.storage not in op.inputs
        }
        changed = exchanged(program, position, device=_AWAY)
        changed = with_net(changed, blobs={**changed.step.blobs, **own})
        try:
            yield f"{op.type} -> {op.outputs[0]} on {_AWAY}", passes.inject_copies(changed)
        except GraphirError:
            continue


PLACING: Mapping[str, Callable[[Program, Random], Iterator[Any]]] = {
    "copy before the update": stale_copy,
    "copy home dropped": write_back_dropped,
    "copy of another blob": copy_redirected,
    "copy dropped": copy_dropped,
    "collective": collective,
    "replicas": replicas,
    "device of an operator": device,
}
