"""Numbers that a step's Python makes of sizes, as formulas of the dimensions.

A tensor's size is a polynomial of the dimensions. What Python makes of a size ``n`` is

* a polynomial again: ``2 * n * m``, ``(4 * n + 8) // 4``, ``2 * n * m // n``;
* if ``n // k`` was the number ``q`` in each recording: that number, and ``n % k`` is ``n - k * q``;
* if ``n % k`` was the number ``r`` in each recording: that number, and ``n // k`` is ``(n - r) / k``;
* if neither was one number: for ``n % k`` a remainder, which can be compared with a number.

No guard can say anything else.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import GraphirError
from ...ir.fitting import NotPolynomial
from ...ir.size import Dims, Polynomial, Size, add, bind, multiply, product
from ..record.extents import Axis, Derived, Extents, Number

__all__ = ["Formula", "Formulas", "Quotient", "Relation", "Remainder", "is_plain"]


class Remainder(NamedTuple):
    """The remainder of a size by a number."""

    size: Polynomial
    divisor: int


class Quotient(NamedTuple):
    """The quotient of a size by a number that divides it."""

    size: Polynomial
    divisor: int


Formula: TypeAlias = Size | float | Remainder | Quotient
"""A number that follows the dimensions."""


class Relation(NamedTuple):
    """A relation of two numbers that has to hold: ``holds(left, right)``.

    Attributes:
        holds: such as ``operator.lt``.
        left, right: the numbers.
        reason: where Python asks for it.
    """

    holds: Callable[[Any, Any], bool]
    left: Formula
    right: Formula
    reason: str


_HIGHEST_POWER: Final = 4
_ROUNDED: Final = (round, math.trunc, math.floor, math.ceil)


def is_plain(formula: Formula) -> bool:
    """Whether a formula is one number, whatever the dimensions are."""
    return isinstance(formula, int | float)


class Formulas:
    """The formula of each symbol of a recording.

    Attributes:
        kept: relations under which the formulas hold.

    Args:
        extents: of the recording.
        axis: the size of an axis as it follows the dimensions.
        points: values of the dimensions at which Python asked the same about sizes.

    Raises:
        NotPolynomial: Python computes a number from sizes that has no formula.
    """

    def __init__(self, extents: Extents, axis: Callable[[Axis], Size], points: Sequence[Dims]) -> None:
        self.kept: list[Relation] = []
        self._points = points
        self._of: dict[str, Formula] = {}
        for name, symbol in extents.symbols.items():
            self._of[name] = axis(symbol) if isinstance(symbol, Axis) else self._derived(symbol)

    def of(self, number: Number) -> Formula | None:
        """The formula, in dimensions, of a number in symbols; None if there is none."""
        if not isinstance(number, Polynomial):
            return number
        if len(number.terms) == 1 and len(number.terms[0][0]) == 1 and number.terms[0][1] == 1:
            return self._of[number.terms[0][0][0]]
        total: Size = 0
        divisor = 1
        for monomial, coefficient in number.terms:
            term: Size = coefficient
            by = 1
            for name in monomial:
                factor = self._of[name]
                if isinstance(factor, Quotient):
                    by *= factor.divisor
                    factor = factor.size
                if not isinstance(factor, int | Polynomial):
                    return None
                term = multiply(term, factor)
            total = add(multiply(total, by), multiply(term, divisor))
            divisor *= by
        return _divided(total, divisor)

    def _derived(self, symbol: Derived) -> Formula:
        """The formula of the result of an operation."""
        operands = [operand for operand in map(self.of, symbol.operands) if operand is not None]
        reason = f"Python computes with sizes in {symbol.place}"
        found: Formula | None = None
        if len(operands) == len(symbol.operands):
            plain = [operand for operand in operands if isinstance(operand, int | float)]
            whole = len(plain) == len(operands)
            found = symbol.operation(*plain) if whole else self._made(symbol.operation, operands, reason)
        if found is None:
            raise NotPolynomial(f"{reason}, and no guard can express the result")
        return found

    def _made(self, operation: Callable[..., Any], operands: Sequence[Formula], reason: str) -> Formula | None:
        size, by = operands[0], operands[1] if len(operands) == 2 else None
        if by is None and operation in _ROUNDED and isinstance(size, Polynomial | Quotient):
            return size
        if not isinstance(size, Polynomial):
            return None
        if operation is operator.pow and isinstance(by, int) and 0 < by <= _HIGHEST_POWER:
            with contextlib.suppress(GraphirError):  # a product of too many terms
                return product([size] * by)
        if operation in (operator.floordiv, operator.mod, operator.truediv) and isinstance(by, int | Polynomial):
            quotient = _quotient(size, by)
            if quotient is not None:
                return 0 if operation is operator.mod else quotient
            if isinstance(by, int) and by > 0:
                return self._in_parts(operation, size, by, reason)
        return None

    def _in_parts(self, operation: Callable[..., Any], size: Polynomial, by: int, reason: str) -> Formula | None:
        """The formula of a division of a size by a number that does not divide it everywhere."""
        quotients, remainders = zip(*(divmod(bind(size, point), by) for point in self._points), strict=True)
        quotient, remainder = quotients[0], remainders[0]
        if operation is not operator.truediv and set(quotients) == {quotient}:
            self.kept.append(Relation(operator.ge, size, quotient * by, reason))
            self.kept.append(Relation(operator.lt, size, (quotient + 1) * by, reason))
            return quotient if operation is operator.floordiv else add(size, -quotient * by)
        if set(remainders) == {remainder} and (operation is not operator.truediv or remainder == 0):
            self.kept.append(Relation(operator.eq, Remainder(size, by), remainder, reason))
            return remainder if operation is operator.mod else _divided(add(size, -remainder), by)
        return Remainder(size, by) if operation is operator.mod else None


def _divided(size: Size, by: int) -> Size | Quotient:
    """The quotient by a number that divides a size wherever the formulas hold."""
    if isinstance(size, int):
        return size // by
    quotient = _quotient(size, by)
    return Quotient(size, by) if quotient is None else quotient


def _quotient(size: Polynomial, by: Size) -> Size | None:
    """The quotient by a number, or by a product of dimensions, that divides each term; else None."""
    terms = by.terms if isinstance(by, Polynomial) else (((), by),)
    if len(terms) > 1 or not terms[0][1]:
        return None
    dims, divisor = Counter(terms[0][0]), terms[0][1]
    if any(k % divisor or not dims <= Counter(monomial) for monomial, k in size.terms):
        return None
    left = {tuple(sorted((Counter(monomial) - dims).elements())): k // divisor for monomial, k in size.terms}
    return Polynomial.of(left)
