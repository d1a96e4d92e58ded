"""Sizes that follow named dimensions: the same step recorded at several sizes, fitted by polynomials.

Where operators differ or a number is no such polynomial, the program keeps the captured sizes and says why: in the
dimensions where that shows, if the others follow without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import Final, NamedTuple

from ..errors import CaptureError
from ..ir.blob import contiguous_strides
from ..ir.guard import Guard
from ..ir.operator import Arg
from ..ir.size import Dims, Shape, Size, dimension, product, size_dims
from .extents import Axis, Extents
from .grid import BATCH, Grid, NotPolynomial
from .guards import Steady, guards_of, simplified, steady_in
from .recording import Recording, Step, record, same_bits
from .repeats import check_repeats
from .thresholds import threshold_in
from .values import Call, Value

__all__ = ["Followed", "Geometry", "Sizes", "follow_dims"]


class _Threshold(NotPolynomial):
    """The operators follow a threshold of some size, so that none but the captured one is sure."""


class Followed(NamedTuple):
    """A step whose sizes follow dimensions, from recordings at several sizes.

    Attributes:
        sizes: of a step.
        dims: the captured value of each dimension that they follow.
        fixed: why they don't follow others; empty where there are none.
        guards: what the dimensions must satisfy.
        recordings: all that were taken.
        batch_dims: of each leaf that a forward-only step returns, the first dimension that grows with the batch; None
            where the step could be recorded at one batch only.
    """

    sizes: Sizes
    dims: dict[str, int]
    fixed: str
    guards: tuple[Guard, ...] = ()
    recordings: tuple[Recording, ...] = ()
    batch_dims: Sequence[int | None] | None = None

    def release(self) -> None:
        """Take the recordings apart, which nothing is to read any more."""
        for recording in self.recordings:
            for value in recording.values:
                value.release()
            recording.extents.release()


def follow_dims(step: Step) -> Followed:
    """Record *step* at the sizes that are needed, and fit its numbers.

    Raises:
        CaptureError: no program can express the step.
    """
    taken = _Taken(step)
    followed = _follow(taken, dict(step.arguments.dims))
    if followed.fixed:
        check_repeats(step, followed.sizes.recording, step.arguments.dims)
    batch_dims: Sequence[int | None] | None
    if BATCH in followed.dims or BATCH not in step.arguments.dims or not followed.sizes.recording.returned:
        batch_dims = followed.sizes.batch_dims()
    else:
        batch_dims = next(_batch_dims(followed.sizes.recording, taken.at_other_batches()), None)
    return followed._replace(recordings=tuple(taken.at.values()), batch_dims=batch_dims)


def _follow(taken: _Taken, dims: dict[str, int]) -> Followed:
    if not dims:
        return Followed(taken.sizes({}), {}, "no argument has a batch dimension")
    try:
        sizes, guards = taken.guarded(dims)
        return Followed(sizes, dims, "", guards)
    except NotPolynomial as e:
        if len(dims) == 1:
            return Followed(taken.sizes({}), {}, str(e))
        reason = str(e)
    alone: dict[str, int] = {}
    fixed: list[str] = []
    for dim, value in dims.items():
        try:
            taken.sizes({dim: value})
            alone[dim] = value
        except NotPolynomial as e:
            fixed.append(f"{dim} is fixed at {value}: {e}")
    if len(alone) == len(dims):
        fixed = [f"all but {BATCH} are fixed: {reason}"]
        alone = {BATCH: dims[BATCH]}
    try:
        sizes, guards = taken.guarded(alone)
        return Followed(sizes, alone, "; ".join(fixed), guards)
    except NotPolynomial as e:
        return Followed(taken.sizes({}), {}, "; ".join([*fixed, str(e)]))


class _Taken:
    """The recordings of a step, each taken once."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.at: dict[tuple[int, ...], Recording] = {}

    def guarded(self, dims: Mapping[str, int]) -> tuple[Sizes, tuple[Guard, ...]]:
        """The step's sizes as polynomials in *dims*, and what these must satisfy.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        sizes, otherwise = self._above_one(dims)
        above_one = [Guard(dimension(dim), ">=", 2, reason=why) for dim, why in otherwise.items()]
        return sizes, simplified([*above_one, *sizes.guards])

    def _above_one(self, dims: Mapping[str, int]) -> tuple[Sizes, dict[str, str]]:
        """The step's sizes as polynomials in *dims*, and what is otherwise where one of these is 1.

        A tensor with a dimension of 1 may be contiguous in several ways, so PyTorch may take a view of it where it
        copies larger ones; and some modules refuse it.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        ones = dict.fromkeys(dims, 1)
        try:
            return self.sizes(dims, ones), {}
        except _Threshold:
            raise
        except NotPolynomial as e:
            reason = str(e)
        sizes = self.sizes(dims)
        if len(dims) == 1:
            return sizes, dict.fromkeys(dims, reason)
        found = {}
        for dim in dims:
            try:
                self.sizes(dims, {**dims, dim: 1})
            except NotPolynomial as e:
                found[dim] = str(e)
        return sizes, found or {dim: reason for dim in dims if dim != BATCH}

    def sizes(self, dims: Mapping[str, int], check: Mapping[str, int] | None = None) -> Sizes:
        """The step's sizes as polynomials in *dims*; see :class:`.grid.Grid` for *check*.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        grid = Grid(dims, check)
        try:
            return self._sizes(grid)
        except _Threshold:
            raise
        except NotPolynomial:
            nearer = self._nearer(grid, dims, check)
            if nearer is None:
                raise
        return self._sizes(nearer)

    def _nearer(self, grid: Grid, dims: Mapping[str, int], check: Mapping[str, int] | None) -> Grid | None:
        """Other points than those of *grid*, where Python's tests come out otherwise; None where these would not help.

        Which axis follows which dimension is guessed by their sizes: a wrong guess makes another grid, no wrong sizes.

        Raises:
            NotPolynomial: they come out otherwise at *check*.
        """
        extents = self.recording(self.step.arguments.dims).extents
        named = {size: dimension(dim) for dim, size in dims.items()}
        try:
            guards = list(guards_of(extents, lambda axis: named.get(size := axis.size, size), [dims]))
        except NotPolynomial:
            return None
        chosen = slice(None if check is None else -1)  # of the points, those that the grid has chosen
        if all(guard.holds(point) for guard in guards for point in grid.points[chosen]):
            return None
        if check is not None and (broken := next((guard for guard in guards if not guard.holds(check)), None)):
            raise NotPolynomial(f"{broken} does not hold at {_at(check)}: {broken.reason}")
        period = lcm(*(guard.modulus or 1 for guard in guards))
        for step in (period, -period):
            nearer = Grid(dims, check, step)
            points = nearer.points[chosen]
            if min(min(point.values()) for point in points) > 0 and all(g.holds(p) for g in guards for p in points):
                return nearer
        return None

    def _sizes(self, grid: Grid) -> Sizes:
        """The step's sizes from recordings at the points of a grid, and at further ones.

        What Python makes of sizes may be one number at all points, as ``n // 64`` is: where the step is the same with
        another number, it only tests it, and otherwise the number has to stay.
        """
        sizes = self._sizes_at(grid)
        here, stay = grid.points[0], list[Steady]()
        for steady in steady_in(sizes.recording.extents, sizes.axis, grid.points):
            if any(known.guards == steady.guards is not None for known in stay):
                continue
            if not all(steady.stays(here, point) for point in sizes.grid.points):
                continue
            point = steady.elsewhere(here, sizes.guards)
            if point is None and steady.guards is None:
                continue
            try:
                if point is None or len(sizes.grid.points) - len(grid.points) == _MOST_FURTHER:
                    raise NotPolynomial("no point shows it")
                sizes = self._sizes_at(sizes.grid.with_point(point))
            except NotPolynomial:
                if steady.guards is None:
                    raise NotPolynomial(
                        f"Python makes a number of it in {steady.place}, which no guard can say"
                    ) from None
                stay.append(steady)
        sizes.guards += [guard for steady in stay for guard in steady.guards or ()]
        return sizes

    def _sizes_at(self, grid: Grid) -> Sizes:
        recordings: list[Recording] = []
        for point in grid.points:
            try:
                recordings.append(self.recording({**self.step.arguments.dims, **point}))
            except CaptureError as e:
                if not recordings:
                    raise
                raise NotPolynomial(f"at {_at(point)}: {e.what}") from None
        if threshold := threshold_in(recordings):
            raise _Threshold(threshold)
        return Sizes(recordings, grid)

    def at_other_batches(self) -> Iterator[Recording]:
        """Recordings at other batches, all else as captured, as far as there are any; larger ones first."""
        here = self.step.arguments.dims
        captured, *larger = (point[BATCH] for point in Grid({BATCH: here[BATCH]}).points)
        for batch in dict.fromkeys((*larger, captured - 1, captured // 2)):
            if batch > 0:
                with contextlib.suppress(CaptureError):
                    yield self.recording({**here, BATCH: batch})

    def recording(self, dims: Dims) -> Recording:
        key = tuple(dims.values())
        if key not in self.at:
            self.at[key] = record(self.step, dims, named=not self.at)
        return self.at[key]


_MOST_FURTHER: Final = 4
"""How many further recordings are taken."""


class Geometry(NamedTuple):
    """Sizes of a value: shape, strides (None for contiguous ones), offset in its storage."""

    shape: Shape
    strides: Shape | None
    offset: Size


class Sizes:
    """Numbers of recordings of one step, as sizes.

    Attributes:
        recording: the first, whose values and calls the others agree with.
        geometries: of each value, at its index.
        args: of each call, at its position.
        guards: what the dimensions must satisfy for Python's tests of sizes to come out as they did.
        grid: the points that they are of.

    Args:
        recordings: the step at each point of *grid*.

    Raises:
        NotPolynomial: the recordings are not of one shape.
    """

    def __init__(self, recordings: Sequence[Recording], grid: Grid) -> None:
        self.recording = recordings[0]
        self._recordings, self.grid = recordings, grid
        self._fitted: dict[tuple[int | None, ...], Size] = {}
        self._alike: dict[tuple[object, ...], Geometry] = {}
        if len(recordings) > 1:
            self._compare()
        self.geometries = [self._geometry(values) for values in zip(*(r.values for r in recordings), strict=True)]
        self.args = [self._args(calls) for calls in zip(*(r.calls for r in recordings), strict=True)]
        # Where a test makes no difference, each side has tests of its own; mostly all recordings have the same.
        asked: dict[object, Extents] = {}
        for recording in recordings:
            asked.setdefault(recording.extents.asked(), recording.extents)
        self.guards = [guard for extents in asked.values() for guard in guards_of(extents, self.axis, grid.points)]

    def axis(self, axis: Axis) -> Size:
        """The size, stride or offset that an axis is."""
        shape, strides, offset = self.geometries[axis.value.index]
        if axis.of == "offset":
            return offset
        if axis.of == "shape":
            return shape[axis.dim]
        return strides[axis.dim] if strides is not None else product(shape[axis.dim + 1 :])

    def _text(self, numbers: Sequence[object]) -> str:
        names, points = list(self.grid.points[0]), self.grid.points
        if len(names) == 1:
            return f"{', '.join(map(str, numbers))} at {names[0]} {', '.join(str(p[names[0]]) for p in points)}"
        return ", ".join(f"{number} at {_at(point)}" for number, point in zip(numbers, points, strict=True))

    def _compare(self) -> None:
        first = self._recordings[0]
        here = _at(self.grid.points[0])
        for other, point in zip(self._recordings[1:], self.grid.points[1:], strict=True):
            there = _at(point)
            for i, (call, its) in enumerate(zip(first.calls, other.calls, strict=False)):
                if _shape_of(call) != _shape_of(its):
                    raise NotPolynomial(f"operator {i} {_difference(call, its, here, there)}")
            if len(first.calls) != len(other.calls) or len(first.values) != len(other.values):
                raise NotPolynomial(f"{len(first.calls)} operators at {here}, but {len(other.calls)} at {there}")
            for mine, theirs in zip(first.returned, other.returned, strict=True):
                if not isinstance(mine, Value) and repr(mine) != repr(theirs):  # NaN is the same as NaN
                    raise NotPolynomial(f"the model returns {mine!r} at {here}, but {theirs!r} at {there}")
            for (value, mine_), (_, theirs_) in zip(first.constants, other.constants, strict=True):
                if mine_ is not theirs_ and not same_bits(mine_, theirs_):
                    made = f"a constant made in {value.scope or 'the model'}"
                    raise NotPolynomial(f"{made} depends on the {', '.join(point)} size")

    def fit(self, numbers: tuple[int | None, ...]) -> Size:
        """The size that takes these values in the recordings; a None in the last one leaves its value open."""
        first, *others = numbers
        if first is not None and all(n == first or n is None for n in others):
            return first
        if numbers not in self._fitted:
            size = self.grid.fit(numbers)
            if size is None:
                names = list(self.grid.points[0])
                kind = "not affine" if names == [BATCH] else "not quadratic" if len(names) == 1 else "no polynomial"
                raise NotPolynomial(f"{self._text(numbers)} is {kind}")
            self._fitted[numbers] = size
        return self._fitted[numbers]

    def batch_dims(self) -> list[int | None]:
        """Of each leaf that a forward-only step returns, the first dimension that grows with the batch."""
        leaves = self.recording.returned
        shapes = [self.geometries[leaf.index].shape if isinstance(leaf, Value) else () for leaf in leaves]
        return [_first(BATCH in size_dims(size) for size in shape) for shape in shapes]

    def _geometry(self, values: tuple[Value, ...]) -> Geometry:
        key = tuple([(v.geometry, v.offset) for v in values])  # repeated layers have the same
        if key not in self._alike:
            self._alike[key] = self._fit_geometry(values)
        return self._alike[key]

    def _fit_geometry(self, values: tuple[Value, ...]) -> Geometry:
        first = values[0]
        try:
            shape = self._fit_all([v.shape for v in values])
            offset = self.fit(tuple([v.offset for v in values]))
            strides: list[tuple[int | None, ...]] = [v.strides for v in values]
            dense: list[tuple[int | None, ...]] = [contiguous_strides(v.shape) for v in values]
            if len(values) > 1:
                strides[-1], dense[-1] = (_mattering(values[-1].shape, found[-1]) for found in (strides, dense))
            if strides == dense:
                return Geometry(shape, None, offset)
            return Geometry(shape, self._fit_all(strides), offset)
        except NotPolynomial as e:
            call = first.call
            made = f" made by {call.type}{_in(call)}" if call is not None else f" {first.label!r}"
            raise NotPolynomial(f"a size of the value{made}: {e}") from None

    def _fit_all(self, tuples: Sequence[tuple[int | None, ...]]) -> Shape:
        first = tuples[0]
        if None not in first and all(t == first for t in tuples):
            return first  # type: ignore[return-value]
        if len({len(t) for t in tuples}) > 1:
            raise NotPolynomial(f"{self._text([len(t) for t in tuples])} dimensions")
        return tuple([self.fit(numbers) for numbers in zip(*tuples, strict=True)])

    def _args(self, calls: tuple[Call, ...]) -> dict[str, Arg]:
        call = calls[0]
        found: dict[str, Arg] = {}
        for name in call.args:
            try:
                found[name] = self._arg([c.args[name] for c in calls], call)
            except NotPolynomial as e:
                raise NotPolynomial(f"argument {name} of {call.type}{_in(call)}: {e}") from None
        return found

    def _arg(self, args: Sequence[Arg], call: Call) -> Arg:
        first = args[0]
        if all(type(a) is type(first) and (a is first or a == first) for a in args):
            return first
        if all(isinstance(a, tuple) for a in args) and len({len(a) for a in args if isinstance(a, tuple)}) == 1:
            return tuple([self._arg(items, call) for items in zip(*args, strict=True)])
        whole = [a for a in args if type(a) is int]
        if len(whole) < len(args) and _is_floating_anyway(call):
            # There a size as a float means the same as an integer.
            whole = [int(a) for a in args if type(a) is float and a.is_integer()]
        if len(whole) == len(args):
            return self.fit(tuple(whole))
        raise NotPolynomial(self._text(args))


def _batch_dims(captured: Recording, others: Iterator[Recording]) -> Iterator[list[int | None]]:
    """What :meth:`Sizes.batch_dims` tells, by those of *others* that return tensors of as many dimensions."""
    shapes = _returned_shapes(captured)
    for other in others:
        theirs = _returned_shapes(other)
        if list(map(len, shapes)) == list(map(len, theirs)):
            yield [_first(x != y for x, y in zip(a, b, strict=True)) for a, b in zip(shapes, theirs, strict=True)]


def _returned_shapes(recording: Recording) -> list[tuple[int, ...]]:
    return [leaf.shape if isinstance(leaf, Value) else () for leaf in recording.returned]


def _first(conditions: Iterable[bool]) -> int | None:
    """The position of the first that holds."""
    return next((i for i, holds in enumerate(conditions) if holds), None)


def _is_floating_anyway(call: Call) -> bool:
    """Whether the result is floating-point whatever the type of the numbers among the arguments."""
    operands = any(v.dtype.is_floating_point for v in call.inputs)
    named = "dtype" in call.args or call.type.startswith(("aten.div.", "aten.linspace.", "aten.logspace."))
    return call.outputs[0].dtype.is_floating_point and (operands or named)


def _mattering(shape: Sequence[int], strides: Sequence[int | None]) -> tuple[int | None, ...]:
    """Strides, without those along which there is nothing to step to."""
    return tuple([None if size == 1 else stride for size, stride in zip(shape, strides, strict=True)])


def _in(call: Call) -> str:
    return f" in {call.scope}" if call.scope else ""


def _shape_of(call: Call) -> tuple[object, ...]:
    """What has to be the same at every size."""
    return (
        call.type,
        call.operands,
        call.results,
        call.seed,
        [v.index for v in call.inputs],
        [(v.index, v.root.index, v.dtype) for v in call.outputs],
        list(call.args),
    )


def _at(point: Dims) -> str:
    return ", ".join(f"{dim} {value}" for dim, value in point.items())


def _difference(mine: Call, theirs: Call, at: str, other: str) -> str:
    """How two calls of one place differ, recorded at the sizes *at* and *other*."""
    if mine.type != theirs.type:
        return f"is {mine.type}{_in(mine)} at {at}, but {theirs.type} at {other}"
    for verb, a, b in (("returns", mine.outputs, theirs.outputs), ("reads", mine.inputs, theirs.inputs)):
        if len(a) != len(b):
            return f"({mine.type}{_in(mine)}) {verb} {len(a)} tensors at {at} and {len(b)} at {other}"
    dtypes = [[v.dtype for v in call.outputs] for call in (mine, theirs)]
    if dtypes[0] != dtypes[1]:
        differ = "returns elements of other types"
    elif [v.index for v in mine.inputs] != [v.index for v in theirs.inputs]:
        differ = "reads other values"
    elif list(mine.args) != list(theirs.args):
        differ = f"has other arguments ({', '.join(mine.args) or 'none'}; {', '.join(theirs.args) or 'none'})"
    elif mine.seed != theirs.seed:
        differ = "draws other random numbers"
    elif [v.root.index for v in mine.outputs] != [v.root.index for v in theirs.outputs]:
        differ = "returns views of other values"
    else:
        differ = "arranges what it reads and returns otherwise"
    return f"({mine.type}{_in(mine)}) {differ} at {at} than at {other}"
