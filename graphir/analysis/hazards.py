"""What orders the operators of a net: the storages that they touch.

Two operators that touch a storage keep their order if one of them writes it, and an operator that reads a view comes
after the one that made it. Operators of one lane keep their order anyway. :func:`graphir.passes.emit` chooses among the
orders that are left, and :mod:`.instructions` puts in the events that hold lanes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..ir.blob import STATE_ROLES, Blob
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.plan import issued_as

__all__ = ["Hazards", "hazards", "outliving", "touches"]


class Hazards(NamedTuple):
    """What the operators of a net touch, by position.

    Attributes:
        earlier: for each operator, the earlier ones that it has to come after: the last writer of each storage that it
            reads or writes, the maker of each view that it reads, and, for each storage that it writes, everyone who
            read it since its last write.
        touched: for each operator, the storages of its operands and of its results, each once.
        shared: the storages that a lane other than the compute lane of their own device touches.
    """

    earlier: list[list[int]]
    touched: list[tuple[str, ...]]
    shared: set[str]


def outliving(net: Net) -> set[str]:
    """The storages that outlive the step: state and outputs, and what the host feeds."""
    blobs = net.blobs
    kept = {blobs[name].storage for name in net.external_outputs}
    kept.update([name for name, blob in blobs.items() if blob.role in STATE_ROLES])
    kept.update([name for name in net.external_inputs if blobs[name].device.kind == "cpu"])
    return kept


def hazards(net: Net) -> Hazards:
    """What a net's operators touch."""
    blobs = net.blobs
    found = Hazards([], [], set())
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    viewer: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        device = op.device
        earlier: dict[int, None] = {}
        touched: dict[str, None] = {}
        for name in op.inputs:
            blob = blobs[name]
            touched[storage := blob.storage] = None
            if storage in writer:
                earlier[writer[storage]] = None
            if storage != name and name in viewer:
                earlier[viewer[name]] = None
            if storage in readers:
                readers[storage].append(i)
            else:
                readers[storage] = [i]
            if blob.device != device:
                found.shared.add(storage)
        views = dict(op.effects.views)
        for position, name in enumerate(op.outputs):
            blob = blobs[name]
            touched[storage := blob.storage] = None
            if blob.device != device:
                found.shared.add(storage)
            if position in views:
                viewer[name] = i
                continue
            if storage != name:
                viewer.pop(name, None)
            if storage in writer:
                earlier[writer[storage]] = None
            if storage in readers:
                earlier.update(dict.fromkeys(readers.pop(storage)))
            writer[storage] = i
        earlier.pop(i, None)
        found.earlier.append(list(earlier))
        found.touched.append(tuple(touched))
        if issued_as(op) != "run":
            found.shared.update(touched)
    return found


def touches(op: Operator, blobs: Mapping[str, Blob]) -> tuple[set[str], set[str]]:
    """The blobs and storages that an operator reads, and those that it makes or overwrites: of two operators one of
    which writes what the other touches, the order is to be kept."""
    views = op.effects.viewing
    made = [blobs[name].storage for n, name in enumerate(op.outputs) if n not in views]
    return {*op.inputs, *[blobs[name].storage for name in op.inputs]}, {*op.outputs, *made}
