"""Mutations of what operators read, and of which operators there are, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

from graphir.errors import GraphirError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.operator import PURE, Operator
from graphir.ir.opset import is_random, overload, signature
from graphir.ir.optypes.own import OWN
from graphir.ir.program import Program
from mutations.edits import alike, declared, effects, exchanged, named, replaced, shuffled, with_ops

__all__ = ["OPERANDS", "ORDER"]

Found = Iterator[tuple[str, Program]]


def _positions(program: Program, draw: Random) -> list[int]:
    return shuffled(list(range(len(program.step.ops))), draw)


def swapped(program: Program, draw: Random) -> Found:
    """Two operands of one operator change places."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        pairs = [(i, j) for j in range(len(op.inputs)) for i in range(j) if op.inputs[i] != op.inputs[j]]
        if pairs:
            i, j = draw.choice(pairs)
            order = list(range(len(op.inputs)))
            order[i], order[j] = j, i
            yield f"operands {i} and {j} of {named(op)}", _reading(program, position, [op.inputs[k] for k in order])


def alike_blob(program: Program, draw: Random) -> Found:
    """An operand is another blob of its shape and element type."""
    yield from _redirected(program, draw, shaped=True)


def other_blob(program: Program, draw: Random) -> Found:
    """An operand is a blob of another shape."""
    yield from _redirected(program, draw, shaped=False)


def _redirected(program: Program, draw: Random, *, shaped: bool) -> Found:
    for position in _positions(program, draw):
        op = program.step.ops[position]
        free = [k for k in range(len(op.inputs)) if k not in {source for _, source in op.effects.writes}]
        if op.type == "Copy" or not free:
            continue
        k = draw.choice(free)
        others = alike(program, position, k, shaped=shaped)
        for other in shuffled(others, draw)[: 1 if shaped else 3]:
            inputs = [*op.inputs[:k], other, *op.inputs[k + 1 :]]
            yield f"{other!r} for {op.inputs[k]!r} in {named(op)}", _reading(program, position, inputs)


def _reading(program: Program, position: int, inputs: list[str]) -> Program:
    ops = list(program.step.ops)
    op = ops[position]
    written = {source: output for output, source in op.effects.writes}
    outputs = list(op.outputs)
    for source, output in written.items():
        outputs[output] = inputs[source]
    ops[position] = op._replace(inputs=tuple(inputs), outputs=tuple(outputs))
    if op.effects.views:  # what it makes lies elsewhere then
        try:
            return replaced(program, position, ops[position], *declared(program, ops[position]))
        except GraphirError:
            pass
    return with_ops(program, ops)


def gradient(program: Program, draw: Random) -> Found:
    """A parameter is given another one's gradient."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        if op.phase == "update" and len(op.inputs) > 1 and "." in op.type:
            for other in shuffled(alike(program, position, 1), draw)[:2]:
                if program.step.blobs[other].role == "gradient":
                    inputs = (op.inputs[0], other, *op.inputs[2:])
                    yield f"{other!r} for {op.inputs[1]!r}", _reading(program, position, list(inputs))
    given = program.interface.gradients
    names = [(a, b) for a in given for b in given if a < b]
    blobs = program.step.blobs
    for a, b in shuffled(names, draw):
        if blobs[given[a]].shape == blobs[given[b]].shape:
            interface = program.interface
            swapped_ = {**given, a: given[b], b: given[a]}
            yield f"{a!r} and {b!r}", program.with_(interface=replace(interface, gradients=swapped_))


def dropped(program: Program, draw: Random) -> Found:
    """An operator is left out; whoever read its result reads its operand."""
    blobs = program.step.blobs
    for position in _positions(program, draw):
        op = program.step.ops[position]
        if op.effects.writes or len(op.outputs) != 1 or not op.inputs or op.outputs[0] in program.step.external_outputs:
            continue
        made = op.outputs[0]
        same = [name for name in op.inputs if blobs[name].shape == blobs[made].shape]
        if not same:
            continue
        instead = draw.choice(same)
        ops = [
            other._replace(inputs=tuple(instead if name == made else name for name in other.inputs))
            for place, other in enumerate(program.step.ops)
            if place != position
        ]
        yield f"{named(op)}: {instead!r} instead", _restored(program, ops)


def _restored(program: Program, ops: list[Operator]) -> Program:
    """Views follow the storage of what they are made of."""
    blobs = dict(program.step.blobs)
    for op in ops:
        for output, source in (*op.effects.views, *op.effects.writes):
            if source < len(op.inputs) and output < len(op.outputs):
                storage = blobs[op.inputs[source]].storage
                name = op.outputs[output]
                if blobs[name].storage != storage:
                    blobs[name] = blobs[name]._replace(storage=storage, role=blobs[storage].role)
    return with_ops(program, ops, blobs)


def update_dropped(program: Program, draw: Random) -> Found:
    """An operator that only overwrites is left out."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        if op.effects.writes and len(op.effects.writes) == len(op.outputs):
            ops = [*program.step.ops[:position], *program.step.ops[position + 1 :]]
            yield named(op), with_ops(program, ops)


