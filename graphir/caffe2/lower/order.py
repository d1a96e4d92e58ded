"""Images whose channels come last, as ``order="NHWC"`` says. Source: ``order_switch_ops.h`` of ``caffe2/operators``.

Torch's operators have channels first in shapes, in memory anywhere. So what an operator reads is a view that moves no
bytes, and what it returns is copied, since Caffe2's tensors are contiguous::

    x [N, H, W, C] ──permute──▶ [N, C, H, W] ──operator──▶ [N, M, H', W'] ──permute_copy──▶ y [N, H', W', M]

Filters are turned the same way: ``[M, kernel…, C]`` is torch's ``[M, C, kernel…]``. Convolutions read copies: by which
kernel torch convolves, and how its result lies in memory, follows from layouts, sizes and the machine. From copies
they give the bits that the same convolution gives of images with channels first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ...ir.operator import Arg
from .builder import LoweredValue, Operand
from .registry import Lowering, refuse, translates

__all__ = ["Images"]


class Images:
    """The images of one operator, with channels first whatever its order.

    Args:
        c: the operator's lowering.

    Attributes:
        last: whether the operator has channels last.

    Raises:
        GraphirError: its order is none.
    """

    def __init__(self, c: Lowering) -> None:
        order = c.text("order", "NCHW")
        if order not in ("NCHW", "NHWC"):
            raise refuse(f"order is {order!r}", "write NCHW or NHWC")
        self.c, self.last = c, order == "NHWC"

    def __getitem__(self, position: int) -> LoweredValue:
        """The image or filter at an input."""
        value = self.c[position]
        return _viewed(self.c, value, _first(len(value.shape))) if self.last else value

    def dense(self, position: int) -> LoweredValue:
        """The image or filter at an input, with channels first in memory too."""
        value = self.c[position]
        if not self.last:
            return value
        device = self.c.builder.device(value)
        return self.c.one("aten.permute_copy.default", [value], {"dims": _first(len(value.shape))}, device=device)

    def emit(
        self,
        type: str,
        operands: Sequence[Operand],
        args: Mapping[str, Arg],
        out: Sequence[int | None],
        images: Collection[int] = (0,),
        results: str | None = None,
    ) -> list[LoweredValue]:
        """Append a torch operator.

        Args:
            type, operands, args, out, results: as :meth:`Lowering.emit` takes them.
            images: which of the returned tensors are images or filters.
        """
        turned = images if self.last else ()
        direct = [None if i in turned else target for i, target in enumerate(out)]
        values = self.c.emit(type, operands, args, direct, results=results)
        for i in turned:
            target = out[i] if i < len(out) else None
            if target is not None:
                self.hand_back(values[i], target)
        return values

    def one(
        self, type: str, operands: Sequence[Operand], args: Mapping[str, Arg], out: int | None = None
    ) -> LoweredValue:
        """Append a torch operator that returns one image."""
        return self.emit(type, operands, args, [out])[0]

    def hand_back(self, value: LoweredValue, out: int) -> None:
        """Let an image that has channels first become an output with channels last."""
        self.c.one("aten.permute_copy.default", [value], {"dims": _last(len(value.shape))}, out)


def _first(rank: int) -> tuple[int, ...]:
    """The dimensions, channels first, of what has them last; one or two are the same both ways."""
    return (0, rank - 1, *range(1, rank - 1)) if rank > 2 else tuple(range(rank))


def _last(rank: int) -> tuple[int, ...]:
    return (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))


def _viewed(c: Lowering, value: LoweredValue, dims: tuple[int, ...]) -> LoweredValue:
    if dims == tuple(range(len(dims))):
        return value
    return c.one("aten.permute.default", [value], {"dims": dims}, device=c.builder.device(value))


@translates("NCHW2NHWC")
def _to_last(c: Lowering) -> None:
    c.one("aten.permute_copy.default", [c[0]], {"dims": _last(len(c[0].shape))}, 0)


@translates("NHWC2NCHW")
def _to_first(c: Lowering) -> None:
    c.one("aten.permute_copy.default", [c[0]], {"dims": _first(len(c[0].shape))}, 0)
