"""Offsets of embedding bags count lookups from the first row of the batch: no replica has them by its own rows.

A bag that is placed gets the offsets of the whole batch, if they are given, or computed where it is placed. A replica's
bag gets some rows of them, which say nothing of its lookups; only where every row has as many lookups, and these are
split, too, are offsets made for each share.

The same holds of micro-batches: each one of a placed bag has rows of every replica, one share behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Final

from graphir.errors import PassError
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.size import size_dims

from .table_blocks import BAGS

__all__ = ["require_whole_offsets"]

_LOOKUPS: Final = BAGS | {"graphir.block_embedding_bag"}

_BY_ROW: Final = frozenset({"aten._to_copy.default", "aten.clone.default"})
"""What replicas may make of their rows of the offsets before these are joined; and views."""


_SPLIT: Final = (
    "not placed, and its offsets {!r} would be split along the batch",
    "place it, too; where lookups were as many as rows when captured, name their number: capture(…, batch_dims=…)",
)

_CUT: Final = (
    "placed, and its offsets {!r} are cut into micro-batches, each of which has rows of several replicas",
    "give each row as many lookups, without offsets: indices of shape [rows, lookups]; or capture without accumulate",
)


def require_whole_offsets(
    net: Net, at: Callable[[Device], Device], replicated: Device, rows: Container[str], cut: bool
) -> None:
    """Refuse a step in which a bag would have offsets of a share of the batch for lookups of another one.

    Args:
        net: a captured step.
        at: the region of each device.
        replicated: the region of what is not placed.
        rows: inputs that are split along the batch.
        cut: whether they are cut into micro-batches, too.

    Raises:
        PassError: there is such a bag.
    """
    for op in net.ops:
        if op.type in _LOOKUPS:
            if at(op.device) == replicated:
                _require_own_lookups(net, op, rows, _SPLIT)
            else:
                if cut:
                    _require_own_lookups(net, op, rows, _CUT)
                _require_given(net, op, at, replicated)


def _require_own_lookups(net: Net, bag: Operator, rows: Container[str], refused: tuple[str, str]) -> None:
    """What bags get rows of, they get offsets and lookups of alike; *refused* are what else is said, and its remedy."""
    indices, offsets = (_sources(net, name) for name in bag.inputs[1:3])
    counted = next((name for name in indices if name in rows), None)
    split = next((name for name in offsets if name in rows), None)
    shape = net.blobs[bag.inputs[2]].shape or ()
    follow = any("batch" in size_dims(size) for size in shape)
    if split is None and not (offsets if counted else follow):
        return
    what, fix = refused
    also = f", and {counted!r} too, as many as rows when captured" if counted else ""
    given = split or net.blobs[bag.inputs[2]].storage
    raise PassError(f"module {bag.module!r} is {what.format(given)}{also}", fix=fix)


def _require_given(net: Net, bag: Operator, at: Callable[[Device], Device], replicated: Device) -> None:
    """What replicas make of offsets for a placed bag, they make row by row."""
    pending, seen = list(bag.inputs[2:3]), set[str]()
    while pending:
        name = pending.pop()
        maker = None if name in seen else net.producer(name)
        seen.add(name)
        if maker is None:
            continue
        if at(maker.device) == replicated and not maker.effects.shows and maker.type not in _BY_ROW:
            raise PassError(
                f"module {maker.module!r} is not placed, and computes {maker.outputs[0]!r} for the offsets of "
                f"{bag.module!r}, which is: each replica would count from the first row of its share",
                fix="compute offsets in the module that is placed, or give them to the model",
            )
        pending += maker.inputs


def _sources(net: Net, name: str) -> dict[str, None]:
    """The external inputs that a blob is computed of."""
    found, seen, pending = dict[str, None](), set[str](), [name]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        maker = net.producer(name)
        if maker is None:
            found[name] = None
        else:
            pending += maker.inputs
    return found
