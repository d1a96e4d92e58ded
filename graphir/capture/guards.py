"""From the tests that a step's Python makes of sizes to guards on the dimensions that these follow."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ..errors import GraphirError
from ..ir.guard import Guard
from ..ir.size import Dims, Polynomial, Size, add, bind, multiply
from .extents import Axis, Derived, Extents, Number, Test
from .grid import NotPolynomial

__all__ = ["guards_of", "simplified"]


def guards_of(extents: Extents, axis: Callable[[Axis], Size], points: Sequence[Dims]) -> Iterator[Guard]:
    """What the dimensions must satisfy for the tests to come out as they did, the trivial left out.

    Args:
        extents: of the recording at the first of *points*.
        axis: the size of an axis as it follows the dimensions.
        points: values of the dimensions at which the step was recorded, each time the same. A test that comes out
            otherwise at one of them makes no difference.

    Raises:
        NotPolynomial: a test is of something that no guard can say.
    """
    told = _told(extents, axis)
    if not any(isinstance(size, _Unknown | _Part | Polynomial) for size in told.values()):
        return
    at = [_numbers(extents, axis, point) for point in points]
    for test in extents.tests:
        left, right = (_substituted(number, told) for number in (test.left, test.right))
        if _is_plain(left) and _is_plain(right):
            continue
        if all(_comes_out(test, numbers) for numbers in at):
            yield from _guards(test, left, right)


class _Part(NamedTuple):
    """The quotient or the remainder of a size."""

    size: Polynomial
    divisor: int
    operation: Callable[[int, int], int]


class _Unknown:
    """A number that depends on the dimensions in another way."""


_Told: TypeAlias = Size | float | _Part | _Unknown
_UNKNOWN: Final = _Unknown()


def _is_plain(number: _Told) -> bool:
    return isinstance(number, int | float)


def _told(extents: Extents, axis: Callable[[Axis], Size]) -> dict[str, _Told]:
    """Each symbol, as it follows the dimensions."""
    told: dict[str, _Told] = {}
    for name, symbol in extents.symbols.items():
        if isinstance(symbol, Axis):
            told[name] = axis(symbol)
        else:
            told[name] = _derived(symbol.operation, [_substituted(operand, told) for operand in symbol.operands])
    return told


def _derived(operation: Callable[..., Any], operands: Sequence[_Told]) -> _Told:
    if all(map(_is_plain, operands)):
        return operation(*operands)  # type: ignore[no-any-return]
    if operation in (operator.floordiv, operator.mod):
        size, divisor = operands
        if isinstance(size, Polynomial) and isinstance(divisor, int) and divisor > 0:
            if any(k % divisor for _, k in size.terms):
                return _Part(size, divisor, operation)
            exact = Polynomial(tuple((monomial, k // divisor) for monomial, k in size.terms))
            return exact if operation is operator.floordiv else 0
    return _UNKNOWN


def _substituted(number: Number, told: Mapping[str, _Told]) -> _Told:
    """A number of symbols, as a number of dimensions."""
    if not isinstance(number, Polynomial):
        return number
    if len(number.terms) == 1 and len(number.terms[0][0]) == 1 and number.terms[0][1] == 1:
        return told[number.terms[0][0][0]]
    total: Size = 0
    for monomial, coefficient in number.terms:
        product: Size = coefficient
        for name in monomial:
            factor = told[name]
            if not isinstance(factor, int | Polynomial):
                return _UNKNOWN
            product = multiply(product, factor)
        total = add(total, product)
    return total


def _numbers(extents: Extents, axis: Callable[[Axis], Size], point: Dims) -> dict[str, Any]:
    """Each symbol's number at a point; what can't be computed there is missing."""
    found: dict[str, Any] = {}
    for name, symbol in extents.symbols.items():
        try:
            if isinstance(symbol, Derived):
                found[name] = symbol.operation(*(_bound(operand, found) for operand in symbol.operands))
            else:
                found[name] = bind(axis(symbol), point)
        except (ArithmeticError, ValueError, GraphirError):
            continue
    return found


def _bound(number: Number, symbols: Mapping[str, Any]) -> int | float:
    return bind(number, symbols) if isinstance(number, Polynomial) else number


def _comes_out(test: Test, symbols: Mapping[str, Any]) -> bool:
    try:
        return test.holds(_bound(test.left, symbols), _bound(test.right, symbols))
    except GraphirError:  # a symbol has no number there
        return False


_MIRRORED: Final = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}


def _guards(test: Test, left: _Told, right: _Told) -> Iterator[Guard]:
    """What the dimensions must satisfy for a test to hold."""
    holds, reason = test.holds, f"Python tests it in {test.place}"
    if _is_plain(left):
        holds, left, right = _MIRRORED[holds], right, left
    if isinstance(left, Polynomial) and isinstance(right, Polynomial):
        left, right = add(left, multiply(-1, right)), 0
        if isinstance(left, int):
            return
    if not isinstance(right, int | float) or not isinstance(left, Polynomial | _Part):
        raise NotPolynomial(f"{reason}, and makes it of sizes in a way that no guard can say")
    if math.isfinite(right):
        yield from _relation(holds, left, right, reason)


def _relation(
    holds: Callable[[Any, Any], bool], left: Polynomial | _Part, right: float, reason: str
) -> Iterator[Guard]:
    """The guards for a relation of a size, or of a part of it, to a number."""
    if holds in (operator.eq, operator.ne):
        if right == int(right):
            yield from _equality(holds is operator.eq, left, int(right), reason)
        return
    at_least = holds in (operator.ge, operator.gt)
    least = math.floor(right) + 1 if holds in (operator.gt, operator.le) else math.ceil(right)
    # What is at most n is less than n + 1: the boundary is the least number on the upper side.
    if isinstance(left, _Part):
        size, divisor, operation = left
        if operation is operator.mod:
            if least != 1:
                raise NotPolynomial(f"a remainder by {divisor} is compared with {right}: {reason}")
            yield from _equality(not at_least, left, 0, reason)
            return
        left, least = size, least * divisor
    yield _linear(left, at_least, least, reason)


def _linear(size: Polynomial, at_least: bool, least: int, reason: str) -> Guard:
    """``size >= least``, or the contrary, with coefficients that have no divisor in common."""
    variable, constant = _parted(size)
    divisor = math.gcd(*(k for _, k in variable.terms))
    if variable.terms[0][1] < 0:
        divisor = -divisor
    variable = Polynomial(tuple((monomial, k // divisor) for monomial, k in variable.terms))
    least -= constant
    if divisor < 0:  # -v >= n: v <= -n, which is not v >= 1 - n
        at_least, least, divisor = not at_least, 1 - least, -divisor
    least = -(-least // divisor)
    return Guard(variable, ">=" if at_least else "<=", least if at_least else least - 1, reason=reason)


def _equality(equal: bool, left: Polynomial | _Part, right: int, reason: str) -> Iterator[Guard]:
    if isinstance(left, Polynomial):
        variable, constant = _parted(left)
        yield Guard(variable, "==" if equal else "!=", right - constant, reason=reason)
        return
    size, divisor, operation = left
    variable, constant = _parted(size)
    if operation is operator.mod:
        if 0 <= right < divisor:
            yield Guard(variable, "==" if equal else "!=", (right - constant) % divisor, divisor, reason)
    elif equal:
        yield _linear(size, True, right * divisor, reason)
        yield _linear(size, False, (right + 1) * divisor, reason)
    else:
        raise NotPolynomial(f"a quotient by {divisor} is compared with {right}: {reason}")


def _parted(size: Polynomial) -> tuple[Polynomial, int]:
    """What follows dimensions in a size, and the constant."""
    constant = sum(k for monomial, k in size.terms if not monomial)
    return Polynomial(tuple(term for term in size.terms if term[0])), constant


def simplified(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """The guards, without those that others imply or that hold for all sizes; the first of equals stays."""
    found: dict[Size, list[Guard]] = {}
    for guard in guards:
        found.setdefault(guard.size, []).append(guard)
    return tuple([guard for alike in found.values() for guard in _simplified(alike)])


def _simplified(guards: Sequence[Guard]) -> Iterator[Guard]:
    """The same for guards of one size: bounds, then what it must be or must not be."""
    size = guards[0].size
    remainders = list(dict.fromkeys(g for g in guards if g.modulus))
    plain = [g for g in guards if not g.modulus]
    least = sum(k for _, k in size.terms) if all(k > 0 for _, k in size.terms) else -math.inf
    above = max((g for g in plain if g.relation == ">="), key=lambda g: g.number, default=None)
    below = min((g for g in plain if g.relation == "<="), key=lambda g: g.number, default=None)
    lowest = least if above is None else max(least, above.number)
    unequal = sorted({g.number: g for g in reversed(plain) if g.relation == "!="}.items())
    for number, guard in unequal:
        if number == lowest:
            above, lowest = guard._replace(relation=">=", number=number + 1), number + 1
    if above is not None and above.number > least and not _excluded(least, above.number, remainders):
        yield above
    if below is not None:
        yield below
    yield from dict.fromkeys(g for g in plain if g.relation == "==")
    for number, guard in unequal:
        if number > lowest and (below is None or number <= below.number):
            yield guard
    yield from remainders


_FEW: Final = 64


def _excluded(first: float, end: int, remainders: Sequence[Guard]) -> bool:
    """Whether guards of remainders exclude all the few integers from *first* to before *end*."""
    if not end - first <= _FEW:
        return False
    return all(any(not g.allows(number) for g in remainders) for number in range(int(first), end))
