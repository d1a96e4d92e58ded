"""Normalisation over batches and over channels, and dropout.

Sources: ``spatial_batch_norm_op.h`` (as of 2019, when running variances became unbiased),
``local_response_normalization_op.cc`` and ``dropout_op.cc`` of ``caffe2/operators``.
"""

from __future__ import annotations

from math import prod

from ...ir.operator import Arg
from .builder import LoweredValue
from .order import Images
from .registry import Lowering, refuse, translates

__all__ = ()


def _one_batch(c: Lowering) -> None:
    if c.integer("num_batches", 1) != 1:
        raise refuse("statistics of several batches (num_batches) are not translated")


@translates("SpatialBN")
def _batch_norm(c: Lowering) -> None:
    """Output, running mean and variance, saved mean and inverse standard deviation; in a test the output alone.

    Caffe2's momentum weighs the old running statistics, torch's the new ones.
    """
    _one_batch(c)
    images = Images(c)
    training = not c.integer("is_test")
    args: dict[str, Arg] = {"training": training, "momentum": 1.0 - c.number("momentum", 0.9)}
    args["eps"] = c.number("epsilon", 1e-5)
    if not training:
        operands = [images[0], *[c[i] for i in range(1, 5)]]
        images.emit("aten.native_batch_norm.default", operands, args, [0], results="t__")
        return
    x = images[0]
    if prod(x.shape[:1] + x.shape[2:]) < 2:
        raise refuse(f"{c[0].geometry} has no two values in a channel, and so no variance")
    operands = [x, c[1], c[2], c.updated(3, 1), c.updated(4, 2)]
    values = images.emit("aten.native_batch_norm.default", operands, args, [0, 3, 4])
    c.bind(1, values[3])
    c.bind(2, values[4])


@translates("SpatialBNGradient")
def _batch_norm_gradient(c: Lowering) -> None:
    """Of the input, the scale and the bias, from input, scale, gradient, saved mean and inverse standard deviation."""
    _one_batch(c)
    images = Images(c)
    args: dict[str, Arg] = {"train": True, "eps": c.number("epsilon", 1e-5), "output_mask": (True, True, True)}
    operands = [images[2], images[0], c[1], None, None, c[3], c[4]]
    images.emit("aten.native_batch_norm_backward.default", operands, args, [0, 1, 2])


@translates("LRN")
def _response_norm(c: Lowering) -> None:
    """``y = x s^-beta`` with ``s = bias + alpha / size`` times the sum of x² over so many channels around each; s is
    output 1, where it is wanted."""
    x = c[0]
    scale = _scales(c, x, 1 if len(c.op.outputs) > 1 else None)
    c.one("aten.mul.Tensor", [_powers(c, scale), x], {}, 0)


@translates("LRNGradient")
def _response_norm_gradient(c: Lowering) -> None:
    """From input, output and its gradient: ``dy s^-beta - 2 alpha beta / size x`` times the sum of ``dy y / s``."""
    x, y, grad = c.alike(0, 1, 2), c[1], c[2]
    scale = _scales(c, x, None)
    ratio = c.one("aten.div.Tensor", [c.one("aten.mul.Tensor", [grad, y]), scale])
    factor = 2.0 * c.number("alpha") * c.number("beta") / c.integer("size")
    sums = c.one("aten.mul.Scalar", [_around(c, ratio)], {"other": factor})
    direct = c.one("aten.mul.Tensor", [grad, _powers(c, scale)])
    c.one("aten.sub.Tensor", [direct, c.one("aten.mul.Tensor", [sums, x])], {}, 0)


def _scales(c: Lowering, x: LoweredValue, out: int | None) -> LoweredValue:
    factor = c.number("alpha") / max(c.integer("size"), 1)
    sums = c.one("aten.mul.Scalar", [_around(c, c.one("aten.mul.Tensor", [x, x]))], {"other": factor})
    return c.one("aten.add.Scalar", [sums], {"other": c.number("bias", 1.0)}, out)


def _powers(c: Lowering, scale: LoweredValue) -> LoweredValue:
    return c.one("aten.pow.Tensor_Scalar", [scale], {"exponent": -c.number("beta")})


def _around(c: Lowering, values: LoweredValue) -> LoweredValue:
    """The sums over the channels around each: an average pooling of rows or columns whose divisor is 1."""
    size, last = c.integer("size"), Images(c).last
    if size < 1 or size % 2 == 0:
        raise refuse(f"argument 'size' is {size}", "an odd number of channels is summed")
    if len(values.shape) != 4:
        raise refuse(f"{values.geometry} is no batch of images with two dimensions")
    batch, one, two, three = values.shape
    flat = (batch, 1, one * two, three) if last else (batch, 1, one, two * three)
    kernel, padding = (size, 1), (size // 2, 0)
    args: dict[str, Arg] = {
        "kernel_size": kernel[::-1] if last else kernel,
        "stride": (1, 1),
        "padding": padding[::-1] if last else padding,
        "divisor_override": 1,
    }
    sums = c.one("aten.avg_pool2d.default", [c.reshaped(values, flat)], args)
    return c.reshaped(sums, values.shape)


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
