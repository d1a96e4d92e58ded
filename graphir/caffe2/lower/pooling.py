"""Pooling of images. Sources: ``pool_op.h``, ``pool_op.cc``, ``pool_gradient_op.cc`` of ``caffe2/operators``.

Where several elements of a window are its maximum, the gradient goes to the first of them, as on a GPU; Caffe2's CPU
kernel gives it to each.
"""

from __future__ import annotations

from math import inf, prod

from ...ir.operator import Arg
from .builder import LoweredValue
from .order import Images
from .registry import Lowering, refuse, translates
from .windows import Windows, padded, unpadded, windows

__all__ = ()


def _image(c: Lowering) -> tuple[Images, LoweredValue, Windows]:
    images = Images(c)
    x = images[0]
    if len(x.shape) != 4:
        raise refuse(f"{c[0].geometry} is no batch of images with two dimensions")
    w = windows(c, x.shape[2:])
    if any(n != 1 for n in w.dilation):
        raise refuse("poolings have no dilation")
    return images, x, w


def _args(w: Windows) -> dict[str, Arg]:
    return {"kernel_size": w.kernel, "stride": w.stride, "padding": w.head, "ceil_mode": w.ceil}


def _direct(w: Windows) -> bool:
    """Whether torch's pooling takes the padding: as much on each side, and at most half of the kernel."""
    return w.symmetric and all(2 * pad <= size for pad, size in zip(w.head, w.kernel, strict=True))


def _maxima(images: Images, x: LoweredValue, w: Windows, out: int | None) -> LoweredValue:
    """Max pooling; its indices."""
    return images.emit("aten.max_pool2d_with_indices.default", [x], _args(w), [out])[1]


def _noted(images: Images, w: Windows) -> tuple[object, ...]:
    """Under what the indices of a pooling are handed on."""
    return "MaxPool", images.c[0], images.last, w


@translates("MaxPool")
def _max_pool(c: Lowering) -> None:
    images, x, w = _image(c)
    if _direct(w):
        key = _noted(images, w)
        c.builder.notes[key] = _maxima(images, x, w, 0)
    else:
        _maxima(images, padded(c, x, w, -inf), w.unpadded(), 0)


@translates("MaxPoolGradient")
def _max_pool_gradient(c: Lowering) -> None:
    """From the input, the output and its gradient. The forward operator's indices are used, if they are at hand."""
    images, x, w = _image(c)
    direct = _direct(w)
    image, inner = (x, w) if direct else (padded(c, x, w, -inf), w.unpadded())
    indices = c.builder.notes.get(_noted(images, w)) or _maxima(images, image, inner, None)
    args: dict[str, Arg] = {**_args(inner), "dilation": (1, 1)}
    operands = [images[2], image, indices]
    if direct:
        images.one("aten.max_pool2d_with_indices_backward.default", operands, args, 0)
    else:
        unpadded(images, images.one("aten.max_pool2d_with_indices_backward.default", operands, args), w, 0)


def _average(c: Lowering, w: Windows) -> tuple[dict[str, Arg], bool]:
    """The arguments of an average pooling, and whether the input is padded first."""
    counted = bool(c.integer("count_include_pad"))
    if not _direct(w) and not counted:
        raise refuse(
            f"padding {list(w.head)} and {list(w.tail)} that doesn't count is not translated",
            "pad as much on each side, and at most half of the kernel; or set count_include_pad",
        )
    inner = w if _direct(w) else w.unpadded()
    args: dict[str, Arg] = {**_args(inner), "count_include_pad": counted, "divisor_override": None}
    if counted and w.ceil:
        args["divisor_override"] = prod(w.kernel)  # torch counts no more than the padded image of the last windows
    return args, not _direct(w)


@translates("AveragePool")
def _average_pool(c: Lowering) -> None:
    images, x, w = _image(c)
    args, pad = _average(c, w)
    images.one("aten.avg_pool2d.default", [padded(c, x, w, 0.0) if pad else x], args, 0)


@translates("AveragePoolGradient")
def _average_pool_gradient(c: Lowering) -> None:
    images, x, w = _image(c)
    args, pad = _average(c, w)
    if pad:
        operands = [images[2], padded(c, x, w, 0.0)]
        unpadded(images, images.one("aten.avg_pool2d_backward.default", operands, args), w, 0)
    else:
        images.one("aten.avg_pool2d_backward.default", [images[2], x], args, 0)
