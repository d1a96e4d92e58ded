"""Sizes: integers, or affine expressions of named dimensions such as ``2*batch+1``.

A captured loss holds its divisor and every view its sizes, so a program that runs at another batch size must know
how each of these numbers depends on the batch. Affine is enough for training steps, and stays exact and readable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ..errors import GraphirError, ParseError

__all__ = [
    "LARGEST",
    "Affine",
    "Dims",
    "Shape",
    "Size",
    "bind",
    "bind_shape",
    "numel",
    "parse_size",
    "rename_dims",
    "size_dims",
]

Dims: TypeAlias = Mapping[str, int]
"""The value of each named dimension."""

LARGEST: Final = 1 << 48
"""The largest value of a dimension, and the largest number of elements, that is taken for a real one."""

_TERM: Final = re.compile(r"(?:(-?\d+)\*)?([A-Za-z_][\w./]*)|(-?\d+)")


class Affine(NamedTuple):
    """``sum(coefficient * dimension) + constant``, with terms sorted by name and no zero coefficient.

    Build one with :meth:`of`, which returns an ``int`` where nothing depends on a dimension.
    """

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    @staticmethod
    def of(terms: Mapping[str, int], constant: int = 0) -> Size:
        """The canonical size with these coefficients."""
        kept = tuple(sorted((dim, k) for dim, k in terms.items() if k))
        return Affine(kept, constant) if kept else constant

    def __str__(self) -> str:
        parts = [dim if k == 1 else f"{k}*{dim}" for dim, k in self.terms]
        parts += [str(self.constant)] if self.constant else []
        return "+".join(parts).replace("+-", "-")


Size: TypeAlias = int | Affine
Shape: TypeAlias = tuple[Size, ...]


def bind(size: Size, dims: Dims) -> int:
    """The number that *size* is under *dims*.

    Raises:
        GraphirError: a dimension has no value.
    """
    if isinstance(size, int):
        return size
    try:
        return size.constant + sum(k * dims[dim] for dim, k in size.terms)
    except KeyError as e:
        raise GraphirError(f"dimension {e.args[0]!r} has no value", fix=f"known dimensions: {sorted(dims)}") from None


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
    return () if isinstance(size, int) else tuple(dim for dim, _ in size.terms)


def rename_dims(size: Size, rename: Callable[[str], str]) -> Size:
    """*size* with each dimension renamed."""
    if isinstance(size, int):
        return size
    terms: dict[str, int] = {}
    for dim, k in size.terms:
        terms[rename(dim)] = terms.get(rename(dim), 0) + k
    return Affine.of(terms, size.constant)


def parse_size(text: str) -> Size:
    """Read what ``str(size)`` prints.

    Raises:
        ParseError: *text* is not an affine expression.
    """
    terms: dict[str, int] = {}
    constant, position = 0, 0
    while position < len(text):
        sign = 1
        if position and text[position] in "+-":
            sign = 1 if text[position] == "+" else -1
            position += 1
        match = _TERM.match(text, position)
        if not match:
            raise ParseError(f"{text!r} is not a size", fix="write an integer or an expression such as 2*batch+1")
        factor, dim, number = match.groups()
        if dim:
            terms[dim] = terms.get(dim, 0) + sign * int(factor or 1)
        else:
            constant += sign * int(number)
        position = match.end()
        if position < len(text) and text[position] not in "+-":
            raise ParseError(f"{text!r} is not a size", fix="write an integer or an expression such as 2*batch+1")
    if not text:
        raise ParseError("an empty size", fix="write an integer or an expression such as 2*batch+1")
    return Affine.of(terms, constant)
