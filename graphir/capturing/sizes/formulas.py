"""What a step's Python makes of sizes: formulas of the dimensions, and numbers at a point of them.

A tensor's size is a polynomial of the dimensions. What Python makes of sizes ``n`` and ``m`` is

* a polynomial again: ``2 * n * m``, ``(4 * n + 8) // 4``, ``2 * n * m // n``;
* the remainder of one: ``n % 8``, ``n & 7``;
* a function of one that rises or falls, made step by step: ``math.ceil(n / 64) + 1``;
* unknown otherwise: ``n // m``, unless it is one of these for what the sizes are.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import GraphirError
from ...ir.size import LARGEST, Dims, Polynomial, Size, add, bind, multiply, product, size_dims
from ..record.extents import Axis, Derived, Extents, Number, Test

__all__ = [
    "IN_STEPS",
    "Formula",
    "Function",
    "Numbers",
    "Remainder",
    "Unknown",
    "divided",
    "domain",
    "formulas_of",
    "is_plain",
    "number_at",
    "substituted",
]


class Remainder(NamedTuple):
    """The remainder of a size."""

    size: Polynomial
    divisor: int


class Function(NamedTuple):
    """A number that a size makes bigger, or smaller, step by step.

    Attributes:
        size: what it is made of.
        steps: operations in order, each with its operands; None stands for what came before.
        rises: whether it is bigger, or the same, where the size is bigger.
    """

    size: Polynomial
    steps: tuple[tuple[Callable[..., Any], tuple[float | None, ...]], ...]
    rises: bool

    def of(self, size: int) -> Any:
        """The number where its size is *size*."""
        number: Any = size
        for operation, operands in self.steps:
            number = operation(*(number if operand is None else operand for operand in operands))
        return number

    def at(self, dims: Dims) -> Any:
        """The number under *dims*."""
        return self.of(bind(self.size, dims))

    def lies(self, holds: Callable[[Any, int], bool], bound: int) -> bool:
        """Whether a relation to *bound* holds for all sizes."""
        return all(holds(self.of(size), bound) for size in domain(self.size))


class Unknown:
    """A number that depends on the dimensions in another way."""


Formula: TypeAlias = Size | float | Remainder | Function | Unknown
"""A number that follows the dimensions."""

_UNKNOWN: Final = Unknown()


def is_plain(formula: Formula) -> bool:
    """Whether it is one number, whatever the dimensions are."""
    return isinstance(formula, int | float)


def formulas_of(extents: Extents, axis: Callable[[Axis], Size]) -> dict[str, Formula]:
    """Each symbol, as it follows the dimensions.

    Args:
        extents: of a recording.
        axis: the size of an axis as it follows the dimensions.
    """
    formulas: dict[str, Formula] = {}
    for name, symbol in extents.symbols.items():
        formulas[name] = axis(symbol) if isinstance(symbol, Axis) else _derived(symbol, formulas)
    return formulas


_ROUNDED: Final = (round, math.trunc, math.floor, math.ceil)
IN_STEPS: Final = frozenset(
    {operator.floordiv, operator.mod, operator.rshift, operator.and_, operator.or_, operator.xor, *_ROUNDED}
    | {int.bit_length}
)
"""Operations that give one number for several sizes."""

_HIGHEST_POWER: Final = 4


def _derived(symbol: Derived, formulas: Mapping[str, Formula]) -> Formula:
    """What an operation makes of formulas."""
    operands = [substituted(operand, formulas) for operand in symbol.operands]
    if all(map(is_plain, operands)):
        return symbol.operation(*operands)
    operation, operands = _in_arithmetic(symbol.operation, operands)
    number = operands[0]
    by = operands[1] if len(operands) == 2 else None
    if isinstance(by, int) and operation is operator.mod and by > 0:
        number = _congruent(symbol.operands[0], by, formulas)
    if isinstance(number, Polynomial) and isinstance(by, int | Polynomial):
        found = _of_size(operation, number, by)
        if found is not None:
            return found
    return _stepped(operation, operands)


def _in_arithmetic(
    operation: Callable[..., int | float], operands: list[Formula]
) -> tuple[Callable[..., int | float], list[Formula]]:
    """Operations on bits as arithmetic: ``n & 7`` is ``n % 8``, ``n << 3`` is ``n * 8``, ``n >> 3`` is ``n // 8``."""
    by = operands[1] if len(operands) == 2 else None
    if not isinstance(by, int):
        return operation, operands
    if operation is operator.and_ and by > 0 and by & (by + 1) == 0:
        return operator.mod, [operands[0], by + 1]
    if operation in (operator.lshift, operator.rshift) and 0 <= by < 64:
        return operator.mul if operation is operator.lshift else operator.floordiv, [operands[0], 1 << by]
    return operation, operands


def _of_size(operation: Callable[..., int | float], size: Polynomial, by: Size) -> Formula | None:
    """What an operation makes of a size and a number or a size, where that is a size or a remainder; else None."""
    if operation in (operator.floordiv, operator.mod):
        quotient = _quotient(size, by)
        if quotient is not None:
            return quotient if operation is operator.floordiv else 0
        return Remainder(size, by) if operation is operator.mod and isinstance(by, int) and by > 0 else None
    if isinstance(by, Polynomial):
        return None
    if operation is operator.mul:
        return multiply(size, by)
    if operation is operator.pow and 0 < by <= _HIGHEST_POWER:
        with contextlib.suppress(GraphirError):  # a product of too many terms
            return product([size] * by)
    return None


