"""The sizes of a step: numbers that are equal in recordings at several sizes, and polynomials for those that differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...ir.blob import contiguous_strides
from ...ir.fitting import Grid, NotPolynomial, point_text
from ...ir.guard import Guard
from ...ir.operator import Arg
from ...ir.optypes.table import operator_type
from ...ir.size import BATCH, Shape, Size, product, size_dims
from ...ir.tensor import same_bits
from ..record.extents import Axis
from ..record.values import RecordedCall, Value
from ..step.comparison import differing_part
from ..step.recorded_step import Recording
from .guards import guards_of

__all__ = ["Sizes", "SymbolicGeometry", "grown_dims", "is_floating_anyway"]


class SymbolicGeometry(NamedTuple):
    """The geometry of a value at all sizes: shape, strides (None for contiguous ones), offset in its storage."""

    shape: Shape
    strides: Shape | None
    offset: Size


class Sizes:
    """The numbers of a step as sizes, fitted to its recordings at several points.

    Attributes:
        recording: the first recording, with whose values and calls the others agree.
        geometries: of each value, at its index.
        args: of each call, at its position.
        grid: the points of the recordings.

    Args:
        recordings: the step at each point of *grid*.

    Raises:
        NotPolynomial: the recordings differ in operators, or a number is no polynomial of the dimensions.
    """

    def __init__(self, recordings: Sequence[Recording], grid: Grid) -> None:
        self.recording = recordings[0]
        self._recordings, self.grid = recordings, grid
        self._fitted: dict[tuple[int | None, ...], Size] = {}
        self._alike: dict[tuple[object, ...], SymbolicGeometry] = {}
        if len(recordings) > 1:
            self._compare()
        self.geometries = [self._geometry(values) for values in zip(*(r.values for r in recordings), strict=True)]
        self.args = [self._args(calls) for calls in zip(*(r.calls for r in recordings), strict=True)]

    def guards(self) -> list[Guard]:
        """Conditions on the dimensions under which Python asks and computes as it did in the recordings.

        Raises:
            NotPolynomial: Python asked differently in some recordings, or asked what no guard can say.
        """
        if self.asked_otherwise:
            raise NotPolynomial(self.asked_otherwise)
        return list(guards_of(self.recording.extents, self.axis, self.grid.points))

    @property
    def asked_otherwise(self) -> str:
        """Where Python asked differently about sizes than at the first point; empty if it asked the same everywhere."""
        first = self.recording.extents
        for other, point in zip(self._recordings, self.grid.points, strict=True):
            if other.extents.asked() != first.asked():
                place = first.other_outcome(other.extents)
                how = f"a test in {place} comes out differently" if place else "Python tests sizes differently"
                return f"{how} at {point_text(point)} than at {point_text(self.grid.points[0])}"
        return ""

    def axis(self, axis: Axis) -> Size:
        """The size, stride or offset that *axis* stands for."""
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
        return ", ".join(f"{number} at {point_text(point)}" for number, point in zip(numbers, points, strict=True))

    def _compare(self) -> None:
        first = self._recordings[0]
        here = point_text(self.grid.points[0])
        for other, point in zip(self._recordings[1:], self.grid.points[1:], strict=True):
            there = point_text(point)
            for i, (call, other_call) in enumerate(zip(first.calls, other.calls, strict=False)):
                if call.pattern != other_call.pattern:
                    raise NotPolynomial(f"operator {i} {_difference(call, other_call, here, there)}")
            if len(first.calls) != len(other.calls) or len(first.values) != len(other.values):
                raise NotPolynomial(f"{len(first.calls)} operators at {here}, but {len(other.calls)} at {there}")
            for mine, theirs in zip(first.returned, other.returned, strict=False):
                found = [leaf for leaf in (mine, theirs) if not isinstance(leaf, Value)]
                if len(found) == 2 and repr(mine) != repr(theirs):  # NaN is the same as NaN
                    raise NotPolynomial(f"the model returns {mine!r} at {here}, but {theirs!r} at {there}")
            if part := differing_part(first, other):
                raise NotPolynomial(f"the step differs in {part} between {here} and {there}")
            for (value, ours), (_, its) in zip(first.constants, other.constants, strict=True):
                if not same_bits(ours, its):
                    made = f"a constant made in {value.scope or 'the model'}"
                    raise NotPolynomial(f"{made} depends on the {', '.join(point)} size")

    def fit(self, numbers: tuple[int | None, ...]) -> Size:
        """The size that has these values in the recordings; a None for the last recording leaves its value open."""
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
        """For each leaf that a forward-only step returns, the first dimension that grows with the batch."""
        leaves = self.recording.returned
        shapes = [self.geometries[leaf.index].shape if isinstance(leaf, Value) else () for leaf in leaves]
        return [_first(BATCH in size_dims(size) for size in shape) for shape in shapes]

    def _geometry(self, values: tuple[Value, ...]) -> SymbolicGeometry:
        key = tuple([(v.geometry, v.offset) for v in values])  # repeated layers have the same
        if key not in self._alike:
            self._alike[key] = self._fit_geometry(values)
        return self._alike[key]

    def _fit_geometry(self, values: tuple[Value, ...]) -> SymbolicGeometry:
        first = values[0]
        try:
            shape = self._fit_all([v.shape for v in values])
            offset = self.fit(tuple([v.offset for v in values]))
            strides: list[tuple[int | None, ...]] = [v.strides for v in values]
            dense: list[tuple[int | None, ...]] = [contiguous_strides(v.shape) for v in values]
            if len(values) > 1:
                strides[-1], dense[-1] = (_mattering(values[-1].shape, found[-1]) for found in (strides, dense))
            if strides == dense:
                return SymbolicGeometry(shape, None, offset)
            return SymbolicGeometry(shape, self._fit_all(strides), offset)
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

    def _args(self, calls: tuple[RecordedCall, ...]) -> dict[str, Arg]:
        call = calls[0]
        found: dict[str, Arg] = {}
        for name in call.args:
            try:
                found[name] = self._arg([c.args[name] for c in calls], call)
            except NotPolynomial as e:
                raise NotPolynomial(f"argument {name} of {call.type}{_in(call)}: {e}") from None
        return found

    def _arg(self, args: Sequence[Arg], call: RecordedCall) -> Arg:
        first = args[0]
        if all(type(a) is type(first) and (a is first or a == first) for a in args):
            return first
        if all(isinstance(a, tuple) for a in args) and len({len(a) for a in args if isinstance(a, tuple)}) == 1:
            return tuple([self._arg(items, call) for items in zip(*args, strict=True)])
        whole = [a for a in args if type(a) is int]
        if len(whole) < len(args) and is_floating_anyway(call):
            # To a floating-point operator a size means the same as a float and as an integer.
            whole = [int(a) for a in args if type(a) is float and a.is_integer()]
        if len(whole) == len(args):
            return self.fit(tuple(whole))
        raise NotPolynomial(self._text(args))


def grown_dims(captured: Recording, other: Recording) -> list[int | None] | None:
    """For each leaf that a forward-only step returns, the first dimension whose size differs in *other*.

    None if the tensors that *other* returns have other numbers of dimensions.
    """
    ours, theirs = _returned_shapes(captured), _returned_shapes(other)
    if list(map(len, ours)) != list(map(len, theirs)):
        return None
    return [_first(x != y for x, y in zip(a, b, strict=True)) for a, b in zip(ours, theirs, strict=True)]


def _returned_shapes(recording: Recording) -> list[tuple[int, ...]]:
    return [leaf.shape if isinstance(leaf, Value) else () for leaf in recording.returned]


def _first(conditions: Iterable[bool]) -> int | None:
    """The position of the first condition that holds; None if none does."""
    return next((i for i, holds in enumerate(conditions) if holds), None)


def is_floating_anyway(call: RecordedCall) -> bool:
    """Whether the result is floating-point whatever the type of the numbers among the arguments."""
    operands = any(v.dtype.is_floating_point for v in call.inputs)
    named = "dtype" in call.args or call.type.startswith("aten.div.") or operator_type(call.type).bounded
    return call.outputs[0].dtype.is_floating_point and (operands or named)


def _mattering(shape: Sequence[int], strides: Sequence[int | None]) -> tuple[int | None, ...]:
    """The strides, with None in the place of those along dimensions of size 1, which have no effect."""
    return tuple([None if size == 1 else stride for size, stride in zip(shape, strides, strict=True)])


def _in(call: RecordedCall) -> str:
    return f" in {call.scope}" if call.scope else ""


def _difference(mine: RecordedCall, theirs: RecordedCall, at: str, other: str) -> str:
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
        differ = "groups its operands and results differently"
    return f"({mine.type}{_in(mine)}) {differ} at {at} than at {other}"
