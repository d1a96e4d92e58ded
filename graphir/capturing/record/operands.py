"""Operands of one call that share memory with an operand that the call overwrites."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ...errors import CaptureError
from ...ir.blob import overlaps
from ...ir.geometry import Geometry
from .values import Alias

__all__ = ["have_common_bytes", "refuse_overlapping_operands"]

_MOST_DISTANCES: Final = 4096
"""Most distances to follow; beyond, windows are taken to share a byte. Views of dense tensors have a few distances."""


def refuse_overlapping_operands(operator: str, aliases: Sequence[Alias], written: Collection[int], where: str) -> None:
    """Refuse a call that overwrites a part of another operand, or one element twice.

    A kernel may read there what it has just written.

    Args:
        operator: the type of the call's operator.
        aliases: the operands.
        written: positions of the overwritten operands.
        where: the place of the call.

    Raises:
        CaptureError: another view shares some bytes with an overwritten operand, or two elements of an overwritten
            operand have one address.
    """
    for i in written:
        target = aliases[i]
        if overlaps(target.geometry.shape, target.geometry.strides):
            raise CaptureError(
                f"{operator} overwrites {_window(target.geometry)}, several elements of which share one address: "
                "the kernel writes to this address more than once",
                where=where,
                fix="write to the base tensor of the view, or to a clone() of the view",
            )
        for j, other in enumerate(aliases):
            if j == i or other.store is not target.store or _elements(target.geometry) == _elements(other.geometry):
                continue
            if have_common_bytes(target.geometry, other.geometry):
                raise CaptureError(
                    f"{operator} overwrites {_window(target.geometry)}, and another operand, "
                    f"{_window(other.geometry)}, overlaps this view in memory: "
                    "the kernel may read elements that it has just written",
                    where=where,
                    fix="clone() the operand that is read, such as y[:, 1:].add_(y[:, :-1].clone())",
                )


def have_common_bytes(a: Geometry, b: Geometry) -> bool:
    """Whether two windows on one memory share a byte; also true if the answer would take too long.

    They do if steps along their dimensions can bridge the distance between their beginnings::

        b.offset - a.offset = sum of steps of a - sum of steps of b

    The largest steps are tried first. A remaining distance is followed only if the smaller steps can bridge it.
    """
    if 0 in a.shape or 0 in b.shape:
        return False
    furthest: dict[int, tuple[int, int]] = {1: (1 - b.dtype.itemsize, a.dtype.itemsize - 1)}
    for window, sign in ((a, 1), (b, -1)):
        for step, size in _elements(window)[2]:
            if step == 0:
                continue
            low, high = furthest.get(step, (0, 0))
            furthest[step] = (low, high + size - 1) if sign > 0 else (low - size + 1, high)
    least = sum(step * low for step, (low, _) in furthest.items())
    most = sum(step * high for step, (_, high) in furthest.items())
    distances = {b.offset * b.dtype.itemsize - a.offset * a.dtype.itemsize}
    for step in sorted(furthest, reverse=True):
        low, high = furthest[step]
        least, most = least - step * low, most - step * high
        left: set[int] = set()
        for distance in distances:
            first, last = max(low, -((most - distance) // step)), min(high, (distance - least) // step)
            if len(left) + last - first > _MOST_DISTANCES:
                return True
            left.update(distance - step * count for count in range(first, last + 1))
        distances = left
    return bool(distances)


def _elements(window: Geometry) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """The offset and element size of a window, in bytes; and for each dimension the step, in bytes, and the size."""
    width = window.dtype.itemsize
    dims = zip(window.strides, window.shape, strict=True)
    return window.offset * width, width, tuple([(stride * width, size) for stride, size in dims if size != 1])


def _window(geometry: Geometry) -> str:
    shape, strides, offset, *_ = geometry
    return f"a view of shape {list(shape)}, strides {list(strides)}, offset {offset}"
