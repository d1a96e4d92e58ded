"""From the tests that a step's Python makes of sizes to guards on the dimensions that these follow."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ..errors import GraphirError
from ..ir.guard import Guard
from ..ir.size import LARGEST, Dims, Polynomial, Size, add, bind, multiply, size_dims
from .extents import Axis, Derived, Extents, Number, Test
from .grid import NotPolynomial

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
    told = _told(extents, axis)
    if all(map(_is_plain, told.values())):
        return
    at = [_Numbers(extents, axis, point) for point in points]
    for test in extents.tests:
        left, right = (_substituted(number, told) for number in (test.left, test.right))
        if _is_plain(left) and _is_plain(right):
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
    told = _told(extents, axis)
    for name, symbol in extents.symbols.items():
        if not isinstance(symbol, Derived) or symbol.operation not in _IN_STEPS or _is_plain(made := told[name]):
            continue
        reason = f"Python makes a number of it in {symbol.place}"
        parts: list[tuple[Callable[[Dims], Any], _Function | _Remainder | None]] = [
            (_number_at(extents, axis, name), made if isinstance(made, _Function | _Remainder) else None)
        ]
        if isinstance(made, _Remainder):  # which may be written as what the quotient leaves
            quotient = _Function(made.size, ((operator.floordiv, (None, made.divisor)),), True)
            parts.append((quotient.at, quotient))
        for number, function in parts:
            found = number(points[0])
            if all(number(point) == found for point in points):
                guards = None if function is None else tuple(_relation(operator.eq, function, found, reason, points))
                if guards != ():
                    yield Steady(number, guards, symbol.place)


class _Remainder(NamedTuple):
    """The remainder of a size."""

    size: Polynomial
    divisor: int


class _Function(NamedTuple):
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
        return all(holds(self.of(size), bound) for size in _domain(self.size))


class _Unknown:
    """A number that depends on the dimensions in another way."""


_Told: TypeAlias = Size | float | _Remainder | _Function | _Unknown
_UNKNOWN: Final = _Unknown()


def _is_plain(number: _Told) -> bool:
    return isinstance(number, int | float)


def _told(extents: Extents, axis: Callable[[Axis], Size]) -> dict[str, _Told]:
    """Each symbol, as it follows the dimensions."""
    told: dict[str, _Told] = {}
    for name, symbol in extents.symbols.items():
        told[name] = axis(symbol) if isinstance(symbol, Axis) else _derived(symbol, told)
    return told


def _derived(symbol: Derived, told: Mapping[str, _Told]) -> _Told:
    operation, operands = symbol.operation, [_substituted(operand, told) for operand in symbol.operands]
    if all(map(_is_plain, operands)):
        return operation(*operands)
    if len(operands) == 2 and isinstance(by := operands[1], int):
        if operation is operator.and_ and by > 0 and by & (by + 1) == 0:
            operation, operands[1] = operator.mod, by + 1
        elif operation in (operator.lshift, operator.rshift) and 0 <= by < 64:
            operation = operator.mul if operation is operator.lshift else operator.floordiv
            operands[1] = 1 << by
    number = operands[0]
    if operation in (operator.floordiv, operator.mod) and isinstance(by := operands[1], int) and by > 0:
        if operation is operator.mod:
            number = _congruent(symbol.operands[0], by, told)
        if isinstance(number, Polynomial):
            if all(k % by == 0 for _, k in number.terms):
                return _divided(number, by) if operation is operator.floordiv else 0
            if operation is operator.mod:
                return _Remainder(number, by)
    if isinstance(number, Polynomial) and len(operands) == 2:
        by = operands[1]
        if operation is operator.mul and isinstance(by, int):
            return multiply(number, by)
        if operation is operator.pow and isinstance(by, int) and 0 < by <= _HIGHEST_POWER:
            with contextlib.suppress(GraphirError):  # a product of too many terms
                power: Size = number
                for _ in range(by - 1):
                    power = multiply(power, number)
                return power
    return _stepped(operation, operands)


def _congruent(number: Number, divisor: int, told: Mapping[str, _Told]) -> _Told:
    """A number of dimensions that has the same remainder: what was a remainder before needs not be one."""
    same = {
        name: size.size if isinstance(size, _Remainder) and size.divisor % divisor == 0 else size
        for name in size_dims(number if isinstance(number, Polynomial) else 0)
        for size in (told[name],)
    }
    return _substituted(number, same)


_ROUNDED: Final = (round, math.trunc, math.floor, math.ceil)
_IN_STEPS: Final = frozenset(
    {operator.floordiv, operator.mod, operator.rshift, operator.and_, operator.or_, operator.xor, *_ROUNDED}
    | {int.bit_length}
)
"""Operations that give one number for several sizes."""

_HIGHEST_POWER: Final = 4


def _stepped(operation: Callable[..., Any], operands: Sequence[_Told]) -> _Told:
    """What an operation makes of operands one of which is a size or a function of one."""
    places = [i for i, operand in enumerate(operands) if not _is_plain(operand)]
    inner = operands[places[0]]
    if isinstance(inner, Polynomial):
        inner = _Function(inner, (), True)
    if len(places) > 1 or not isinstance(inner, _Function):
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
    return _Function(inner.size, (*inner.steps, (operation, arguments)), inner.rises is rises)  # type: ignore[arg-type]


def _substituted(number: Number, told: Mapping[str, _Told]) -> _Told:
    """A number of symbols, as a number of dimensions."""
    if not isinstance(number, Polynomial):
        return number
    if len(number.terms) == 1 and len(number.terms[0][0]) == 1 and number.terms[0][1] == 1:
        return told[number.terms[0][0][0]]
    total: Size = 0
    function: _Told = 0
    for monomial, coefficient in number.terms:
        product: Size = coefficient
        for name in monomial:
            factor = told[name]
            if isinstance(factor, int | Polynomial):
                product = multiply(product, factor)
            elif len(monomial) == 1 and function == 0:
                function = _stepped(operator.mul, (factor, coefficient))
                product = 0
            else:
                return _UNKNOWN
        total = add(total, product)
    return total if function == 0 else _stepped(operator.add, (function, total))


class _Numbers:
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


def _number_at(extents: Extents, axis: Callable[[Axis], Size], name: str) -> Callable[[Dims], Any]:
    def number(point: Dims) -> Any:
        with contextlib.suppress(ArithmeticError, ValueError, GraphirError):
            return _Numbers(extents, axis, point).of(name)
        return None

    return number


_MIRRORED: Final = {
    operator.lt: operator.gt,
    operator.gt: operator.lt,
    operator.le: operator.ge,
    operator.ge: operator.le,
    operator.eq: operator.eq,
    operator.ne: operator.ne,
}


def _guards(test: Test, left: _Told, right: _Told, points: Sequence[Dims]) -> Iterator[Guard]:
    """What the dimensions must satisfy for a test to hold."""
    holds, reason = test.holds, f"Python tests it in {test.place}"
    if _is_plain(left):
        holds, left, right = _MIRRORED[holds], right, left
    if isinstance(left, Polynomial) and isinstance(right, Polynomial):
        left, right = add(left, multiply(-1, right)), 0
        if isinstance(left, int):
            return
    if not isinstance(right, int | float) or not isinstance(left, Polynomial | _Remainder | _Function):
        raise NotPolynomial(f"{reason}, and makes it of sizes in a way that no guard can say")
    if math.isfinite(right):
        yield from _relation(holds, left, right, reason, points)


def _relation(
    holds: Callable[[Any, Any], bool],
    left: Polynomial | _Remainder | _Function,
    right: float,
    reason: str,
    points: Sequence[Dims],
) -> Iterator[Guard]:
    """The guards for a relation of a size, or of what is made of it, to a number."""
    if isinstance(left, _Function):
        yield from _interval(holds, left, right, reason, points)
        return
    if holds in (operator.eq, operator.ne):
        if right == int(right):
            yield from _equality(holds is operator.eq, left, int(right), reason)
        return
    at_least = holds in (operator.ge, operator.gt)
    least = math.floor(right) + 1 if holds in (operator.gt, operator.le) else math.ceil(right)
    # What is at most n is less than n + 1: the boundary is the least number on the upper side.
    if isinstance(left, _Remainder):
        if least != 1:
            raise NotPolynomial(f"a remainder by {left.divisor} is compared with {right}: {reason}")
        yield from _equality(not at_least, left, 0, reason)
        return
    yield _linear(left, at_least, least, reason)


def _interval(
    holds: Callable[[Any, Any], bool], function: _Function, right: float, reason: str, points: Sequence[Dims]
) -> Iterator[Guard]:
    """The guards for the sizes from the first to the last for which a relation holds."""
    lowest, highest = _domain(function.size)
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


def _domain(size: Polynomial) -> tuple[int, int]:
    """The least and the largest value that a size is taken to have."""
    at_one = sum(k for _, k in size.terms)
    falls, rises = ({k > 0 for monomial, k in size.terms if monomial} == {sign} for sign in (False, True))
    return at_one if rises else -LARGEST, at_one if falls else LARGEST


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


def _equality(equal: bool, left: Polynomial | _Remainder, right: int, reason: str) -> Iterator[Guard]:
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
    """What follows dimensions in a size, and the constant."""
    constant = sum(k for monomial, k in size.terms if not monomial)
    return Polynomial(tuple(term for term in size.terms if term[0])), constant


def _divided(size: Polynomial, divisor: int) -> Polynomial:
    """The quotient of a size by what divides it."""
    return Polynomial(tuple((monomial, k // divisor) for monomial, k in size.terms))


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
