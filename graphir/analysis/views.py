"""Views that need no call: those that are an earlier value once more, and those that nobody reads.

The backward of a linear layer transposes a product, and the backward of the weight's transpose does so again::

    layer.backward_mm   = aten.mm(…)                      v7 = c3(…)
    layer.weight.t_grad = aten.t(layer.backward_mm)
    layer.weight_grad   = aten.t(layer.weight.t_grad)     v7, too, also where the caller gets the gradient

That of its bias sums with ``keepdim``, and drops the dimension::

    layer.bias_sum  = aten.sum(…, dim=[0], keepdim=True)  v8 = c4(…, (0,), False)
    layer.bias_grad = aten.view(layer.bias_sum, [32])     v8, too
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple, TypeAlias

from ..ir.blob import Blob
from ..ir.operator import Operator
from ..ir.plan import Plan

__all__ = ["Uncalled", "uncalled_views"]

_Value: TypeAlias = "tuple[str, int]"

_SUM: Final = "aten.sum.dim_IntList"
_PERMUTING: Final = frozenset(
    f"aten.{name}" for name in ("alias.default", "detach.default", "permute.default", "t.default", "transpose.int")
)
"""Types whose results have the strides of their operand, at most in another order, at every size."""


class Uncalled(NamedTuple):
    """The values that views of a plan make without a call, as names and versions.

    Attributes:
        same: for each view that is an earlier value once more, that value.
        unread: those that only such views read, or nobody.
        flat: sums that only such a view reads, which drops the dimensions that ``keepdim`` keeps: the sum is made
            without these.
    """

    same: Mapping[_Value, _Value]
    unread: Collection[_Value]
    flat: Collection[_Value]


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
    given, handed = set(net.external_inputs), set(kept)
    same: dict[_Value, _Value] = {}
    before: dict[_Value, list[_Value]] = {}
    sums: dict[_Value, Operator] = {}
    readers = Counter([read for instruction in instructions for read in net.ops[instruction.op].reads])
    for instruction in instructions:
        op, here = net.ops[instruction.op], thread[instruction.lane]
        if op.type == _SUM and not apart and op.args.get("keepdim") is True:
            sums.update(dict.fromkeys(op.makes, op))
        if apart:
            maker.update(dict.fromkeys(op.makes, here))
        if not op.effects.views or not _is_view(op):
            continue
        viewed.update(op.outputs)
        (made, *others), (read,) = op.makes, op.reads
        alone = read in sums and not others and readers[read] == 1 and read[0] not in kept
        if alone and made not in shared and _drops(blobs[made[0]], blobs[read[0]], sums[read]):
            same[made] = read
        if op.type not in _PERMUTING:
            continue
        before[made] = [*before.get(read, ()), read]
        geometry = _geometry(blobs[made[0]])
        made_here = (value for value in before[made] if maker.get(value, here) == here)
        earlier = next((value for value in made_here if _geometry(blobs[value[0]]) == geometry), None)
        if earlier is None or made in shared:
            continue
        first = same.get(earlier, earlier)
        # A tensor that a caller gets is neither an input, nor state, nor handed out under another name, too.
        if made[0] not in kept or (first[0] not in given and first[0] not in handed):
            same[made] = first
            handed.update({first[0]} if made[0] in kept else ())
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
    return Uncalled(same, unread, {read for read in same.values() if read in sums})


def _drops(view: Blob, kept: Blob, op: Operator) -> bool:
    """Whether a view of a sum has the one dimension that is not summed, and nothing else."""
    dims, shape = op.args.get("dim"), kept.shape
    if shape is None or not isinstance(dims, tuple) or not all(isinstance(dim, int) for dim in dims):
        return False
    left = [size for i, size in enumerate(shape) if i not in dims and i - len(shape) not in dims]
    return len(left) == 1 and view.shape == tuple(left) and view.dtype == kept.dtype


def _geometry(blob: Blob) -> tuple[object, ...]:
    return blob.shape, blob.dtype, blob.strides, blob.offset


def _is_view(op: Operator) -> bool:
    """Whether all that an operator makes are views."""
    return len(op.effects.views) == len(op.outputs) > 0 and not op.effects.writes and len(op.inputs) == 1
