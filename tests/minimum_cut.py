"""The fewest bytes that cross where modules of a captured program are moved to another gpu, found without graphir's
passes: a minimum cut over all operators of the step.

What modules with parameters compute is on one side or the other, with what computes its gradients, its parameters and
their update. Everything else may be on either: casts, operators of containers, gradients of views, sums of gradients.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import networkx as nx

from graphir import passes
from graphir.ir.blob import Blob, bound_layout, dense_nbytes
from graphir.ir.program import Program

__all__ = ["copied", "cuts", "fewest_bytes", "weighted"]

STAYS, MOVES, NOWHERE = "stays", "moves", "nowhere"


def weighted(program: Program) -> list[str]:
    """The modules whose own operators read parameters, in the order in which they do; the model itself left out."""
    blobs = program.step.blobs
    read = {
        op.module: None
        for op in program.step.ops
        if op.phase == "forward" and any(blobs[blobs[name].storage].role == "param" for name in op.inputs)
    }
    return [module for module in read if module]


def cuts(program: Program, parts: Iterable[float]) -> list[list[str]]:
    """What to move so that these parts of the modules with parameters stay. A module that contains one that stays,
    stays; what another one contains is not named."""
    order = weighted(program)
    found = []
    for part in parts:
        kept = order[: int(len(order) * part)]
        moved = [m for m in order[len(kept) :] if not any(k.startswith(f"{m}.") for k in kept)]
        if kept and moved:
            found.append([m for m in moved if not any(m.startswith(f"{other}.") for other in moved)])
    return found


def copied(program: Program, modules: Sequence[str]) -> int:
    """The bytes that cross in a step where our passes move the modules."""
    placed = passes.inject_copies(passes.shift_modules(program, dict.fromkeys(modules, 1)))
    copies = [op.inputs[0] for op in placed.step.ops if op.type == "Copy"]
    return sum(dense_nbytes(placed.step.blobs[name], placed.dims) for name in copies)


def fewest_bytes(program: Program, modules: Sequence[str]) -> int:
    """The least that has to cross in a step where the modules are moved."""
    step, blobs = program.step, program.step.blobs
    inside = {op.module for op in step.ops if any(f"{op.module}.".startswith(f"{m}.") for m in modules)}
    sides = _sides(program, inside)
    producers: dict[str, Any] = {}
    owners = {
        blobs[name].storage: blobs[op.inputs[0]].storage
        for op in reversed(step.ops)
        if op.phase == "update"
        for name in op.inputs
    }
    for name in step.external_inputs:
        if blobs[name].role in ("input", "constant"):
            producers[name] = NOWHERE if blobs[name].shape == () and blobs[name].device.is_host else ("input", name)
        else:
            module = owners.get(name, name).rpartition(".")[0]
            producers[name] = MOVES if any(f"{module}.".startswith(f"{m}.") for m in modules) else STAYS
    read: dict[str, dict[str, set[Any]]] = {}
    shown: dict[Any, str] = {}
    for i, op in enumerate(step.ops):
        if op.effects.shows:
            continue
        node = producers[blobs[op.inputs[0]].storage] if op.phase == "update" else sides.get(i, i)
        for name in op.inputs:
            storage = blobs[name].storage
            if producers[storage] not in (node, NOWHERE):
                alone = dense_nbytes(blobs[name], program.dims) < dense_nbytes(blobs[storage], program.dims)
                piece = shown.setdefault(_elements(blobs[name], program), name)
                read.setdefault(storage, {}).setdefault(piece if alone else storage, set()).add(node)
        for name in op.outputs:
            producers.setdefault(blobs[name].storage, node)
    graph = nx.DiGraph()
    graph.add_nodes_from([STAYS, MOVES])

    def join(source: Any, there: Any, name: str) -> None:
        nbytes = dense_nbytes(blobs[name], program.dims)
        graph.add_edge(source[0], (there, name), capacity=nbytes)
        graph.add_edge(("back", there, name), source[1], capacity=nbytes)

    for storage, names in read.items():
        join((producers[storage], producers[storage]), "whole", storage)
        for name, readers in names.items():
            part = "whole" if name == storage else "piece"
            if name != storage:
                join((("whole", storage), ("back", "whole", storage)), part, name)
            for reader in readers:
                graph.add_edge((part, name), reader)
                graph.add_edge(reader, ("back", part, name))
    value, _ = nx.minimum_cut(graph, STAYS, MOVES)
    return int(value)


def _sides(program: Program, inside: Container[str]) -> dict[int, str]:
    """The side of each operator of the forward and the backward that is not free."""
    step, blobs = program.step, program.step.blobs
    paths = {path for op in step.ops for path in _prefixes(op.module)}
    containers = {path.rpartition(".")[0] for path in paths}
    leaves = {name.rpartition(".")[0] for name in program.interface.module_state} - containers
    sides: dict[int, str] = {}
    made: dict[str, int] = {}
    for i, op in enumerate(step.ops):
        for name in op.outputs:
            made.setdefault(blobs[name].storage, i)
        if (op.type in ("aten._to_copy.default", "aten.add.Tensor") and op.phase == "backward") or op.effects.shows:
            continue
        if op.phase == "backward" and op.of and not blobs[op.of].is_view:
            owner = sides.get(made.get(blobs[op.of].storage, -1))
            if owner is not None:
                sides[i] = owner
        elif op.phase == "forward" and op.type != "aten._to_copy.default":
            reads = any(blobs[blobs[name].storage].role == "param" for name in op.inputs)
            if op.module in inside or op.module in leaves or reads:
                sides[i] = MOVES if op.module in inside else STAYS
    return sides


def _elements(blob: Blob, program: Program) -> Any:
    """What a view shows, in whatever order: a transpose crosses with what it is one of."""
    shape, strides = bound_layout(blob, program.dims)
    steps = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    return blob.storage, str(blob.offset), tuple(steps)


def _prefixes(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:k]) for k in range(1, len(parts) + 1)]
