"""Convolution and its transpose.

Sources: ``conv_op.h``, ``conv_op_impl.h``, ``conv_transpose_op_impl.h``, ``conv_transpose_unpool_op_base.h`` of
``caffe2/operators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...ir.operator import Arg
from .builder import LoweredValue
from .order import Images
from .registry import Lowering, refuse, translates
from .windows import VALID_OR_SAME, Windows, each, padded, unpadded, windows

__all__ = ()


def _args(c: Lowering, w: Windows) -> dict[str, Arg]:
    return {
        "stride": w.stride,
        "padding": w.head,
        "dilation": w.dilation,
        "transposed": False,
        "output_padding": (0,) * len(w.kernel),
        "groups": c.integer("group", 1),
    }


@translates("Conv")
def _conv(c: Lowering) -> None:
    images = Images(c)
    x = images.dense(0)
    w = windows(c, x.shape[2:])
    if not w.symmetric:
        x, w = padded(c, x, w, 0.0), w.unpadded()
    operands = [x, images.dense(1), c[2] if c.count > 2 else None]
    images.one("aten.convolution.default", operands, _args(c, w), 0)


@translates("ConvGradient")
def _conv_gradient(c: Lowering) -> None:
    images = Images(c)
    x, weight, grad = [images.dense(i) for i in range(3)]
    w = windows(c, x.shape[2:])
    if w.symmetric:
        _backward(images, grad, x, weight, _args(c, w), weight.shape[0])
    else:
        _backward(images, grad, padded(c, x, w, 0.0), weight, _args(c, w.unpadded()), weight.shape[0], w)


def _backward(
    images: Images,
    grad: LoweredValue,
    x: LoweredValue,
    weight: LoweredValue,
    args: Mapping[str, Arg],
    channels: int,
    cut: Windows | None = None,
) -> None:
    """The gradients of the filter, of the bias unless ``no_bias`` is set, and where it is wanted of the input.

    Args:
        images: of the operator.
        grad, x, weight, args: what torch's convolution has.
        channels: of the output.
        cut: the windows whose padding the input has, and its gradient has not.
    """
    c = images.c
    bias = not c.integer("no_bias")
    position = 1 + bias
    wanted = len(c.op.outputs) > position
    out = [*[None if cut else position] * wanted, 0, *[1] * bias]
    args = {**args, "bias_sizes": (channels,) if bias else None, "output_mask": (wanted, True, bias)}
    results = ("t" if wanted else "_") + "t" + ("t" if bias else "_")
    operands = [grad, x, weight]
    values = images.emit("aten.convolution_backward.default", operands, args, out, range(1 + wanted), results)
    if wanted and cut:
        unpadded(images, values[0], cut, position)


_NEITHER: Final = "adj is at least 0 and less than the stride"


def _transposed(c: Lowering, rank: int) -> tuple[dict[str, Arg], Windows]:
    """The arguments of a transposed convolution that is not padded, and the windows whose padding is cut off it."""
    legacy, ones = c.integer("legacy_pad"), (1,) * rank
    w = windows(c, ones)._replace(dilation=ones)
    if legacy in VALID_OR_SAME:
        w = w.unpadded()
    elif legacy:
        raise refuse(f"argument 'legacy_pad' is {legacy}", "a transposed convolution takes 0, 1 or 2")
    longer = each(c, "adj", rank, 0)
    assert longer is not None
    if not all(0 <= a < step for a, step in zip(longer, w.stride, strict=True)):
        raise refuse(f"adj is {list(longer)}, the stride {list(w.stride)}", _NEITHER)
    return {**_args(c, w.unpadded()), "transposed": True, "output_padding": longer}, w


@translates("ConvTranspose")
def _conv_transpose(c: Lowering) -> None:
    """The filter is ``[input channels, output channels of a group, kernel…]``; ``(size - 1) stride + kernel + adj``
    rows come out, of which the padding is cut off."""
    images = Images(c)
    args, w = _transposed(c, len(c[0].shape) - 2)
    operands = [images.dense(0), images.dense(1), c[2] if c.count > 2 else None]
    if any(w.head + w.tail):
        unpadded(images, images.one("aten.convolution.default", operands, args), w, 0)
    else:
        images.one("aten.convolution.default", operands, args, 0)


@translates("ConvTransposeGradient")
def _conv_transpose_gradient(c: Lowering) -> None:
    images = Images(c)
    args, w = _transposed(c, len(c[0].shape) - 2)
    x, weight, grad = [images.dense(i) for i in range(3)]
    whole = padded(c, grad, w, 0.0) if any(w.head + w.tail) else grad
    _backward(images, whole, x, weight, args, grad.shape[1])
