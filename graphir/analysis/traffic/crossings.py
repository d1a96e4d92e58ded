"""The copies of a step between devices: what made the value, what reads it first, what kind of value it is."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from ...ir.dialect import Dialect
from ...ir.net import Net
from ...ir.operator import PURE, Operator
from ...ir.placement import same_memory

__all__ = ["KINDS", "Crossing", "Crossings", "Kind", "crossings", "is_copy", "kind_of", "only_views"]

Kind: TypeAlias = Literal[
    "activation",
    "gradient",
    "parameter",
    "buffer",
    "optimizer state",
    "input",
    "constant",
    "temporary",
    "output",
]
"""What a copied value is: the role of the blob whose value it is, however often it was copied since."""

KINDS: Final[Mapping[str, Kind]] = {
    "activation": "activation",
    "gradient": "gradient",
    "param": "parameter",
    "buffer": "buffer",
    "state": "optimizer state",
    "input": "input",
    "constant": "constant",
    "temporary": "temporary",
    "output": "output",
}
"""By role, in the order of the tables."""


class Crossing(NamedTuple):
    """A copy from one memory to another.

    Attributes:
        position: of the copy among the net's operators.
        origin: the storage whose value it is: that of the first of several copies, one after the other.
        maker: position of the operator that computed the value; -1: none of the step did.
        reader: position of the first operator that computes with it; -1: none of the step does.
        kind: what the value is.
    """

    position: int
    origin: str
    maker: int
    reader: int
    kind: Kind


class Crossings(NamedTuple):
    """The copies of a net from one memory to another.

    Attributes:
        copies: in program order.
        origins: for each storage that a copy fills, the storage whose value that is, at the end of the net.
    """

    copies: list[Crossing]
    origins: Mapping[str, str]


def is_copy(op: Operator, dialect: Dialect) -> bool:
    """Whether the operator gives the value of its input to its output, possibly elsewhere."""
    return op.type in dialect.copies and len(op.inputs) == 1 == len(op.outputs)


def only_views(op: Operator) -> bool:
    """Whether the operator makes nothing but views: it neither reads elements nor moves them."""
    effects = op.effects
    return effects is not PURE and bool(effects.views) and len(effects.views) == len(op.outputs)


def kind_of(storage: str, net: Net, gradients: Container[str]) -> Kind:
    """What the value of a storage is.

    Args:
        storage: the name of the blob that owns it.
        net: the net.
        gradients: the storages of its gradients. In an imported net they have no such role.
    """
    role = net.blobs[storage].role
    computed = role in ("activation", "temporary", "output")
    return "gradient" if computed and (storage in gradients or net.dialect.is_gradient(storage)) else KINDS[role]


def crossings(net: Net) -> Crossings:
    """The copies of a net from one memory to another.

    A value is that of a storage: who makes or reads a view, makes or reads its storage. Views and copies are no
    readers themselves; their readers are.
    """
    blobs = net.blobs
    gradients = {blobs[name].storage for name in net.gradients.values()}
    made: dict[str, int] = {}
    copied: dict[str, str] = {}
    found: list[tuple[int, str, int]] = []
    for position, op in enumerate(net.ops):
        if is_copy(op, net.dialect):
            source, target = blobs[op.inputs[0]], blobs[op.outputs[0]]
            origin = copied.get(source.storage, source.storage)
            made[target.storage] = maker = made.get(source.storage, -1)
            copied[target.storage] = origin
            if not same_memory(source.device, target.device):
                found.append((position, origin, maker))
        elif not only_views(op):
            _made_by(op, position, net, made, copied)
    readers = _first_readers(net, {position for position, _, _ in found}) if found else {}
    copies = [
        Crossing(position, origin, maker, readers[position], kind_of(origin, net, gradients))
        for position, origin, maker in found
    ]
    return Crossings(copies, copied)


def _made_by(op: Operator, position: int, net: Net, made: dict[str, int], copied: dict[str, str]) -> None:
    """Note what an operator computes. A copy that is updated in place stays a copy of the same blob."""
    updated = [output for output, _ in op.effects.writes]
    viewed = op.effects.viewing if op.effects.views else ()
    for k, name in enumerate(op.outputs):
        if k in viewed:
            continue
        storage = net.blobs[name].storage
        made[storage] = position
        if copied and k not in updated:
            copied.pop(storage, None)


def _first_readers(net: Net, positions: set[int]) -> dict[int, int]:
    """For each of these copies, the first operator after it that computes with what it made, before it is replaced."""
    blobs, ops = net.blobs, net.ops
    coming: dict[str, int] = {}
    found: dict[int, int] = {}
    for position in range(len(ops) - 1, -1, -1):
        op = ops[position]
        if is_copy(op, net.dialect):
            reader = coming.pop(blobs[op.outputs[0]].storage, -1)
            if position in positions:
                found[position] = reader
            if reader >= 0:
                coming[blobs[op.inputs[0]].storage] = reader
        elif op.type != "Free" and not only_views(op):
            updated: Sequence[int] = [output for output, _ in op.effects.writes]
            for k, name in enumerate(op.outputs):
                if k not in updated:
                    coming.pop(blobs[name].storage, None)
            for name in op.inputs:
                coming[blobs[name].storage] = position
    return found
