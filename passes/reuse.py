"""Let the blobs of a Caffe2 net take the names of dead ones, so that a workspace holds fewer bytes.

In a Caffe2 workspace a name is a storage, which stays as large as the largest tensor that was ever written to it. So
storages are shared by renaming, and a name that several blobs share has a version for each::

    conv1 = Conv(data, w1)           conv1   = Conv(data, w1)
    pool1 = MaxPool(conv1)     ───▶  pool1   = MaxPool(conv1)
    conv2 = Conv(pool1, w2)          conv1;1 = Conv(pool1, w2)
    relu2 = Relu(conv2)              conv1;2 = Relu(conv1;1)

1. A blob lives from its first write to its last use. What is external, what ``init`` makes, and what a nested net or a
   control input names keeps its name and shares it with nobody. An external output, and what nobody reads (a loss, an
   accuracy) keeps its name and its last value; before it is written, others may use the name.
2. An output takes the name of an operand that dies there, where the type allows it in place for these positions and
   the geometry is the same.
3. The others are packed into names whose lifetimes do not overlap (:mod:`.packing`), on one device and of one replica.

Element types need not be the same: Caffe2's operators resize and retype what they write. The order of the operators
stays, and Caffe2's own executors order reads before the next write of a name. ``caffe2/python/memonger.py`` shares the
gradients of a training net, or what is dead in an inference net, mostly by count, and never in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from graphir.ir.blob import Blob
from graphir.ir.names import prefix_of
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator, leaves, stored_versions
from graphir.ir.size import Dims

from .packing import Span, pack

__all__ = ["reuse_names"]


class _Life(NamedTuple):
    """What a blob needs of its storage. ``kept``: its last value stays, under its own name."""

    blob: Blob
    span: Span
    kept: bool

    @property
    def pool(self) -> tuple[str, str, bool]:
        """Only blobs of one pool share: on one device, of one replica, of known size or not."""
        blob = self.blob
        return blob.device, prefix_of(blob.name), blob.shape is None or blob.dtype is None


def reuse_names(net: Net, fixed: Collection[str], keep: Collection[str], dims: Dims, by: str) -> Net:
    """A Caffe2 net that computes the same with fewer bytes of distinct blobs.

    Args:
        net: as imported.
        fixed: names that another net uses too; they are left alone, as the external inputs are.
        keep: blobs that somebody reads after the step, beside the external outputs.
        dims: the value of each dimension.
        by: the pass that renames.
    """
    lives = _lives(net, {*fixed, *net.external_inputs, *_mentioned(net)}, {*keep, *net.external_outputs}, dims)
    groups = [group for group in _groups(lives, _in_place(net, lives)) if len(group) > 1]
    renamed = {name: survivor for group in groups for survivor in [_survivor(group, lives)] for name in group}
    if not renamed:
        return net
    ops = tuple(_rename_ops(net.ops, renamed, by))
    gradients = {a: g for a, g in net.gradients.items() if a not in renamed and g not in renamed}
    return net.with_(ops=ops, blobs=_rename_blobs(net.blobs, renamed, lives), gradients=gradients)


def _mentioned(net: Net) -> Iterator[str]:
    """Every name that an operator may mention beside its operands, or whose memory has another name too."""
    dialect = net.dialect
    for op in net.ops:
        for arg in op.args.values():
            if arg.__class__ is str or arg.__class__ is tuple:
                yield from (leaf for leaf in leaves(arg) if isinstance(leaf, str))
        yield from dialect.mentions(op)
        if dialect.is_alias(op):
            yield from op.inputs
            yield from op.outputs


def _lives(net: Net, fixed: set[str], kept: set[str], dims: Dims) -> dict[str, _Life]:
    """The blobs that may be renamed, in the order in which they are made."""
    start: dict[str, int] = {}
    end: dict[str, int] = {}
    unread: dict[str, None] = {}
    for position, op in enumerate(net.ops):
        for name in op.inputs:
            if name not in start:
                fixed.add(name)
            end[name] = position
            unread.pop(name, None)
        for name in op.outputs:
            start.setdefault(name, position)
            end[name] = position
            if op.type != "Free":
                unread[name] = None
    found = {}
    for name, first in start.items():
        blob = net.blobs[name]
        # One element is not worth a name, and is what people fetch: losses, accuracies, learning rates.
        if name in fixed or blob.is_view or (blob.shape is not None and set(blob.shape) <= {1}):
            continue
        stays = name in kept or name in unread
        found[name] = _Life(blob, Span(first, len(net.ops) if stays else end[name], blob.nbytes(dims)), stays)
    return found


def _in_place(net: Net, lives: Mapping[str, _Life]) -> dict[str, str]:
    """For each output that can take the name of an operand: that operand."""
    found: dict[str, str] = {}
    for position, op in enumerate(net.ops):
        allowed = net.dialect.in_place(op)
        for source, target in allowed:
            operand, output = op.inputs[source], op.outputs[target]
            if operand in op.outputs or output in found or operand not in lives or output not in lives:
                continue
            ours, theirs = lives[operand], lives[output]
            if (
                ours.span.end == position == theirs.span.start
                and _same_geometry(ours.blob, theirs.blob)
                and ours.pool == theirs.pool
                and all((k, target) in allowed for k, name in enumerate(op.inputs) if name == operand)
            ):
                found[output] = operand
    return found


def _same_geometry(a: Blob, b: Blob) -> bool:
    return a.shape is not None and a.dtype is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _groups(lives: Mapping[str, _Life], in_place: Mapping[str, str]) -> list[list[str]]:
    """The blobs that share each storage, in the order in which they are made."""
    root: dict[str, str] = {}
    chains: dict[str, list[str]] = {}
    for name in lives:
        root[name] = root[in_place[name]] if name in in_place else name
        chains.setdefault(root[name], []).append(name)
    pools: dict[tuple[str, str, bool], list[str]] = {}
    for name in chains:
        pools.setdefault(lives[name].pool, []).append(name)
    groups: list[list[str]] = []
    for names in pools.values():
        spans = [_whole([lives[name].span for name in chains[first]]) for first in names]
        shared: dict[int, list[str]] = {}
        for first, storage in zip(names, pack(spans), strict=True):
            shared.setdefault(storage, []).extend(chains[first])
        groups += shared.values()
    return groups


def _whole(spans: list[Span]) -> Span:
    return Span(spans[0].start, spans[-1].end, spans[0].nbytes)


def _survivor(group: list[str], lives: Mapping[str, _Life]) -> str:
    """The name that a group keeps: its kept blob's, or else the first one's. A group has at most one kept blob, since
    all of these are live at the end."""
    return next((name for name in group if lives[name].kept), group[0])


def _rename_blobs(blobs: Mapping[str, Blob], renamed: Mapping[str, str], lives: Mapping[str, _Life]) -> dict[str, Blob]:
    """The blobs that are left; a shared one has the geometry of the largest that it holds."""
    largest: dict[str, Blob] = {}
    for name, survivor in renamed.items():
        if survivor not in largest or lives[name].span.nbytes > lives[largest[survivor].name].span.nbytes:
            largest[survivor] = blobs[name]
    found: dict[str, Blob] = {}
    for name, blob in blobs.items():
        survivor = renamed.get(name, name)
        if name not in renamed:
            found[name] = blob
        elif survivor not in found:
            size = largest[survivor]
            found[survivor] = blobs[survivor]._replace(shape=size.shape, dtype=size.dtype)
    return found


def _rename_ops(ops: tuple[Operator, ...], renamed: Mapping[str, str], by: str) -> Iterator[Operator]:
    """The operators with their operands renamed: a value under a shared name is the name's next version."""
    latest: dict[str, int] = {}
    for op in ops:
        inputs, outputs = op.inputs, op.outputs
        if renamed.keys().isdisjoint(inputs + outputs):
            yield op
            continue
        names = tuple([renamed.get(name, name) for name in inputs])
        reads = [latest[renamed[name]] if name in renamed else version for name, version in op.reads]
        made = tuple([renamed.get(name, name) for name in outputs])
        makes = []
        for name, version in op.makes:
            if name in renamed:
                version = latest[renamed[name]] = latest.get(renamed[name], -1) + 1
            makes.append(version)
        yield op._replace(
            inputs=names,
            outputs=made,
            by=op.by if names == inputs and made == outputs else by,
            effects=_in_place_effects(op.effects, names, made),
            input_versions=stored_versions(reads),
            output_versions=stored_versions(makes),
        )


def _in_place_effects(effects: Effects, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Effects:
    written = {output for output, _ in effects.writes}
    new = [(k, inputs.index(name)) for k, name in enumerate(outputs) if k not in written and name in inputs]
    return effects._replace(writes=tuple(sorted((*effects.writes, *new)))) if new else effects
