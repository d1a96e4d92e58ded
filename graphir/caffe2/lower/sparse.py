"""Sums over segments of rows, and duplicates.

Sources: ``lengths_reducer_ops.h``, ``segment_reduction_op.h``, ``unique_ops.cc`` of ``caffe2/operators``.

``Unique`` gives as many rows as there are different indices, which is known only when it runs. Shapes here are fixed,
so its result is *padded*: the first rows are Caffe2's, in the same (ascending) order; those after them hold -1, which
names no row. ``UnsortedSegmentSum`` and ``UnsortedSegmentMean`` give such rows zeros, and updates of rows pass over
them. No other operator may read a padded blob.
"""

from __future__ import annotations

from math import prod

from ...ir.operator import Arg
from .builder import LoweredValue
from .registry import Lowering, refuse, translates

__all__ = ["indices"]


def indices(c: Lowering, position: int) -> LoweredValue:
    """The indices at an input, in a row."""
    found = c.counts(position)
    return c.reshaped(found, (prod(found.shape),))._replace(padded=found.padded)


def _lengths(c: Lowering, position: int) -> LoweredValue:
    """How many rows each segment has."""
    found = c.counts(position)
    if found.padded or len(found.shape) != 1:
        raise refuse(f"{c.op.inputs[position]!r} is {found.geometry}, not a row of lengths")
    return found


def _segments(c: Lowering, lengths: LoweredValue, total: int) -> LoweredValue:
    """The segment that each of *total* rows belongs to."""
    return c.one("aten.repeat_interleave.Tensor", [lengths], {"output_size": total})


@translates("SparseLengthsSum")
def _sparse_lengths_sum(c: Lowering) -> None:
    """From data, indices and lengths: for each length, the sum of the rows that so many of the indices name."""
    data, index, lengths = c.floating(0), indices(c, 1), _lengths(c, 2)
    rows = c.one("aten.index_select.default", [data, index], {"dim": 0})
    segments = _segments(c, lengths, index.shape[0])
    zeros = c.full((lengths.shape[0], *data.shape[1:]), 0.0)
    c.one("aten.index_add.default", [zeros, segments, rows], {"dim": 0}, 0)


@translates("SparseLengthsIndicesInGradientSumGradient")
def _sparse_lengths_sum_gradient(c: Lowering) -> None:
    """From the gradient of the sums, lengths and indices: the gradient of each row that was read."""
    segments = _segments(c, _lengths(c, 1), prod(c[2].shape))
    c.one("aten.index_select.default", [c[0], segments], {"dim": 0}, 0)


@translates("Unique")
def _unique(c: Lowering) -> None:
    """The different indices in ascending order, padded; and for each index, its place among them."""
    index = c[0]
    if len(index.shape) != 1 or not index.shape[0]:
        raise refuse(f"{c.op.inputs[0]!r} is {index.geometry}, not a row of indices")
    (count,) = index.shape
    ordered, order = c.emit("aten.sort.stable", [index], {"stable": True})
    starts = c.full((1,), 0, "i64")
    if count > 1:
        left, right = [
            c.one("aten.slice.Tensor", [ordered], {"start": i, "end": count - 1 + i, "dim": 0}) for i in (0, 1)
        ]
        differs = c.cast(c.one("aten.ne.Tensor", [right, left]), "i64")
        starts = c.one("aten.cat.default", [[starts, differs]])
    places = c.one("aten.cumsum.default", [starts], {"dim": 0})
    out = None if c.op.inputs[0] == c.output(0) else 0
    nothing = c.full((count,), -1, index.dtype)
    unique = c.one("aten.scatter.src", [nothing, places, ordered], {"dim": 0}, out)
    c.bind(0, unique._replace(padded=True))
    if len(c.op.outputs) > 1:
        zeros = c.full((count,), 0, "i32")
        remapping = c.one("aten.scatter.src", [zeros, order, c.cast(places, "i32")], {"dim": 0}, 1)
        c.bind(1, remapping._replace(remapping=True))


@translates("UnsortedSegmentSum", "UnsortedSegmentMean")
def _unsorted_segments(c: Lowering) -> None:
    """From rows and the segment of each: the sum or the mean of each segment, 0 where there is no row."""
    c.counts(1)
    data, segments, count = c[0], c[1], c.integer("num_segments", -1)
    if count < 0 and not segments.remapping:
        raise refuse(
            f"the number of segments is the largest number in {c.op.inputs[1]!r}",
            "give it an argument 'num_segments', or segments that Unique makes",
        )
    mean = c.op.type == "UnsortedSegmentMean"
    rows = segments.shape[0] if count < 0 else count
    zeros = c.full((rows, *data.shape[1:]), 0.0, data.dtype)
    found = c.one("aten.index_add.default", [zeros, segments, data], {"dim": 0}, None if mean else 0)
    if mean:
        ones, none = [c.full((n,), fill, data.dtype) for n, fill in ((segments.shape[0], 1.0), (rows, 0.0))]
        number = c.one("aten.index_add.default", [none, segments, ones], {"dim": 0})
        number = c.one("aten.clamp_min.default", [number], {"min": 1.0})
        number = c.reshaped(number, (rows,) + (1,) * len(data.shape[1:]))
        found = c.one("aten.div.Tensor", [found, number], {}, 0)
    c.bind(0, found._replace(padded=count < 0))


@translates("ScatterWeightedSum")
def _scatter_weighted_sum(c: Lowering) -> None:
    """``X0[i] = X0[i] * w0 + X1 * w1 + …`` for the rows i of X0 that the indices name, once for each time they do."""
    data, index, ones = c.updated(0, 0), *_named(c, 2)
    (count,), shape = index.shape, data.shape
    if c.count < 5 or c.count % 2 == 0:
        raise refuse(f"{c.count} inputs are not a table, its weight, indices, and pairs of rows and their weight")
    dim: dict[str, Arg] = {"dim": 0}
    times = c.one("aten.index_add.default", [c.full((shape[0],), 0.0), index, ones], dim)
    times = c.one("aten.index_select.default", [times, index], dim)
    factor = c.one("aten.pow.Tensor_Tensor", [c[1], times])
    factor = c.reshaped(factor, (count,) + (1,) * (len(shape) - 1))
    rows = c.one("aten.mul.Tensor", [c.one("aten.index_select.default", [data, index], dim), factor])
    data = c.one("aten.index_copy_.default", [data, index, rows], dim)
    for i in range(3, c.count, 2):
        update = c.one("aten.mul.Tensor", [c.reshaped(c.padded(i), (count, *shape[1:])), c.scalar(i + 1)])
        data = c.one("aten.index_add_.default", [data, index, update], dim)
    c.bind(0, data)


def _named(c: Lowering, position: int) -> tuple[LoweredValue, LoweredValue]:
    """The rows that the indices at an input name, and for each how often: once. What ``Unique`` leaves empty names row
    0 no time."""
    found = indices(c, position)
    rows = c.cast(found, "i64")
    if not found.padded:
        return rows, c.full(rows.shape, 1.0)
    present = c.one("aten.ge.Scalar", [rows], {"other": 0})
    return c.one("aten.clamp_min.default", [rows], {"min": 0}), c.cast(present, "f32")
