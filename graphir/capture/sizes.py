"""Sizes that follow the batch: the same step recorded at three batch sizes, fitted by affine expressions.

Two recordings give the coefficients, the third confirms them. Where operators differ or a number is not affine, the
program keeps the captured sizes and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from ..ir.blob import contiguous_strides
from ..ir.operator import Arg
from ..ir.size import Polynomial, Shape, Size
from .recording import Recording
from .values import Call, Value

__all__ = ["BATCH", "Geometry", "NotAffine", "Sizes", "other_batches"]

BATCH: Final = "batch"
"""The dimension's name."""


class NotAffine(Exception):
    """A number, or the list of operators, does not follow the batch affinely; says which and how."""


class Geometry(NamedTuple):
    """Sizes of a value: shape, strides (None for contiguous ones), offset in its storage."""

    shape: Shape
    strides: Shape | None
    offset: Size


def other_batches(batch: int) -> tuple[int, int]:
    """Two more sizes: one next to *batch*, where a parity shows, and one far from it, where a threshold does.

    Neither is 1: a dimension of that size is broadcast.
    """
    return batch + 1, 2 * batch + 3


class Sizes:
    """Numbers of recordings of one step, as sizes.

    Attributes:
        recording: the first, whose values and calls the others agree with.
        geometries: of each value, at its index.
        args: of each call, at its position.

    Args:
        recordings: the step at each of *batches*; one alone gives plain numbers.

    Raises:
        NotAffine: the recordings are not of one shape.
    """

    def __init__(self, recordings: Sequence[Recording], batches: Sequence[int]) -> None:
        self.recording = recordings[0]
        self._recordings, self._batches = recordings, batches
        self._fitted: dict[tuple[int, ...], Size] = {}
        if len(recordings) > 1:
            self._compare()
        self.geometries = [self._geometry(values) for values in zip(*(r.values for r in recordings), strict=True)]
        self.args = [self._args(calls) for calls in zip(*(r.calls for r in recordings), strict=True)]

    def _text(self, numbers: Sequence[object]) -> str:
        return f"{', '.join(map(str, numbers))} at batch {', '.join(map(str, self._batches))}"

    def _compare(self) -> None:
        first = self._recordings[0]
        for other, batch in zip(self._recordings[1:], self._batches[1:], strict=True):
            for i, (call, its) in enumerate(zip(first.calls, other.calls, strict=False)):
                if _shape_of(call) != _shape_of(its):
                    raise NotAffine(f"operator {i} {_difference(call, its, self._batches[0], batch)}")
            if len(first.calls) != len(other.calls) or len(first.values) != len(other.values):
                raise NotAffine(
                    f"{len(first.calls)} operators at batch {self._batches[0]}, but {len(other.calls)} at batch {batch}"
                )
            for mine, theirs in zip(first.returned, other.returned, strict=True):
                if not isinstance(mine, Value) and mine != theirs:
                    at = f"{mine!r} at batch {self._batches[0]}, but {theirs!r} at batch {batch}"
                    raise NotAffine(f"the model returns {at}")
            for (value, mine_), (_, theirs_) in zip(first.constants, other.constants, strict=True):
                if mine_ is not theirs_ and not _same_bits(mine_, theirs_):
                    raise NotAffine(f"a constant made in {value.scope or 'the model'} depends on the batch size")

    def fit(self, numbers: tuple[int, ...]) -> Size:
        """The size that takes these values in the recordings."""
        if len(set(numbers)) == 1:
            return numbers[0]
        if numbers not in self._fitted:
            (a, b, *rest), (x, y, *others) = numbers, self._batches
            slope, remainder = divmod(b - a, y - x)
            constant = a - slope * x
            if remainder or any(slope * batch + constant != n for n, batch in zip(rest, others, strict=True)):
                raise NotAffine(f"{self._text(numbers)} is not affine")
            self._fitted[numbers] = Polynomial.of({(BATCH,): slope, (): constant})
        return self._fitted[numbers]

    def _geometry(self, values: tuple[Value, ...]) -> Geometry:
        first = values[0]
        try:
            shape = self._fit_all([v.shape for v in values])
            offset = self.fit(tuple([v.offset for v in values]))
            if all(v.strides == contiguous_strides(v.shape) for v in values):
                return Geometry(shape, None, offset)
            return Geometry(shape, self._fit_all([v.strides for v in values]), offset)
        except NotAffine as e:
            call = first.call
            made = f" made by {call.type}{_in(call)}" if call is not None else f" {first.label!r}"
            raise NotAffine(f"a size of the value{made}: {e}") from None

    def _fit_all(self, tuples: Sequence[tuple[int, ...]]) -> Shape:
        if all(t == tuples[0] for t in tuples):
            return tuples[0]
        if len({len(t) for t in tuples}) > 1:
            raise NotAffine(f"{self._text([len(t) for t in tuples])} dimensions")
        return tuple([self.fit(numbers) for numbers in zip(*tuples, strict=True)])

    def _args(self, calls: tuple[Call, ...]) -> dict[str, Arg]:
        call = calls[0]
        found: dict[str, Arg] = {}
        for name in call.args:
            try:
                found[name] = self._arg([c.args[name] for c in calls], call)
            except NotAffine as e:
                raise NotAffine(f"argument {name} of {call.type}{_in(call)}: {e}") from None
        return found

    def _arg(self, args: Sequence[Arg], call: Call) -> Arg:
        first = args[0]
        if all(type(a) is type(first) and a == first for a in args):
            return first
        if all(isinstance(a, tuple) for a in args) and len({len(a) for a in args if isinstance(a, tuple)}) == 1:
            return tuple([self._arg(items, call) for items in zip(*args, strict=True)])
        whole = [a for a in args if type(a) is int]
        if len(whole) < len(args) and call.outputs[0].dtype.is_floating_point:
            # A size as a float means the same as an integer to an operator whose result is floating-point anyway.
            whole = [int(a) for a in args if type(a) is float and a.is_integer()]
        if len(whole) == len(args):
            return self.fit(tuple(whole))
        raise NotAffine(self._text(args))


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


def _difference(mine: Call, theirs: Call, at: int, other: int) -> str:
    """How two calls of one place differ, recorded at the batch sizes *at* and *other*."""
    if (mine.type, mine.scope) != (theirs.type, theirs.scope):
        return f"is {mine.type}{_in(mine)} at batch {at}, but {theirs.type}{_in(theirs)} at batch {other}"
    for verb, a, b in (("returns", mine.outputs, theirs.outputs), ("reads", mine.inputs, theirs.inputs)):
        if len(a) != len(b):
            return f"({mine.type}{_in(mine)}) {verb} {len(a)} tensors at batch {at} and {len(b)} at batch {other}"
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
    return f"({mine.type}{_in(mine)}) {differ} at batch {at} than at batch {other}"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
