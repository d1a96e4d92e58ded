"""Sizes: integers, or polynomials of named dimensions such as ``2*batch+1`` and ``batch*length``.

A captured loss holds its divisor and every view its sizes, so a program that runs at other sizes must know how each of
these numbers depends on its dimensions. Polynomials with integer coefficients are enough for training steps (the rows
of a transformer's linear layers are ``batch*length``), and stay exact and readable.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Final, NamedTuple, TypeAlias

from ..errors import GraphirError, ParseError

__all__ = [
    "BATCH",
    "HIGHEST_DEGREE",
    "LARGEST",
    "LONGEST_TEXT",
    "Dims",
    "Monomial",
    "Polynomial",
    "Shape",
    "Size",
    "add",
    "bind",
    "bind_shape",
    "dimension",
    "multiply",
    "numel",
    "parse_size",
    "product",
    "rename_dims",
    "size_dims",
    "substitute",
]

Dims: TypeAlias = Mapping[str, int]
"""The value of each named dimension."""

Monomial: TypeAlias = tuple[str, ...]
"""A product of dimensions: their names in order, each as often as it is a factor; empty for the constant."""

BATCH: Final = "batch"
"""The dimension along which a step's arguments are split over replicas. A replica's own has the replica's prefix."""

LARGEST: Final = 1 << 48
"""The largest value of a dimension, and the largest number of elements, that counts as possible."""

HIGHEST_DEGREE: Final = 8
"""The most dimensions in one product."""

LONGEST_TEXT: Final = 4000
"""The most characters of a size or a number. Python itself reads no integers of more than 4300 digits."""

_FACTORS: Final = {1: "", -1: "-"}
_MOST_TERMS: Final = 1024
_MOST_DIGITS: Final = 20
_FIX: Final = "write an integer or an expression such as 2*batch+1 or batch*length"
_TERM: Final = re.compile(r"(?:(-?\d+)|([A-Za-z_][\w./]*))((?:\*[A-Za-z_][\w./]*)*)")


class Polynomial(NamedTuple):
    """A sum of products of dimensions, each with a coefficient; ``terms`` are sorted and have no zero coefficient.

    Build one with :meth:`of`, which returns an ``int`` where nothing depends on a dimension, or :func:`dimension`.
    """

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of(terms: Mapping[Monomial, int]) -> Size:
        """The canonical size with these coefficients; each monomial is sorted."""
        kept = tuple(sorted((monomial, k) for monomial, k in terms.items() if k))
        if not kept:
            return 0
        return kept[0][1] if len(kept) == 1 and not kept[0][0] else Polynomial(kept)

    def __str__(self) -> str:
        parts = [_FACTORS.get(k, f"{k}*") + "*".join(monomial) for monomial, k in self.terms if monomial]
        parts += [str(k) for monomial, k in self.terms if not monomial]
        return "+".join(parts).replace("+-", "-")


Size: TypeAlias = int | Polynomial
Shape: TypeAlias = tuple[Size, ...]


def dimension(name: str) -> Polynomial:
    """The size that is the dimension *name* itself."""
    return Polynomial((((name,), 1),))


def bind(size: Size, dims: Dims) -> int:
    """The value of *size* under *dims*.

    Raises:
        GraphirError: a dimension has no value.
    """
    if isinstance(size, int):
        return size
    total = 0
    try:
        for monomial, k in size.terms:
            for dim in monomial:
                k *= dims[dim]
            total += k
    except KeyError as e:
        raise GraphirError(f"dimension {e.args[0]!r} has no value", fix=f"known dimensions: {sorted(dims)}") from None
    return total


def bind_shape(shape: Shape, dims: Dims) -> tuple[int, ...]:
    """*shape* with every size bound."""
    return tuple([size if isinstance(size, int) else bind(size, dims) for size in shape])


def numel(shape: Shape, dims: Dims) -> int:
    """The number of elements of *shape* under *dims*."""
    n = 1
    for size in shape:
        n *= size if isinstance(size, int) else bind(size, dims)
    return n


def size_dims(size: Size) -> tuple[str, ...]:
    """The dimensions that *size* depends on."""
    return () if isinstance(size, int) else tuple(dict.fromkeys(dim for monomial, _ in size.terms for dim in monomial))


def rename_dims(size: Size, rename: Callable[[str], str]) -> Size:
    """*size* with each dimension renamed."""
    if isinstance(size, int):
        return size
    return _collect((tuple(sorted(map(rename, monomial))), k) for monomial, k in size.terms)


def substitute(size: Size, of: Callable[[str], Size]) -> Size:
    """*size* with a size in the place of each dimension.

    Raises:
        GraphirError: the result has more terms than any real size.
    """
    if isinstance(size, int):
        return size
    total: Size = 0
    for monomial, k in size.terms:
        total = add(total, product([k, *map(of, monomial)]))
    return total


def add(a: Size, b: Size) -> Size:
    """The sum of two sizes."""
    return a + b if isinstance(a, int) and isinstance(b, int) else _collect((*_terms(a), *_terms(b)))


def multiply(a: Size, b: Size) -> Size:
    """The product of two sizes.

    Raises:
        GraphirError: the product has more terms than any real size.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    ours, theirs = _terms(a), _terms(b)
    if len(ours) * len(theirs) > _MOST_TERMS:
        raise GraphirError(f"a product of {len(ours)} by {len(theirs)} terms", fix="use fewer dimensions")
    return _collect((tuple(sorted(x + y)), j * k) for x, j in ours for y, k in theirs)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, 1 of none; raises as :func:`multiply`."""
    one: Size = 1
    return reduce(multiply, sizes, one)


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    return (((), size),) if isinstance(size, int) else size.terms


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Size:
    """The sum of these terms."""
    found: Counter[Monomial] = Counter()
    for monomial, k in terms:
        found[monomial] += k
    return Polynomial.of(found)


def parse_size(text: str) -> Size:
    """Read what ``str(size)`` prints.

    Raises:
        ParseError: *text* is not a polynomial, or one that no size can be.
    """
    if not text:
        raise ParseError("an empty size", fix=_FIX)
    if len(text) > LONGEST_TEXT:
        raise ParseError(f"{text[:20]}… is not a possible size", fix=f"write at most {LONGEST_TEXT} characters")
    terms: list[tuple[Monomial, int]] = []
    position = 0
    while position < len(text):
        sign = 1
        if text[position] in ("+-" if position else "-"):
            sign = 1 if text[position] == "+" else -1
            position += 1
        match = _TERM.match(text, position)
        if not match:
            raise ParseError(f"{text!r} is not a size", fix=_FIX)
        number, dim, factors = match.groups()
        if number and len(number) > _MOST_DIGITS:
            raise ParseError(f"{text[:20]}… is not a possible size", fix=f"numbers are of up to {_MOST_DIGITS} digits")
        monomial = tuple(sorted([dim, *factors.split("*")[1:]] if dim else factors.split("*")[1:]))
        if len(monomial) > HIGHEST_DEGREE:
            raise ParseError(f"{'*'.join(monomial)} is of degree {len(monomial)}", fix=f"at most {HIGHEST_DEGREE}")
        terms.append((monomial, sign * int(number or 1)))
        if len(terms) > _MOST_TERMS:
            raise ParseError(f"a size of more than {_MOST_TERMS} terms", fix="use fewer dimensions")
        position = match.end()
        if position < len(text) and text[position] not in "+-":
            raise ParseError(f"{text!r} is not a size", fix=_FIX)
    return _collect(terms)