def duplicated(program: Program, draw: Random) -> Found:
    """An operator is executed twice: what overwrites, twice; what makes something, under a second name that is read
    from then on."""
    for position in _positions(program, draw):
        op, ops = program.step.ops[position], list(program.step.ops)
        if op.effects.writes and len(op.effects.writes) == len(op.outputs):
            yield f"{named(op)} twice", with_ops(program, [*ops[: position + 1], op, *ops[position + 1 :]])
        elif not op.effects.writes and op.type not in ("AllReduce",):
            again = {name: f"{name}.again" for name in op.outputs}
            blobs = program.step.blobs
            made = {
                new: blobs[old]._replace(name=new, storage=again.get(blobs[old].storage, blobs[old].storage))
                for old, new in again.items()
            }
            views = {
                name: blob._replace(storage=again[blob.storage])
                for name, blob in blobs.items()
                if blob.storage in again and name not in again
            }
            later = [
                other._replace(inputs=tuple(again.get(name, name) for name in other.inputs))
                for other in ops[position + 1 :]
            ]
            second = op._replace(outputs=tuple(again.values()))
            yield f"{named(op)} again", with_ops(program, [*ops[: position + 1], second, *later], {**made, **views})


def moved(program: Program, draw: Random) -> Found:
    """An operator is executed earlier or later."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        rest = [*program.step.ops[:position], *program.step.ops[position + 1 :]]
        place = min(max(position + draw.choice((-12, -5, -2, -1, 1, 2, 5, 12)), 0), len(rest))
        if place != position:
            yield f"{named(op)} to {place}", with_ops(program, [*rest[:place], op, *rest[place:]])


def update_moved(program: Program, draw: Random) -> Found:
    """An operator that overwrites is executed before or after another use of what it overwrites."""
    blobs = program.step.blobs
    ops = program.step.ops
    for position in _positions(program, draw):
        op = ops[position]
        storages = {blobs[op.outputs[output]].storage for output, _ in op.effects.writes}
        if not storages:
            continue
        users = [
            place
            for place, other in enumerate(ops)
            if place != position and storages & {blobs[name].storage for name in (*other.inputs, *other.outputs)}
        ]
        rest = [*ops[:position], *ops[position + 1 :]]
        for place in shuffled(dict.fromkeys([p for user in users for p in (user, user + 1)]), draw):
            yield f"{named(op)} to {place}", with_ops(program, [*rest[:place], op, *rest[place:]])


_FAMILIES = (
    ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.maximum.default"),
    ("aten.relu.default", "aten.tanh.default", "aten.sigmoid.default", "aten.neg.default", "aten.abs.default",
     "aten.exp.default", "aten.round.default", "aten.clone.default", "aten.square.default"),
    ("aten.sum.default", "aten.mean.default", "aten.max.default", "aten.min.default", "aten.amax.default"),
    ("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default"),
    ("aten.gt.Scalar", "aten.ge.Scalar", "aten.lt.Scalar", "aten.ne.Scalar"),
    ("aten.mul.Scalar", "aten.div.Scalar", "aten.add.Scalar", "aten.sub.Scalar"),
    ("aten.copy_.default", "aten.add_.Tensor", "aten.mul_.Tensor"),
    ("aten.fill_.Scalar", "aten.mul_.Scalar", "aten.add_.Scalar"),
    ("aten.zeros_like.default", "aten.ones_like.default"),
    ("aten.rand_like.generator", "aten.randn_like.generator"),
    ("aten.select_scatter.default", "aten.slice_scatter.default"),
    ("graphir.adam", "graphir.adamw"),
)  # fmt: skip
"""Types that take what the others of their family take."""


def other_type(program: Program, draw: Random) -> Found:
    """An operator is of another type that takes the same."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        family = next((f for f in _FAMILIES if op.type in f), ())
        for other in shuffled([t for t in family if t != op.type], draw)[:2]:
            yield f"{other} for {named(op)}", exchanged(program, position, type=other)


