"""Operators that arrange elements anew.

Sources: ``concat_split_op.h``, ``flatten_op.h``, ``gather_op.h``, ``batch_gather_ops.h``, ``utility_ops.h`` of
``caffe2/operators``. Caffe2's tensors never share memory, so that these copy.
"""

from __future__ import annotations

from math import prod

import torch

from ...ir.operator import Arg
from .builder import LoweredValue, Static
from .registry import Lowering, refuse, translates

__all__ = ()


def _axis(c: Lowering, rank: int) -> int:
    """The axis argument, or the channels' place."""
    if "axis" in c.op.args:
        return c.axis(c.integer("axis", -1), rank)
    return c.axis(3 if c.text("order") == "NHWC" else 1, rank)


def _adds_axis(c: Lowering) -> bool:
    """Whether there is a new dimension: only where ``axis`` says which one."""
    return "axis" in c.op.args and bool(c.integer("add_axis"))


@translates("Concat")
def _concat(c: Lowering) -> None:
    values = [c[i] for i in range(c.count)]
    if _adds_axis(c):
        axis = c.axis(c.integer("axis", -1), len(values[0].shape) + 1)
        sizes = [1] * len(values)
        c.one("aten.stack.default", [values], {"dim": axis}, 0)
    else:
        axis = _axis(c, len(values[0].shape))
        sizes = [value.shape[axis] for value in values]
        c.one("aten.cat.default", [values], {"dim": axis}, 0)
    if len(c.op.outputs) > 1:
        c.bind(1, Static(torch.tensor(sizes, dtype=torch.int32, device="cpu")))


@translates("Split")
def _split(c: Lowering) -> None:
    x, parts = c[0], len(c.op.outputs)
    axis = _axis(c, len(x.shape))
    sizes = c.integers("split")
    if c.count > 1:
        sizes = c.static(1)
        if sizes is None:
            raise refuse(f"the sizes are the value of {c.op.inputs[1]!r}, which is not known before the step runs")
    if sizes is None:
        if x.shape[axis] % parts:
            raise refuse(f"{x.shape[axis]} rows cannot be split into {parts} equal parts")
        sizes = (x.shape[axis] // parts,) * parts
    if len(sizes) != parts or sum(sizes) != x.shape[axis]:
        raise refuse(f"sizes {list(sizes)} do not split {x.shape[axis]} rows into {parts}")
    pattern = f"[{'t' * parts}]"
    if _adds_axis(c):
        c.emit("aten.unbind_copy.int", [x], {"dim": axis}, range(parts), results=pattern)
    else:
        args: dict[str, Arg] = {"split_sizes": sizes, "dim": axis}
        c.emit("aten.split_with_sizes_copy.default", [x], args, range(parts), results=pattern)


@translates("Flatten")
def _flatten(c: Lowering) -> None:
    x = c[0]
    axis = c.axis(c.integer("axis", 1), len(x.shape), end=True)
    c.reshaped(x, (prod(x.shape[:axis]), prod(x.shape[axis:])), 0)


@translates("ResizeLike")
def _resize_like(c: Lowering) -> None:
    c.reshaped(c[0], c[1].shape, 0)


@translates("StopGradient")
def _stop_gradient(c: Lowering) -> None:
    if c.op.inputs[0] != c.output(0):
        c.one("aten.clone.default", [c[0]], {}, 0)


@translates("Gather")
def _gather(c: Lowering) -> None:
    data, index = c[0], c[1]
    axis = c.axis(c.integer("axis"), len(data.shape))
    _select(c, axis, data.shape[:axis] + index.shape + data.shape[axis + 1 :])


@translates("BatchGather")
def _batch_gather(c: Lowering) -> None:
    data, index = c[0], c[1]
    _select(c, 1, (data.shape[0], *index.shape, *data.shape[2:]))


def _index(c: Lowering) -> LoweredValue:
    c.counts(1)
    return c[1]


def _select(c: Lowering, axis: int, shape: tuple[int, ...]) -> None:
    index = c.reshaped(_index(c), (prod(c[1].shape),))
    if len(c[1].shape) == 1:
        c.one("aten.index_select.default", [c[0], index], {"dim": axis}, 0)
    else:
        c.reshaped(c.one("aten.index_select.default", [c[0], index], {"dim": axis}), shape, 0)


@translates("BatchGatherGradient")
def _batch_gather_gradient(c: Lowering) -> None:
    """From the data (for its shape), the indices and the gradient."""
    data, index, grad = c.floating(0), c.reshaped(_index(c), (prod(c[1].shape),)), c.floating(2)
    grad = c.reshaped(grad, (data.shape[0], index.shape[0], *data.shape[2:]))
    zeros = c.full(data.shape, 0.0)
    c.one("aten.index_add.default", [zeros, index, grad], {"dim": 1}, 0)
