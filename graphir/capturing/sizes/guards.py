"""Guards from what a step's Python asked about sizes: conditions under which each test comes out as recorded."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ...ir.fitting import NotPolynomial
from ...ir.guard import Guard
from ...ir.size import Dims, Polynomial, Size, add, multiply
from ..record.extents import Axis, Extents
from .formulas import Formulas, Quotient, Relation, Remainder, is_plain

__all__ = ["equality", "guards_of", "simplified"]


def guards_of(extents: Extents, axis: Callable[[Axis], Size], points: Sequence[Dims]) -> Iterator[Guard]:
    """Conditions on the dimensions under which Python asks and computes as it did, without trivial ones.

    Args:
        extents: of the recording at one of *points*.
        axis: the size of an axis as it follows the dimensions.
        points: values of the dimensions at which Python asked the same about sizes.

    Raises:
        NotPolynomial: Python tests or computes something that no guard can say.
    """
    formulas = Formulas(extents, axis, points)
    for relation in formulas.kept:
        yield from _guards(relation)
    for test in extents.tests:
        left, right = formulas.of(test.left), formulas.of(test.right)
        reason = f"Python tests sizes in {test.place}"
        if left is None or right is None:
            raise _unsaid(reason)
        yield from _guards(Relation(test.holds, left, right, reason))


_MIRRORED: Final = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}


def _unsaid(reason: str) -> NotPolynomial:
    return NotPolynomial(f"{reason}, and no guard can express the test")


def _guards(relation: Relation) -> Iterator[Guard]:
    """Conditions on the dimensions under which a relation holds."""
    holds, left, right, reason = relation
    if is_plain(left) or isinstance(right, Quotient | Remainder):
        holds, left, right = _MIRRORED[holds], right, left
    if isinstance(left, Quotient) and isinstance(right, int | Polynomial):
        right = multiply(left.divisor, right)
        left = left.size
    if isinstance(left, Polynomial) and isinstance(right, Polynomial):
        left, right = add(left, multiply(-1, right)), 0
    if is_plain(left) and is_plain(right):  # the relation depends on no dimension
        return
    if not isinstance(right, int | float) or not isinstance(left, Polynomial | Remainder):
        raise _unsaid(reason)
    if not math.isfinite(right):
        return
    if holds in (operator.eq, operator.ne):
        if right == int(right):
            yield from equality(holds is operator.eq, left, int(right), reason)
        return
    at_least = holds in (operator.ge, operator.gt)
    least = math.floor(right) + 1 if holds in (operator.gt, operator.le) else math.ceil(right)
    # At most n is less than n + 1: the boundary is the least number on the upper side.
    if isinstance(left, Remainder):
        if least != 1:
            raise NotPolynomial(f"a remainder by {left.divisor} is compared with {right}: {reason}")
        yield from equality(not at_least, left, 0, reason)
        return
    yield _linear(left, at_least, least, reason)


def _linear(size: Polynomial, at_least: bool, least: int, reason: str) -> Guard:
    """``size >= least``, or the contrary, with coefficients that have no divisor in common."""
    variable, constant = _parted(size)
    divisor = math.gcd(*(k for _, k in variable.terms))
    if variable.terms[0][1] < 0:
        divisor = -divisor
    variable = _divided(variable, divisor)
    least -= constant
    if divisor < 0:  # -v >= n: v <= -n, which is not v >= 1 - n
        at_least, least, divisor = not at_least, 1 - least, -divisor
    least = -(-least // divisor)
    return Guard(variable, ">=" if at_least else "<=", least if at_least else least - 1, reason=reason)


def equality(equal: bool, left: Polynomial | Remainder, right: int, reason: str) -> Iterator[Guard]:
    """``left == right``, or the contrary; nothing if no integers satisfy the equation."""
    relation = "==" if equal else "!="
    variable, constant = _parted(left if isinstance(left, Polynomial) else left.size)
    sign = -1 if variable.terms[0][1] < 0 else 1
    if isinstance(left, Polynomial):
        divisor = sign * math.gcd(*(k for _, k in variable.terms))
        if (right - constant) % divisor == 0:
            yield Guard(_divided(variable, divisor), relation, (right - constant) // divisor, reason=reason)
    elif 0 <= right < left.divisor:
        number = sign * (right - constant) % left.divisor
        yield Guard(_divided(variable, sign), relation, number, left.divisor, reason)


def _parted(size: Polynomial) -> tuple[Polynomial, int]:
    """The terms of a size that follow dimensions, and its constant."""
    constant = sum(k for monomial, k in size.terms if not monomial)
    return Polynomial(tuple(term for term in size.terms if term[0])), constant


def _divided(size: Polynomial, divisor: int) -> Polynomial:
    """The quotient of a size by a number that divides each term."""
    return Polynomial(tuple((monomial, k // divisor) for monomial, k in size.terms))


def simplified(guards: Iterable[Guard]) -> tuple[Guard, ...]:
    """The guards, without those that follow from others or hold for all sizes; of equal guards the first stays."""
    found: dict[Size, list[Guard]] = {}
    for guard in guards:
        found.setdefault(guard.size, []).append(guard)
    return tuple([guard for alike in found.values() for guard in _simplified(alike)])


def _simplified(guards: Sequence[Guard]) -> Iterator[Guard]:
    """The guards of one size, simplified: bounds, then numbers that it must or must not be, then remainders."""
    size = guards[0].size
    unlike: dict[tuple[object, ...], Guard] = {}
    for guard in guards:
        unlike.setdefault(guard[:-1], guard)  # whatever their reasons
    plain = [g for g in unlike.values() if not g.modulus]
    least = sum(k for _, k in size.terms) if all(k > 0 for _, k in size.terms) else -math.inf
    above = max((g for g in plain if g.relation == ">="), key=lambda g: g.number, default=None)
    below = min((g for g in plain if g.relation == "<="), key=lambda g: g.number, default=None)
    lowest = least if above is None else max(least, above.number)
    unequal = sorted({g.number: g for g in reversed(plain) if g.relation == "!="}.items())
    for number, guard in unequal:
        if number == lowest:
            above, lowest = guard._replace(relation=">=", number=number + 1), number + 1
    if above is not None and above.number > least:
        yield above
    if below is not None:
        yield below
    yield from (g for g in plain if g.relation == "==")
    for number, guard in unequal:
        if number > lowest and (below is None or number <= below.number):
            yield guard
    yield from (g for g in unlike.values() if g.modulus)
