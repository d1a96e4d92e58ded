"""Views that need no call: those that are an earlier value once more, and those that nobody reads.

The backward of a linear layer transposes a product, and the backward of the weight's transpose does so again::

    layer.backward_mm   = aten.mm(…)                      v7 = c3(…)
    layer.weight.t_grad = aten.t(layer.backward_mm)
    layer.weight_grad   = aten.t(layer.weight.t_grad)     v7, too
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from ..ir.blob import Blob
from ..ir.operator import Operator
from ..ir.plan import Plan

__all__ = ["Uncalled", "uncalled_views"]

_Value: TypeAlias = "tuple[str, int]"

_PERMUTING: Final = frozenset(
    f"aten.{name}" for name in ("alias.default", "detach.default", "permute.default", "t.default", "transpose.int")
)
"""Types whose results have the strides of their operand, at most in another order, at every size."""


class Uncalled(NamedTuple):
    """The values that views of a plan make without a call, as names and versions.

    Attributes:
        same: for each view that is an earlier value once more, that value.
        unread: those that only such views read, or nobody.
    """

    same: Mapping[_Value, _Value]
    unread: Collection[_Value]


def uncalled_views(plan: Plan, thread: Mapping[str, int], shared: Collection[_Value]) -> Uncalled:
    """Find them.

    Args:
        plan: whose operators run in its order.
        thread: which thread each lane belongs to.
        shared: the values that are handed from one thread to another; they are made as they stand.
    """
    net, blobs = plan.step, plan.step.blobs
    instructions = [instruction for instruction in plan.instructions if instruction.op >= 0]
    apart = len(set(thread.values())) > 1
    maker: dict[_Value, int] = {}
    viewed: set[str] = set()
    kept = set(net.external_outputs)
    same: dict[_Value, _Value] = {}
    before: dict[_Value, list[_Value]] = {}
    for instruction in instructions:
        op, here = net.ops[instruction.op], thread[instruction.lane]
        if apart:
            maker.update(dict.fromkeys(op.makes, here))
        if not op.effects.views or not _is_view(op):
            continue
        viewed.update(op.outputs)
        if op.type not in _PERMUTING:
            continue
        (made,), (read,) = op.makes, op.reads
        before[made] = [*before.get(read, ()), read]
        geometry = _geometry(blobs[made[0]])
        made_here = (value for value in before[made] if maker.get(value, here) == here)
        earlier = next((value for value in made_here if _geometry(blobs[value[0]]) == geometry), None)
        if earlier is not None and made not in shared and made[0] not in kept:
            same[made] = same.get(earlier, earlier)
    read_later = set(shared)
    unread: set[_Value] = set()
    for instruction in reversed(instructions):
        op = net.ops[instruction.op]
        if not op.effects.views:
            if not viewed.isdisjoint(op.inputs):
                read_later.update(op.reads)
            continue
        makes = set(op.makes)
        if _is_view(op) and not makes & read_later and not kept & {name for name, _ in makes}:
            unread |= makes
        elif makes and makes <= same.keys():
            read_later.update(same[made] for made in makes)
        else:
            read_later.update(op.reads)
    return Uncalled(same, unread)


def _geometry(blob: Blob) -> tuple[object, ...]:
    return blob.shape, blob.dtype, blob.strides, blob.offset


def _is_view(op: Operator) -> bool:
    """Whether all that an operator makes are views."""
    return len(op.effects.views) == len(op.outputs) > 0 and not op.effects.writes and len(op.inputs) == 1
