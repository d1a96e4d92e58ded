"""Copies that a shift has made needless, which ``inject_copies`` takes out before it puts in its own.

A pass such as :func:`.shard` puts copies in for the devices that it knows. A later shift may bring both ends of a copy
to one device, or take every reader away from where the copy goes::

    piece    @gpu:2 = aten.narrow(bags)         piece @gpu:2 = aten.narrow(bags)
    arrived  @gpu:1 = Copy(piece)         ──▶
    top      @gpu:2 = aten.addmm(arrived)       top   @gpu:2 = aten.addmm(piece)

A copy that another copy reads stays: it is where something is parked.
"""

from __future__ import annotations

from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Operator
from graphir.ir.size import add

__all__ = ["without_needless"]


def without_needless(net: Net) -> Net:
    """The net whose operators read the source of each needless copy in its place.

    A copy is needless if its source is on its own device, or if it has readers and none of them is on its device.
    Source and copy have to be alike, and neither may be overwritten.
    """
    stands = _needless(net)
    if not stands:
        return net
    blobs = {name: blob for name, blob in net.blobs.items() if name not in stands}
    for name, blob in blobs.items():
        if blob.storage in stands:
            home = net.blobs[stands[blob.storage]]
            blobs[name] = blob._replace(
                storage=home.storage, device=home.device, role=home.role, offset=add(home.offset, blob.offset)
            )
    ops = [_reading(op, stands) for op in net.ops if not (op.kind == "copy" and op.outputs[0] in stands)]
    return net.with_(
        ops=tuple([op._replace(device=blobs[op.outputs[0]].device) if op.effects.shows else op for op in ops]),
        blobs=blobs,
        gradients={stands.get(name, name): stands.get(grad, grad) for name, grad in net.gradients.items()},
    )


def _needless(net: Net) -> dict[str, str]:
    """By the name of each needless copy, what its readers read in its place."""
    blobs, found = net.blobs, dict[str, str]()
    for name, (source, readers) in _copies(net).items():
        together = blobs[source].device == blobs[name].device
        if together or (readers and not any(_reads_at(op, blobs[name].device, net) for op in readers)):
            found[name] = source
    if not found:
        return found
    kept = {blobs[name].storage for name in net.external_outputs}
    for op in net.ops:
        if op.effects is not PURE:
            kept.update([blobs[op.outputs[output]].storage for output, _ in op.effects.writes])
        if op.output_versions:
            kept.update(op.outputs)
    stands: dict[str, str] = {}
    for name, source in found.items():
        source = stands.get(source, source)
        copy, home = blobs[name], blobs[source]
        alike = (home.shape, home.dtype, home.strides) == (copy.shape, copy.dtype, copy.strides)
        if alike and copy.storage == name and kept.isdisjoint((name, home.storage)):
            stands[name] = source
    return stands


class _Copied(NamedTuple):
    """What a copy is of, and who reads it or its views."""

    source: str
    readers: list[Operator]


def _copies(net: Net) -> dict[str, _Copied]:
    """The copies of a net, by name. Before the first one nothing is looked up; behind it, one look-up an operator."""
    shown: dict[str, str] = {}
    found: dict[str, _Copied] = {}
    for op in net.ops:
        if shown and not shown.keys().isdisjoint(op.inputs):
            for name in op.inputs:
                if name in shown and op.effects.shows:
                    shown.update(dict.fromkeys(op.outputs, shown[name]))
                elif name in shown:
                    found[shown[name]].readers.append(op)
        if op.kind == "copy" and op.output_versions is None:
            shown[op.outputs[0]] = op.outputs[0]
            found[op.outputs[0]] = _Copied(op.inputs[0], [])
    return found


def _reads_at(op: Operator, device: Device, net: Net) -> bool:
    """Whether an operator reads a value where it is on a device: as copies and collectives do, wherever they run."""
    return op.device == device or op.type in net.dialect.elsewhere


def _reading(op: Operator, stands: dict[str, str]) -> Operator:
    """An operator that reads the sources of copies, and runs beside them."""
    if op.of not in stands and stands.keys().isdisjoint(op.inputs):
        return op
    return op._replace(inputs=tuple([stands.get(name, name) for name in op.inputs]), of=stands.get(op.of, op.of))
