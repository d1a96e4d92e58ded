"""Parts: a value that several blobs hold together.

::

    emb.weight : f32[10,4]   dim 0:   gpu_0/emb.rows_0.weight : f32[5,4] @gpu:0
                                      gpu_1/emb.rows_1.weight : f32[5,4] @gpu:1

Callers give and get the whole value under its own name. Each part is loaded from its place in the whole value, and the
parts are joined again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

__all__ = ["Parts", "starts", "whole_shape"]


class Parts(NamedTuple):
    """The blobs that together hold a value.

    Attributes:
        dim: the dimension along which the blobs, in their order, make up the value. None: each blob holds the whole
            value, such as the optimizer's count of steps for each part of a table.
        blobs: without prefix.
    """

    dim: int | None
    blobs: tuple[str, ...]


def whole_shape(dim: int | None, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of the value that parts of these shapes make up along a dimension."""
    first = shapes[0]
    return first if dim is None else (*first[:dim], sum(shape[dim] for shape in shapes), *first[dim + 1 :])


def starts(dim: int | None, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where in the whole value each part begins along the dimension."""
    lengths = [0 if dim is None else shape[dim] for shape in shapes[:-1]]
    return list(accumulate(lengths, initial=0))
