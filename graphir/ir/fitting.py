"""The sizes at which a step is recorded, so that its numbers determine polynomials in its dimensions.

The batch appears at most linearly, every other dimension at most squared (attention holds ``length*length``). Different
dimensions are multiplied freely, a squared one only by the batch. One recording for each such monomial determines the
coefficients exactly. One more, at other values of all dimensions, confirms them::

    length                     batch: 1, batch                         3 recordings
       ▲       check           batch, length: {1, batch} x
       │  ●    ●                 {1, length, length²}                  7
       │  ●    ●               batch, height, width: {1, batch} x
       │  ●    ●                 {1, h, h², w, w², h*w}               13
       └──────────▶ batch

More than four dimensions are taken for numbers of lookups and the like, which nothing multiplies: each appears linearly
and by itself, and costs one recording. The check tells if a dimension appears in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

from .size import BATCH, Dims, Monomial, Polynomial, Size, bind

__all__ = ["Grid", "NotPolynomial", "point_text"]

_MULTIPLIED: Final = 4
"""Up to this number of dimensions may be multiplied; if there are more, each is a term by itself."""

_SMALL: Final = 7
"""From this value on, a dimension is recorded at smaller values too: a model may have a longest sequence."""


class NotPolynomial(Exception):
    """A number, or the list of operators, follows the dimensions in another way; the text says which and how."""


def point_text(point: Dims) -> str:
    """``batch 8, length 64``."""
    return ", ".join(f"{dim} {value}" for dim, value in point.items())


class Grid:
    """The points for some dimensions, and the polynomials that their numbers determine.

    Attributes:
        points: values of the dimensions; the captured ones first, further ones and those of the check last.

    Args:
        dims: the captured value of each dimension.
        check: the values of the dimensions in the recording that confirms the polynomials.
        step: the distance between the values of a dimension; 0: the grid chooses the values.
        further: more points that confirm the polynomials.
    """

    def __init__(self, dims: Dims, check: Dims | None = None, step: int = 0, further: Sequence[Dims] = ()) -> None:
        exponents = _exponents(tuple(dims))
        values = {dim: _values(dim, value, step) for dim, value in dims.items()}
        self._monomials: list[Monomial] = [
            tuple(sorted(dim for dim, power in zip(dims, powers, strict=True) for _ in range(power)))
            for powers in exponents
        ]
        # The points of a downward closed set of exponents determine its polynomials, whatever the values are.
        self.points = [
            {dim: values[dim][power] for dim, power in zip(dims, powers, strict=True)} for powers in exponents
        ]
        rows = [tuple([prod(point[d] for d in m) for m in self._monomials]) for point in self.points]
        self._inverse = _inverse(tuple(rows))
        self._determined = len(self.points)
        self.points.extend(dict(point) for point in further)
        if dims:
            self.points.append(dict(check) if check is not None else {dim: values[dim][-1] for dim in dims})

    def fit(self, numbers: Sequence[int | None]) -> Size | None:
        """The size that takes these values at the points; None where no polynomial with whole coefficients does.

        The last number may be None: it is then not compared.
        """
        given = [n for n in numbers if n is not None]
        coefficients = [sum(a * n for a, n in zip(row, given, strict=False)) for row in self._inverse]
        if any(k.denominator != 1 for k in coefficients):
            return None
        size = Polynomial.of({m: int(k) for m, k in zip(self._monomials, coefficients, strict=True)})
        checks = zip(numbers[self._determined :], self.points[self._determined :], strict=True)
        return size if all(number in (None, bind(size, point)) for number, point in checks) else None


def _values(dim: str, value: int, step: int) -> tuple[int, ...]:
    """Values of a dimension: the captured one first, the check's last.

    The values between them are far from the captured one, where a threshold shows, or next to it. Only the captured
    value may be 1: at size 1, tensors of other strides count as contiguous too.
    """
    if step:
        return tuple(value + i * step for i in range(3 if dim == BATCH else 4))
    if dim == BATCH:
        return value, 2 * value + 3 + value % 2, value + 1  # the first two differ in parity
    if value < _SMALL:
        return value, value + 1, value + 2, 2 * value + 3
    return value, value - 1, value - 2, value // 2 + 1


def _exponents(dims: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The powers of each dimension in each monomial, the constant first."""
    if len(dims) > _MULTIPLIED:
        return [(0,) * len(dims), *[tuple([int(d == dim) for d in dims]) for dim in dims]]
    highest = [1 if dim == BATCH else 2 for dim in dims]
    return [
        powers
        for powers in product(*(range(most + 1) for most in highest))
        if 2 not in powers or sum(p for p, dim in zip(powers, dims, strict=True) if dim != BATCH) == 2
    ]


@lru_cache(64)
def _inverse(rows: tuple[tuple[int, ...], ...]) -> list[list[Fraction]]:
    """The inverse of a regular matrix, by Gauss and Jordan's elimination."""
    n = len(rows)
    work = [[Fraction(x) for x in row] + [Fraction(i == j) for j in range(n)] for i, row in enumerate(rows)]
    for column in range(n):
        pivot = next(i for i in range(column, n) if work[i][column])
        work[column], work[pivot] = work[pivot], work[column]
        first = work[column][column]
        work[column] = [x / first for x in work[column]]
        for i in range(n):
            if i != column and (factor := work[i][column]):
                work[i] = [x - factor * y for x, y in zip(work[i], work[column], strict=True)]
    return [row[n:] for row in work]
