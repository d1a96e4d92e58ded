"""Which operators of a net are alike: formulas of their work and of their scratch give the same for each of them.

A net of many layers has few that are not, and each formula is asked once for those that are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np

from ..ir.net import Net
from ..ir.optypes.table import operator_type

__all__ = ["Kinds", "alike"]

Kinds: TypeAlias = list[int]
"""By operator, the position of the first one that is like it: its own where it is the first."""


def alike(net: Net) -> Kinds:
    """Which operators are of one type, with equal arguments, and with operands and results of equal shapes, element
    types and strides.

    What has a registered type is like nothing else: formulas that somebody has registered may look at anything.
    """
    touches = net.touches
    geometry = touches.geometry[touches.blob].astype(np.int32)
    sized, width = geometry.tobytes(), geometry.itemsize  # slices of bytes are the cheapest keys
    begins, inputs, ends = (touches.begin * width).tolist(), touches.inputs.tolist(), (touches.end * width).tolist()
    first: dict[Hashable, int] = {}
    found: Kinds = []
    for i, (op, begin, count, end) in enumerate(zip(net.ops, begins, inputs, ends, strict=True)):
        args = tuple(op.args.items()) if op.args else ()
        key = op.type, op.operands, count, sized[begin:end], op.effects, args
        known = first.setdefault(key, i)
        if known == i and operator_type(op.type).registered:
            del first[key]
        found.append(known)
    return found
