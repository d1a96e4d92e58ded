"""Batch normalisation and dropout.

Sources: ``spatial_batch_norm_op.h`` (as of 2019, when running variances became unbiased) and ``dropout_op.cc`` of
``caffe2/operators``.
"""

from __future__ import annotations

from math import prod

from ...ir.operator import Arg
from .registry import Lowering, refuse, translates

__all__ = ()


def _check(c: Lowering) -> None:
    if c.text("order", "NCHW") != "NCHW":
        raise refuse(f"order is {c.text('order')!r}", "only NCHW is translated")
    if c.integer("num_batches", 1) != 1:
        raise refuse("statistics of several batches (num_batches) are not translated")


@translates("SpatialBN")
def _batch_norm(c: Lowering) -> None:
    """Output, running mean and variance, saved mean and inverse standard deviation; in a test the output alone.

    Caffe2's momentum weighs the old running statistics, torch's the new ones.
    """
    _check(c)
    training = not c.integer("is_test")
    args: dict[str, Arg] = {"training": training, "momentum": 1.0 - c.number("momentum", 0.9)}
    args["eps"] = c.number("epsilon", 1e-5)
    if not training:
        operands = [c[i] for i in range(5)]
        c.emit("aten.native_batch_norm.default", operands, args, [0], results="t__")
        return
    shape = c[0].shape
    if prod(shape[:1] + shape[2:]) < 2:
        raise refuse(f"{c[0].geometry} has no two values in a channel, and so no variance")
    operands = [c[0], c[1], c[2], c.updated(3, 1), c.updated(4, 2)]
    values = c.emit("aten.native_batch_norm.default", operands, args, [0, 3, 4])
    c.bind(1, values[3])
    c.bind(2, values[4])


@translates("SpatialBNGradient")
def _batch_norm_gradient(c: Lowering) -> None:
    """Of the input, the scale and the bias, from input, scale, gradient, saved mean and inverse standard deviation."""
    _check(c)
    args: dict[str, Arg] = {"train": True, "eps": c.number("epsilon", 1e-5), "output_mask": (True, True, True)}
    operands = [c[2], c[0], c[1], None, None, c[3], c[4]]
    c.emit("aten.native_batch_norm_backward.default", operands, args, [0, 1, 2])


def _ratio(c: Lowering) -> float:
    """The share of elements that are dropped."""
    ratio = c.number("ratio", 0.5)
    if not 0 <= ratio < 1:
        raise refuse(f"argument 'ratio' is {ratio}", "it is at least 0 and less than 1")
    return ratio


@translates("Dropout")
def _dropout(c: Lowering) -> None:
    """The output and, in training, which elements were kept."""
    x = c[0]
    if c.integer("is_test"):
        if c.op.inputs[0] != c.output(0):
            c.one("aten.clone.default", [x], {}, 0)
        return
    ratio = _ratio(c)
    kept = c.one("aten.bernoulli.p", [x], {"p": 1.0 - ratio})
    mask = c.one("aten.gt.Scalar", [kept], {"other": 0}, 1)
    scaled = c.one("aten.mul.Scalar", [x], {"other": 1.0 / (1.0 - ratio)})
    c.one("aten.mul.Tensor", [scaled, mask], {}, 0)


@translates("DropoutGrad")
def _dropout_gradient(c: Lowering) -> None:
    if c.integer("is_test"):
        if c.op.inputs[0] != c.output(0):
            c.one("aten.clone.default", [c[0]], {}, 0)
        return
    c.alike(0, 1, dtype=False)
    masked = c.one("aten.mul.Tensor", [c[0], c[1]])
    c.one("aten.mul.Scalar", [masked], {"other": 1.0 / (1.0 - _ratio(c))}, 0)
