"""The invariants of a program as a whole; :mod:`.net` has those of its nets.

15. The prefixes of the replicas differ. Gradients are reduced in a known way, and copies are issued a whole number
    of operators ahead, from 0 up. The shares of a batch, where there are some, are one for each replica, positive, not
    all equal, and without a common divisor.
16. Operators of ``init`` have the phase init, operators of ``step`` another phase.
17. ``init`` makes every blob of ``step`` that lives from step to step, with the same geometry, role and device. Only
    blobs that Caffe2 feeds into a workspace are not made.
18. ``graphir.load`` names an entry of ``program.state`` (if the program has state) of the blob's shape and element
    type, or of the shape and element type of the value that the blob is a part of.
19. Every replica has each blob of the interface: parameters, buffers and optimizer state before the step, gradients
    after it; and, if it shares in the batch, inputs before the step, the loss or the outputs after it. For a placed
    blob, this holds of the replicas that ``placed`` names, at least one. For a name that lives in parts
    (:mod:`.parts`), the replicas have the parts.
20. Learning rates and the other numbers of parameter groups are inputs ``f64[] @cpu:0``.
21. Every dimension in a size has a value (found while shapes are compared), and so has every dimension in a guard.
    Dimensions of recorded sizes are dimensions of the program.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import GraphirError
from ..blob import STATE_ROLES, Blob
from ..device import CPU
from ..dtype import TORCH_NAME
from ..names import base_name
from ..parts import whole_shape
from ..program import REDUCTIONS, Program
from ..shares import read_shares
from ..size import bind_shape
from .parts import part_names, parts_problems
from .problems import Problem

__all__ = ["program_problems"]


def program_problems(program: Program) -> list[Problem]:
    """Every invariant that the program breaks beside those of its nets."""
    return [*_phases(program), *_state(program), *_loads(program), *_interface(program)]


def _phases(program: Program) -> Iterator[Problem]:
    yield from _covers(program)
    if len(set(program.replicas)) != len(program.replicas) or not program.replicas:
        yield Problem(f"the replicas {list(program.replicas)} are not distinct prefixes")
    if program.reduction not in REDUCTIONS:
        yield Problem(f"reduction cannot be {program.reduction!r}, only {' or '.join(map(repr, REDUCTIONS))}")
    if program.shares:
        yield from _shares(program)
    if program.ahead is not None and (type(program.ahead) is not int or program.ahead < 0):
        yield Problem(f"copies cannot be issued {program.ahead!r} operators ahead, only a whole number from 0 up")
    for net, initial in ((program.init, True), (program.step, False)):
        for op in net.ops:
            if (op.phase == "init") != initial:
                yield Problem(f"an operator of {'init' if initial else 'step'} has the phase {op.phase}", op, net)


def _covers(program: Program) -> Iterator[Problem]:
    for guard in program.covers.guards:
        for dim in guard.dims:
            if dim not in program.dims:
                yield Problem(f"dimension {dim!r} of the guard {guard} has no value")
    names = {base_name(dim) for dim in program.dims}
    for point in program.covers.recorded:
        for dim in point:
            if dim not in names:
                yield Problem(f"dimension {dim!r} of recorded sizes is none of the program's")


def _shares(program: Program) -> Iterator[Problem]:
    try:
        kept = read_shares(program.shares, len(program.replicas))
    except GraphirError as e:
        yield Problem(f"the replicas cannot share a batch by {list(program.shares)}: {e.what}")
        return
    if kept != program.shares:
        yield Problem(f"the shares {list(program.shares)} are not in lowest terms: {list(kept)}")


def _state(program: Program) -> Iterator[Problem]:
    made = {name for op in program.init.ops for name in op.outputs} | set(program.init.external_inputs)
    for name in program.step.external_inputs:
        blob = program.step.blobs.get(name)
        if blob is None or blob.role not in STATE_ROLES:
            continue
        first = program.init.blobs.get(name)
        if first is None or name not in made:
            if program.step.dialect.workspace:
                continue
            yield Problem(f"{blob.role} {name!r} is not made by init")
        elif first.device != blob.device:
            yield Problem(f"{blob.role} {name!r} is on {first.device} in init but on {blob.device} in step")
        elif first != blob:
            differs = [f for f, a, b in zip(blob._fields, first, blob, strict=True) if a != b]
            yield Problem(f"{blob.role} {name!r} differs in {' and '.join(differs)} between init and step")


def _loads(program: Program) -> Iterator[Problem]:
    if not program.state:
        return
    for op in program.init.ops:
        if op.type != "graphir.load":
            continue
        key = op.args.get("key")
        value = program.state.get(key) if isinstance(key, str) else None
        blob = program.init.blobs.get(op.outputs[0]) if op.outputs else None
        if value is None:
            yield Problem(f"program.state has no entry {key!r}", op, program.init)
        elif blob is not None and blob.shape is not None and blob.dtype is not None:
            try:
                shape = _loaded_shape(program, blob, key)
            except GraphirError:  # reported by the net's own check
                continue
            if tuple(value.shape) != shape or str(value.dtype) != f"torch.{TORCH_NAME.get(blob.dtype)}":
                actual = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
                yield Problem(f"program.state[{key!r}] is {actual}, unlike blob {blob.name!r}", op, program.init)


def _loaded_shape(program: Program, blob: Blob, key: object) -> tuple[int, ...]:
    """The shape of the value that a blob is loaded from, or is a part of."""
    own, parts = bind_shape(blob.shape or (), program.dims), program.interface.parts.get(str(key))
    names = () if parts is None else part_names(program, str(key))
    if parts is None or parts.dim is None or blob.name not in names:
        return own
    blobs = [program.init.blobs[name] for name in names if name in program.init.blobs]
    shapes = [bind_shape(each.shape or (), program.dims) for each in blobs]
    return whole_shape(parts.dim, shapes) if all(0 <= parts.dim < len(shape) for shape in shapes) else own


def _interface(program: Program) -> Iterator[Problem]:
    interface = program.interface
    before = {
        "input": [feed.blob for feed in interface.feeds if feed.blob is not None],
        "module state": list(interface.module_state.values()),
        "optimizer state": [name for blobs in interface.optimizer_state.values() for name in blobs.values()],
        "parameter": [name for group in interface.param_groups for name in group.params],
    }
    after = {
        "loss": [interface.loss] if interface.loss is not None else [],
        "output": [fetch.blob for fetch in interface.fetches if fetch.blob is not None],
        "gradient": list(interface.gradients.values()),
    }
    given, handed = set(program.step.external_inputs), set(program.step.external_outputs)
    known = {
        blob for names in (*before.values(), *after.values()) for name in names for blob in interface.blobs_of(name)
    }
    for name, prefixes in interface.placed.items():
        if name not in known or not prefixes or not set(prefixes) <= set(program.replicas):
            yield Problem(f"{name!r} cannot be placed on {', '.join(map(repr, prefixes)) or 'no replica'}")
    rows = {"input", "loss", "output"}
    for wanted, names, role in ((before, given, "an external input"), (after, handed, "an external output")):
        for kind, blobs in wanted.items():
            for blob in dict.fromkeys(blob for name in blobs for blob in interface.blobs_of(name)):
                for prefix in interface.placed.get(blob, program.sharing if kind in rows else program.replicas):
                    if prefix + blob not in names:
                        yield Problem(f"{kind} {prefix + blob!r} of the interface is not {role} of step")
    yield from parts_problems(
        program, [name for names in before.values() for name in names], [n for names in after.values() for n in names]
    )
    for group in interface.param_groups:
        if not 0 <= group.optimizer < len(interface.optimizers):
            yield Problem(f"the group of {group.lr!r} belongs to optimizer {group.optimizer}, which is not there")
        for name in group.blobs:
            number, kind = program.step.blobs.get(name), "learning rate" if name == group.lr else "number"
            if number is None or name not in given:
                yield Problem(f"{kind} {name!r} is not an external input of step")
            elif (number.role, number.dtype, number.shape, number.device) != ("input", "f64", (), CPU):
                yield Problem(f"{kind} {name!r} is not an input f64[] @cpu:0")