def _quotient(size: Polynomial, by: Size) -> Size | None:
    """The quotient by a number, or by a product of dimensions, that divides each term; else None."""
    terms = by.terms if isinstance(by, Polynomial) else (((), by),)
    if len(terms) > 1:
        return None
    dims, divisor = Counter(terms[0][0]), terms[0][1]
    if any(k % divisor or not dims <= Counter(monomial) for monomial, k in size.terms):
        return None
    left = {tuple(sorted((Counter(monomial) - dims).elements())): k // divisor for monomial, k in size.terms}
    return Polynomial.of(left)


def _congruent(number: Number, divisor: int, formulas: Mapping[str, Formula]) -> Formula:
    """A number of dimensions that has the same remainder: what was a remainder before need not be one."""
    same = {
        name: size.size if isinstance(size, Remainder) and size.divisor % divisor == 0 else size
        for name in size_dims(number if isinstance(number, Polynomial) else 0)
        for size in (formulas[name],)
    }
    return substituted(number, same)


def _stepped(operation: Callable[..., Any], operands: Sequence[Formula]) -> Formula:
    """What an operation makes of operands one of which is a size or a function of one."""
    places = [i for i, operand in enumerate(operands) if not is_plain(operand)]
    inner = operands[places[0]]
    if isinstance(inner, Polynomial):
        inner = Function(inner, (), True)
    if len(places) > 1 or not isinstance(inner, Function):
        return _UNKNOWN
    first = places[0] == 0
    by: Any = operands[1 - places[0]] if len(operands) == 2 else 0
    if not abs(by) <= LARGEST:
        return _UNKNOWN
    if operation is operator.add or (first and operation in (operator.sub, operator.pos, *_ROUNDED)):
        rises = True
    elif operation in (operator.sub, operator.neg, operator.invert):
        rises = False
    elif by and (operation is operator.mul or (first and operation in (operator.truediv, operator.floordiv))):
        rises = by > 0
    elif operation in (operator.truediv, operator.floordiv) and not first and inner.lies(operator.gt, 0):
        rises = by < 0
    elif operation is operator.pow and first and abs(by) <= _HIGHEST_POWER and inner.lies(operator.gt, 0):
        rises = by > 0
    elif operation in (operator.abs, int.bit_length) and inner.lies(operator.ge, 0):
        rises = True
    elif operation is operator.abs and inner.lies(operator.le, 0):
        rises = False
    else:
        return _UNKNOWN
    arguments = tuple([None if i == places[0] else operand for i, operand in enumerate(operands)])
    return Function(inner.size, (*inner.steps, (operation, arguments)), inner.rises is rises)  # type: ignore[arg-type]


def substituted(number: Number, formulas: Mapping[str, Formula]) -> Formula:
    """A number of symbols, as a number of dimensions."""
    if not isinstance(number, Polynomial):
        return number
    if len(number.terms) == 1 and len(number.terms[0][0]) == 1 and number.terms[0][1] == 1:
        return formulas[number.terms[0][0][0]]
    total: Size = 0
    function: Formula = 0
    for monomial, coefficient in number.terms:
        product: Size = coefficient
        for name in monomial:
            factor = formulas[name]
            if isinstance(factor, int | Polynomial):
                product = multiply(product, factor)
            elif len(monomial) == 1 and function == 0:
                function = _stepped(operator.mul, (factor, coefficient))
                product = 0
            else:
                return _UNKNOWN
        total = add(total, product)
    return total if function == 0 else _stepped(operator.add, (function, total))


class Numbers:
    """The symbols' numbers at a point."""

    def __init__(self, extents: Extents, axis: Callable[[Axis], Size], point: Dims) -> None:
        self._symbols, self._axis, self._point = extents.symbols, axis, point
        self._found: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        """A symbol's number.

        Raises:
            ArithmeticError, ValueError, GraphirError: it can't be computed there.
        """
        if name not in self._found:
            symbol = self._symbols[name]
            if isinstance(symbol, Derived):
                self._found[name] = symbol.operation(*map(self.bound, symbol.operands))
            else:
                self._found[name] = bind(self._axis(symbol), self._point)
        return self._found[name]

    def bound(self, number: Number) -> Any:
        """A number of symbols."""
        if not isinstance(number, Polynomial):
            return number
        return bind(number, {name: self.of(name) for name in size_dims(number)})

    def comes_out(self, test: Test) -> bool:
        """Whether a test does as it did."""
        try:
            return test.holds(self.bound(test.left), self.bound(test.right))
        except (ArithmeticError, ValueError, GraphirError):
            return False


def number_at(extents: Extents, axis: Callable[[Axis], Size], name: str) -> Callable[[Dims], Any]:
    """What gives a symbol's number at a point, or None where it can't be computed."""

    def number(point: Dims) -> Any:
        with contextlib.suppress(ArithmeticError, ValueError, GraphirError):
            return Numbers(extents, axis, point).of(name)
        return None

    return number


def domain(size: Polynomial) -> tuple[int, int]:
    """The least and the largest value that a size is taken to have."""
    at_one = sum(k for _, k in size.terms)
    falls, rises = ({k > 0 for monomial, k in size.terms if monomial} == {sign} for sign in (False, True))
    return at_one if rises else -LARGEST, at_one if falls else LARGEST


def divided(size: Polynomial, divisor: int) -> Polynomial:
    """The quotient of a size by what divides it."""
    return Polynomial(tuple((monomial, k // divisor) for monomial, k in size.terms))
