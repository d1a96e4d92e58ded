"""Label propagation: from the values that were chosen to the operators that move with them.

This is the sweep of Caffe2's ``data_parallel_model_utils._ShiftActivationDevices``. A label belongs to a *key*: a name
in Caffe2's nets, a storage in captured ones. Of each source device, in program order,

    an operator takes the label of the last activation among its inputs and outputs;
                if there is none, the first label among them;
                if there is none, it stays;
    and gives it to every key that it touches and that has no label yet.

Operators of one source device never look up keys of another one, so one sweep over all does the same as a sweep for
each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.operator import Operator

__all__ = ["Label", "Source", "propagate"]


class Label(NamedTuple):
    """Whether its keys move, and whether it *decides*: an operator takes the last label that does, and the first one it
    meets only where none does."""

    moves: bool
    decides: bool = False


class Source(NamedTuple):
    """A device that is shifted from.

    Attributes:
        keys: of each name that can have a label here, what the label belongs to.
        labels: by key; :func:`propagate` adds to them.
    """

    keys: Mapping[str, str]
    labels: dict[str, Label]


def propagate(
    ops: Sequence[Operator], sources: Mapping[Device, Source], follows: Callable[[Operator], bool]
) -> list[int]:
    """The positions of the operators that move.

    Args:
        ops: in program order.
        sources: by the device of operators; those on others stay.
        follows: whether an operator goes where another one or an operand goes. Such operators are passed over.
    """
    moved: list[int] = []
    find = sources.get
    weak = {moves: Label(moves) for moves in (False, True)}
    for i, op in enumerate(ops):
        source = find(op.device)
        if source is None or follows(op):
            continue
        keys, labels = source
        decided = first = None
        new: list[str] = []
        for name in op.inputs + op.outputs:
            key = keys.get(name)
            if key is None:
                continue
            label = labels.get(key)
            if label is None:
                new.append(key)
            elif label.decides:
                decided = label
            elif first is None:
                first = label
        label = decided or first
        moves = label is not None and label.moves
        if new:
            given = weak[moves]
            for key in new:
                labels[key] = given
        if moves:
            moved.append(i)
    return moved
