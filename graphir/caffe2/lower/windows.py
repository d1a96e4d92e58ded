"""The window arguments that convolutions and poolings share.

Source: ``caffe2/operators/conv_pool_op_base.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from .builder import LoweredValue
from .order import Images
from .registry import Lowering, refuse

__all__ = ["VALID_OR_SAME", "Windows", "each", "padded", "unpadded", "windows"]

_VALID: Final = 1
_SAME: Final = 2
_CAFFE_POOLING: Final = 3

VALID_OR_SAME: Final = (_VALID, _SAME)
"""Values of ``legacy_pad`` by which the padding follows from sizes."""


class Windows(NamedTuple):
    """How windows lie on an image; a number for each of its dimensions.

    Attributes:
        kernel, stride, dilation: of the windows.
        head, tail: rows of padding before and after.
        ceil: a window that begins inside counts even if it doesn't end there (Caffe's pooling).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    head: tuple[int, ...]
    tail: tuple[int, ...]
    ceil: bool

    @property
    def symmetric(self) -> bool:
        """Whether as much padding is before as after."""
        return self.head == self.tail

    def unpadded(self) -> Windows:
        """The same windows on an image that is padded already."""
        none = (0,) * len(self.kernel)
        return self._replace(head=none, tail=none)


def windows(c: Lowering, image: Sequence[int]) -> Windows:
    """The windows of a convolution or a pooling on an image of these sizes, without batch and channels.

    Raises:
        GraphirError: the arguments make no sense.
    """
    rank = len(image)
    if c.integer("global_pooling"):
        ones, none = (1,) * rank, (0,) * rank
        return Windows(tuple(image), ones, ones, none, none, False)
    kernel = each(c, "kernel", rank, None)
    if kernel is None or not all(n > 0 for n in kernel):
        raise refuse("a positive kernel size is needed")
    stride, dilation = each(c, "stride", rank, 1), each(c, "dilation", rank, 1)
    assert stride is not None and dilation is not None
    if not all(n > 0 for n in stride + dilation):
        raise refuse(f"stride {list(stride)} and dilation {list(dilation)} are not all positive")
    legacy = c.integer("legacy_pad")
    if legacy == _SAME:
        head, tail = _same(image, kernel, stride)
    elif legacy == _VALID:
        head = tail = (0,) * rank
    else:
        head, tail = _pads(c, rank)
    return Windows(kernel, stride, dilation, head, tail, legacy == _CAFFE_POOLING)


def each(c: Lowering, name: str, rank: int, default: int | None) -> tuple[int, ...] | None:
    """``kernels``, or ``kernel``, or ``kernel_h`` and ``kernel_w``."""
    found = c.integers(name + "s")
    if name in c.op.args:
        found = (c.integer(name),) * rank
    elif f"{name}_h" in c.op.args and f"{name}_w" in c.op.args:
        found = (c.integer(f"{name}_h"), c.integer(f"{name}_w"))
    if found is None:
        return None if default is None else (default,) * rank
    if len(found) != rank:
        raise refuse(f"{name} has {len(found)} sizes for an image of {rank} dimensions")
    return found


def _pads(c: Lowering, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = c.integers("pads")
    if "pad" in c.op.args:
        found = (c.integer("pad"),) * (2 * rank)
    elif all(f"pad_{side}" in c.op.args for side in "tlbr"):
        found = tuple([c.integer(f"pad_{side}") for side in "tlbr"])
    if found is None:
        found = (0,) * (2 * rank)
    if len(found) != 2 * rank:
        raise refuse(f"{len(found)} paddings for an image of {rank} dimensions")
    return found[:rank], found[rank:]


def _same(
    image: Sequence[int], kernel: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Padding such that there are ``ceil(size / stride)`` windows, the odd row after the image."""
    needed = [
        max(0, (-(-size // step) - 1) * step + width - size)
        for size, width, step in zip(image, kernel, stride, strict=True)
    ]
    return tuple([n // 2 for n in needed]), tuple([n - n // 2 for n in needed])


def padded(c: Lowering, x: LoweredValue, w: Windows, fill: float) -> LoweredValue:
    """*x*, which has channels first, with its padding."""
    return c.one("aten.constant_pad_nd.default", [x], {"pad": _pairs(w, 1), "value": fill})


def unpadded(images: Images, x: LoweredValue, w: Windows, out: int) -> None:
    """*x* without it, as an output."""
    images.one("aten.constant_pad_nd.default", [x], {"pad": _pairs(w, -1)}, out)


def _pairs(w: Windows, sign: int) -> tuple[int, ...]:
    """Before and after each dimension, the last one first."""
    sides = zip(reversed(w.head), reversed(w.tail), strict=True)
    return tuple([sign * n for pair in sides for n in pair])
