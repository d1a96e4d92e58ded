"""The invariants of values that live in parts.

30. A name of the interface that lives in parts is not the name of a blob. Its parts are distinct blobs; each is a part
    of one name, in one replica. The parts have one element type and one role, and shapes that make up one value along
    the dimension.
31. ``init`` loads each part from its place in the whole value, and nothing else from a place.
32. Optimizer state lives in as many parts as its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ..blob import Blob
from ..operator import Operator
from ..parts import Parts, starts
from ..program import Program
from .problems import Problem

__all__ = ["part_names", "parts_problems"]


def parts_problems(program: Program, before: Iterable[str], after: Iterable[str]) -> Iterator[Problem]:
    """What is wrong with the parts of the interface.

    Args:
        program: the program.
        before: names of the interface that are blobs before a step, unless they live in parts.
        after: names of the interface that are blobs after a step, unless they live in parts.
    """
    interface, blobs = program.interface, program.step.blobs
    kept, known = set(before), {*before, *after}
    held = Counter(blob for parts in interface.parts.values() for blob in parts.blobs)
    loads = {op.outputs[0]: op for op in program.init.ops if op.type == "graphir.load" and op.outputs}
    placed: set[str] = set()
    for name, parts in interface.parts.items():
        names = part_names(program, name)
        placed.update(names)
        found = [blobs[part] for part in names if part in blobs]
        if name not in known or name in held or any(prefix + name in blobs for prefix in program.replicas):
            yield Problem(f"{name!r} cannot live in parts: it is {'a blob' if name in known else 'no name'}")
        elif not parts.blobs or max(held[part] for part in parts.blobs) > 1:
            yield Problem(f"the parts of {name!r} are not blobs of its own")
        elif any(len(interface.placed.get(part, program.replicas)) > 1 for part in parts.blobs):
            yield Problem(f"a part of {name!r} is in more than one replica")
        elif found and len(found) == len(names):  # the interface's own check reports missing blobs
            if not _fit(parts, found):
                listed = ", ".join(repr(blob.name) for blob in found)
                yield Problem(f"the parts {listed} do not make up {name!r} along dimension {parts.dim}")
            elif name in kept:
                yield from _loaded(program, name, parts, found, loads)
    for blob, op in loads.items():
        if op.args.get("dim") is not None and blob not in placed:
            yield Problem(
                f"{blob!r} is loaded from a place in {op.args.get('key')!r}, and is no part", op, program.init
            )
    for param, own in interface.optimizer_state.items():
        for name in own.values():
            if len(interface.blobs_of(name)) != len(interface.blobs_of(param)):
                yield Problem(f"optimizer state {name!r} does not live in as many parts as {param!r}")


def part_names(program: Program, name: str) -> tuple[str, ...]:
    """The blobs that a name lives in; none where a part is in no replica, which is a problem of its own."""
    interface = program.interface
    everywhere = all(interface.placed.get(part, program.replicas) for part in interface.blobs_of(name))
    return program.blobs_of(name) if everywhere and program.replicas else ()


def _fit(parts: Parts, blobs: list[Blob]) -> bool:
    """Whether blobs make up one value, as *parts* says."""
    first, dim = blobs[0], parts.dim
    shapes = [blob.shape for blob in blobs]
    if first.shape is None or any(blob.dtype != first.dtype or blob.role != first.role for blob in blobs):
        return False
    if dim is None:
        return len(set(shapes)) == 1
    if not 0 <= dim < len(first.shape):
        return False
    rest = {(*shape[:dim], None, *shape[dim + 1 :]) if shape is not None else None for shape in shapes}
    return len(rest) == 1 and all(isinstance(shape[dim], int) for shape in shapes if shape is not None)


def _loaded(
    program: Program, name: str, parts: Parts, blobs: list[Blob], loads: dict[str, Operator]
) -> Iterator[Problem]:
    """The parts that are not loaded from their place."""
    shapes = [tuple([size if isinstance(size, int) else 0 for size in blob.shape or ()]) for blob in blobs]
    for blob, first in zip(blobs, starts(parts.dim, shapes), strict=True):
        op = loads.get(blob.name)
        if op is None:
            yield Problem(f"part {blob.name!r} of {name!r} is not loaded by init")
        elif (op.args.get("key"), op.args.get("dim"), op.args.get("first", 0)) != (name, parts.dim, first):
            yield Problem(f"part {blob.name!r} is not loaded from its place in {name!r}", op, program.init)
