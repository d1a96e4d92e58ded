"""Convolution. Sources: ``conv_op.h``, ``conv_op_impl.h`` of ``caffe2/operators``."""

from __future__ import annotations

from ...ir.operator import Arg
from .registry import Lowering, translates
from .windows import Windows, padded, unpadded, windows

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
    x = c[0]
    w = windows(c, x.shape[2:])
    if not w.symmetric:
        x, w = padded(c, x, w, 0.0), w.unpadded()
    c.one("aten.convolution.default", [x, c[1], c[2] if c.count > 2 else None], _args(c, w), 0)


@translates("ConvGradient")
def _conv_gradient(c: Lowering) -> None:
    """Of the filter, of the bias unless ``no_bias`` is set, and where it is wanted of the input."""
    x, weight, grad = c[0], c[1], c[2]
    w = windows(c, x.shape[2:])
    bias = not c.integer("no_bias")
    position = 1 + bias
    wanted = len(c.op.outputs) > position
    whole = w
    if not w.symmetric:
        x, w = padded(c, x, w, 0.0), w.unpadded()
    args: dict[str, Arg] = {**_args(c, w), "bias_sizes": (weight.shape[0],) if bias else None}
    args["output_mask"] = (wanted, True, bias)
    crop = wanted and not whole.symmetric
    out = [*[None if crop else position] * wanted, 0, *[1] * bias]
    results = ("t" if wanted else "_") + "t" + ("t" if bias else "_")
    values = c.emit("aten.convolution_backward.default", [grad, x, weight], args, out, results=results)
    if crop:
        unpadded(c, values[0], whole, position)
