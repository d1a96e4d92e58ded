"""From the tests that a step's Python makes of sizes to guards on the dimensions that these follow."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from ...ir.fitting import NotPolynomial
from ...ir.guard import Guard
from ...ir.size import Dims, Polynomial, Size, add, bind, multiply
from ..record.extents import Axis, Derived, Extents, Test
from .formulas import (
    IN_STEPS,
    Formula,
    Function,
    Numbers,
    Remainder,
    divided,
    domain,
    formulas_of,
    is_plain,
    number_at,
    substituted,
)

__all__ = ["Steady", "guards_of", "simplified", "steady_in"]


def guards_of(extents: Extents, axis: Callable[[Axis], Size], points: Sequence[Dims]) -> Iterator[Guard]:
    """What the dimensions must satisfy for the tests to come out as they did, the trivial left out.

    Args:
        extents: of the recording at one of *points*.
        axis: the size of an axis as it follows the dimensions.
        points: values of the dimensions at which the step was recorded, each time the same. A test that comes out
            otherwise at one of them makes no difference.

    Raises:
        NotPolynomial: a test is of something that no guard can say.
    """
    formulas = formulas_of(extents, axis)
    if all(map(is_plain, formulas.values())):
        return
    at = [Numbers(extents, axis, point) for point in points]
    for test in extents.tests:
        left, right = (substituted(number, formulas) for number in (test.left, test.right))
        if is_plain(left) and is_plain(right):
            continue
        if all(numbers.comes_out(test) for numbers in at):
            yield from _guards(test, left, right, points)


_FAR: Final = 1 << 13
"""How many times the captured size a further recording is at most."""


class Steady(NamedTuple):
    """A number that Python made in steps of a size, as ``n // 64`` is, and that was the same in each recording.

    The step may hold it, or may only have tested it.

    Attributes:
        number: what it is at a point.
        guards: what the dimensions must satisfy for it to stay; None if no guard can say that.
        place: the module and the source line that made it.
    """

    number: Callable[[Dims], Any]
    guards: tuple[Guard, ...] | None
    place: str

    def stays(self, point: Dims, other: Dims) -> bool:
        """Whether it is the same at two points."""
        return bool(self.number(point) == self.number(other))

    def elsewhere(self, here: Dims, guards: Sequence[Guard]) -> dict[str, int] | None:
        """A point near by where *guards* hold and a number is another one; None where there seems to be none."""

        def changes(dim: str, value: int) -> bool:
            return not self.stays(here, {**here, dim: value})

        for dim, value in here.items():
            same, other = value, value + 1
            while not changes(dim, other) and other <= _FAR * value:
                same, other = other, 2 * other
            while other - same > 1:
                middle = (same + other) // 2
                same, other = (same, middle) if changes(dim, middle) else (middle, other)
            for near in range(other, other + 3):
                point = {**here, dim: near}
                if changes(dim, near) and all(guard.holds(point) for guard in guards):
                    return point
        return None


def steady_in(extents: Extents, axis: Callable[[Axis], Size], points: Sequence[Dims]) -> Iterator[Steady]:
    """The numbers of a recording that are the same at all *points* and may be others elsewhere.

    Args:
        extents, axis, points: as :func:`guards_of` takes them.
    """
    formulas = formulas_of(extents, axis)
    for name, symbol in extents.symbols.items():
        if not isinstance(symbol, Derived) or symbol.operation not in IN_STEPS or is_plain(made := formulas[name]):
            continue
        reason = f"Python makes a number of it in {symbol.place}"
        parts: list[tuple[Callable[[Dims], Any], Function | Remainder | None]] = [
            (number_at(extents, axis, name), made if isinstance(made, Function | Remainder) else None)
        ]
        if isinstance(made, Remainder):  # which may be written as what the quotient leaves
            quotient = Function(made.size, ((operator.floordiv, (None, made.divisor)),), True)
            parts.append((quotient.at, quotient))
        for number, function in parts:
            found = number(points[0])
            if all(number(point) == found for point in points):
                guards = None if function is None else tuple(_relation(operator.eq, function, found, reason, points))
                if guards != ():
                    yield Steady(number, guards, symbol.place)


_MIRRORED: Final = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}


def _guards(test: Test, left: Formula, right: Formula, points: Sequence[Dims]) -> Iterator[Guard]:
    """What the dimensions must satisfy for a test to hold."""
    holds, reason = test.holds, f"Python tests it in {test.place}"
    if is_plain(left):
        holds, left, right = _MIRRORED[holds], right, left
    if isinstance(left, Polynomial) and isinstance(right, Polynomial):
        left, right = add(left, multiply(-1, right)), 0
        if isinstance(left, int):
            return
    if not isinstance(right, int | float) or not isinstance(left, Polynomial | Remainder | Function):
        raise NotPolynomial(f"{reason}, and makes it of sizes in a way that no guard can say")
    if math.isfinite(right):
        yield from _relation(holds, left, right, reason, points)


def _relation(
    holds: Callable[[Any, Any], bool],
    left: Polynomial | Remainder | Function,
    right: float,
    reason: str,
    points: Sequence[Dims],
) -> Iterator[Guard]:
    """The guards for a relation of a size, or of what is made of it, to a number."""
    if isinstance(left, Function):
        yield from _interval(holds, left, right, reason, points)
        return
    if holds in (operator.eq, operator.ne):
        if right == int(right):
            yield from _equality(holds is operator.eq, left, int(right), reason)
        return
    at_least = holds in (operator.ge, operator.gt)
    least = math.floor(right) + 1 if holds in (operator.gt, operator.le) else math.ceil(right)
    # What is at most n is less than n + 1: the boundary is the least number on the upper side.
    if isinstance(left, Remainder):
        if least != 1:
            raise NotPolynomial(f"a remainder by {left.divisor} is compared with {right}: {reason}")
        yield from _equality(not at_least, left, 0, reason)
        return
    yield _linear(left, at_least, least, reason)


def _interval(
    holds: Callable[[Any, Any], bool], function: Function, right: float, reason: str, points: Sequence[Dims]
) -> Iterator[Guard]:
    """The guards for the sizes from the first to the last for which a relation holds."""
    lowest, highest = domain(function.size)
    here = bind(function.size, points[0])
    if holds is operator.ne:
        sides = {function.at(point) > right for point in points}
        if len(sides) > 1:
            raise NotPolynomial(f"{reason}, and it is not {right} on both sides of that")
        holds = operator.gt if sides == {True} else operator.lt

    def holds_until(end: int) -> int:
        """The last for which it holds, on the way from *here* to *end*."""
        good, bad = here, end
        if holds(function.of(bad), right):
            return bad
        while abs(bad - good) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if holds(function.of(middle), right) else (good, middle)
        return good

    least, most = holds_until(lowest), holds_until(highest)
    if least > lowest:
        yield _linear(function.size, True, least, reason)
    if most < highest:
        yield _linear(function.size, False, most + 1, reason)


def _linear(size: Polynomial, at_least: bool, least: int, reason: str) -> Guard:
    """``size >= least``, or the contrary, with coefficients that have no divisor in common."""
    variable, constant = _parted(size)
    divisor = math.gcd(*(k for _, k in variable.terms))
    if variable.terms[0][1] < 0:
        divisor = -divisor
    variable = divided(variable, divisor)
    least -= constant
    if divisor < 0:  # -v >= n: v <= -n, which is not v >= 1 - n
        at_least, least, divisor = not at_least, 1 - least, -divisor
    least = -(-least // divisor)
    return Guard(variable, ">=" if at_least else "<=", least if at_least else least - 1, reason=reason)


def _equality(equal: bool, left: Polynomial | Remainder, right: int, reason: str) -> Iterator[Guard]:
    relation = "==" if equal else "!="
    variable, constant = _parted(left if isinstance(left, Polynomial) else left.size)
    sign = -1 if variable.terms[0][1] < 0 else 1
    if isinstance(left, Polynomial):
        divisor = sign * math.gcd(*(k for _, k in variable.terms))
        if (right - constant) % divisor == 0:
            yield Guard(divided(variable, divisor), relation, (right - constant) // divisor, reason=reason)
    elif 0 <= right < left.divisor:
        number = sign * (right - constant) % left.divisor
        yield Guard(divided(variable, sign), relation, number, left.divisor, reason)


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
    unlike: dict[tuple[object, ...], Guard] = {}
    for guard in guards:
        unlike.setdefault(guard[:-1], guard)  # whatever their reasons
    guards = list(unlike.values())
    remainders = [g for g in guards if g.modulus]
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
    yield from (g for g in plain if g.relation == "==")
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