def in_place(program: Program, draw: Random) -> Found:
    """A functional operator overwrites its first operand."""
    blobs = program.step.blobs
    for position in _positions(program, draw):
        op = program.step.ops[position]
        if op.effects != PURE or len(op.outputs) != 1 or not op.inputs or not _exists(_in_place(op.type)):
            continue
        source, made = blobs[op.inputs[0]], blobs[op.outputs[0]]
        if (source.shape, source.dtype, source.strides) != (made.shape, made.dtype, made.strides):
            continue
        if source.role in STATE_ROLES or made.name in program.step.external_outputs:
            continue
        ops = list(program.step.ops)
        storage = source.storage
        ops[position] = op._replace(type=_in_place(op.type))
        try:
            ops[position] = effects(ops[position])
        except GraphirError:
            continue
        moved_ = {
            name: blob._replace(storage=storage, role=blobs[storage].role, offset=source.offset)
            for name, blob in blobs.items()
            if blob.storage == made.name
        }
        yield named(op), with_ops(program, ops, moved_)


def out_of_place(program: Program, draw: Random) -> Found:
    """An operator that overwrites makes a new value instead: later readers of the old name have the old value, or are
    given the new one."""
    blobs = program.step.blobs
    for position in _positions(program, draw):
        op = program.step.ops[position]
        type_ = op.type.replace("_.", ".", 1)
        if op.effects.writes != ((0, 0),) or len(op.outputs) != 1 or type_ == op.type or not _exists(type_):
            continue
        name = op.outputs[0]
        new = f"{name}.new"
        old = blobs[name]
        made = old._replace(name=new, storage=new, role="activation", offset=0, device=op.device)
        ops = list(program.step.ops)
        ops[position] = op._replace(type=type_, outputs=(new,), effects=PURE)
        yield f"{named(op)}, and nobody reads it", with_ops(program, ops, {new: made})
        following = [
            other._replace(inputs=tuple(new if n == name else n for n in other.inputs)) for other in ops[position + 1 :]
        ]
        yield f"{named(op)}, and it is read", with_ops(program, [*ops[: position + 1], *following], {new: made})


def _in_place(type_: str) -> str:
    namespace, name, variant = [*type_.split("."), "", ""][:3]
    return f"{namespace}.{name}_.{variant}"


def _exists(type_: str) -> bool:
    if type_ in OWN or type_.count(".") != 2:
        return False
    try:
        overload(type_)
        return not is_random(type_, {}) and bool(signature(type_).tensors)
    except GraphirError:
        return False


def seeds(program: Program, draw: Random) -> Found:
    """A random operator has another seed id, or that of another one."""
    drawing = [k for k, op in enumerate(program.step.ops) if op.seed is not None]
    ids = [program.step.ops[k].seed for k in drawing]
    for position in drawing:
        op = program.step.ops[position]
        for seed in {*(op.seed + k for k in (1, 2, 7, 1000)), *ids} - {op.seed}:  # type: ignore[operator]
            yield f"seed {seed} for {named(op)}", exchanged(program, position, seed=seed)


def versions(program: Program, draw: Random) -> Found:
    """The versions or the effects that an operator declares are others."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        reads, makes = (
            list(op.input_versions or [0] * len(op.inputs)),
            list(op.output_versions or [0] * len(op.outputs)),
        )
        if reads:
            k = draw.randrange(len(reads))
            reads[k] += draw.choice((-1, 1)) if reads[k] else 1
            yield f"version read by {named(op)}", exchanged(program, position, input_versions=tuple(reads))
        if makes:
            k = draw.randrange(len(makes))
            makes[k] += 1
            yield f"version made by {named(op)}", exchanged(program, position, output_versions=tuple(makes))
        if op.effects != PURE:
            yield f"no effects of {named(op)}", exchanged(program, position, effects=PURE)


def labels(program: Program, draw: Random) -> Found:
    """What says nothing of values is changed: module, pass, source line, and the phase between forward and backward."""
    for position in _positions(program, draw):
        op = program.step.ops[position]
        yield f"module of {named(op)}", exchanged(program, position, module="elsewhere")
        yield f"pass of {named(op)}", exchanged(program, position, by="somebody", source="x.py:1")


Kind = Callable[[Program, Random], Found]

OPERANDS: Mapping[str, Kind] = {
    "operands swapped": swapped,
    "operand: another alike": alike_blob,
    "operand: of another shape": other_blob,
    "gradient of another parameter": gradient,
    "seed ids": seeds,
    "versions and effects": versions,
    "labels only": labels,
}

ORDER: Mapping[str, Kind] = {
    "operator dropped": dropped,
    "update dropped": update_dropped,
    "operator twice": duplicated,
    "operator moved": moved,
    "update before or after a use": update_moved,
    "operator of another type": other_type,
    "in place for functional": in_place,
    "functional for in place": out_of_place,
}
