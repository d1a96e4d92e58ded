"""Sizes as a step's Python sees them: integers that know their origin, and the tests that Python makes of them.

``if x.shape[1] > 1024`` decides which operators run, and no dispatcher sees the test. So while a step is recorded, the
sizes of its tensors are of type :class:`Extent`: an ``int`` whose arithmetic gives extents and whose comparisons are
noted. The origin of a size is lost in ``int(n)``, ``float(n)``, ``math.sqrt(n)``, ``x.shape.numel()``, numpy and text,
and where ``n`` is looked up in a set or among the keys of a dict.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import GraphirError
from ...ir.size import Size, add, dimension, multiply
from .values import Value

__all__ = ["Axis", "Derived", "Extent", "Extents", "Number", "Symbol", "Test", "plain"]

Number: TypeAlias = Size | float
"""An integer or a float, or a polynomial of symbols."""


class Axis(NamedTuple):
    """The size or the stride of one dimension of a value, or the offset of the value.

    Attributes:
        value: the value, of one recording.
        dim: the dimension, counted from 0.
        of: ``shape``, ``strides`` or ``offset``.
    """

    value: Value
    dim: int
    of: str = "shape"

    @property
    def size(self) -> int:
        """The integer in the recording of the value."""
        if self.of == "offset":
            return self.value.offset
        return (self.value.shape if self.of == "shape" else self.value.strides)[self.dim]


class Derived(NamedTuple):
    """The result of an operation of Python's on numbers that is no polynomial of them.

    Attributes:
        operation: such as ``operator.floordiv``.
        operands: in order.
        place: the module and the source line that computed it.
    """

    operation: Callable[..., int | float]
    operands: tuple[Number, ...]
    place: str


Symbol: TypeAlias = Axis | Derived


class Test(NamedTuple):
    """A comparison of two numbers, in the form in which it is true.

    Attributes:
        holds: a comparison that is true of *left* and *right*, such as ``operator.lt``.
        left, right: the numbers.
        place: the module and the source line that asked.
    """

    holds: Callable[[Any, Any], bool]
    left: Number
    right: Number
    place: str


class Extents:
    """The sizes that the step's Python asked for in one recording, what it computed from them, and what it tested.

    Sizes that the step has kept from an earlier recording, such as in a global dict, are numbers without an origin.

    Attributes:
        symbols: what each name in a number stands for; a derived symbol comes after the symbols of its operands.
        tests: the tests in order, each once.
        seen: whether sizes are extents now: true while the step's own lines run, false while an operator runs.
        released: whether the recording is forgotten.

    Args:
        place: returns the module and the source line that run.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self.symbols: dict[str, Symbol] = {}
        self.tests: list[Test] = []
        self.seen = self.released = False
        self._place = place
        self._names: dict[tuple[int, int, str], str] = {}
        self._tested: set[tuple[object, ...]] = set()

    def release(self) -> None:
        """Forget the recording: an extent that the step has kept would keep it alive."""
        self.seen, self.released = False, True
        for found in (self.symbols, self.tests, self._names, self._tested):
            found.clear()

    def asked(self) -> tuple[object, ...]:
        """All symbols and tests, without their places: equal for two recordings that asked the same."""
        symbols = [
            (s.value.index, s.dim, s.of) if isinstance(s, Axis) else (s.operation, s.operands)
            for s in self.symbols.values()
        ]
        return (*symbols, *[(test.holds, test.left, test.right) for test in self.tests])

    def other_outcome(self, other: Extents) -> str:
        """The place of the first test that had another outcome in another recording; empty if no outcome differs."""
        for mine, its in zip(self.tests, other.tests, strict=False):
            if (mine.left, mine.right) != (its.left, its.right):
                break
            if mine.holds is not its.holds:
                return mine.place
        return ""

    def divisors(self, *operations: Callable[..., Any]) -> Iterator[int]:
        """The whole numbers by which these operations, such as ``operator.mod``, have divided."""
        for symbol in self.symbols.values():
            if isinstance(symbol, Derived) and symbol.operation in operations:
                _, by = symbol.operands
                if isinstance(by, int) and by:
                    yield by

    def axis(self, value: Value, dim: int, size: int, of: str = "shape") -> Extent:
        """The integer *size* as an extent that stands for an :class:`Axis` of *value*."""
        name = self._names.get((value.index, dim, of))
        if name is None:
            name = self._names[value.index, dim, of] = self._named(Axis(value, dim, of))
        return self._extent(size, dimension(name))

    def _number(self, number: int | float) -> Number:
        """A number, or the polynomial that it is of this recording's symbols."""
        if isinstance(number, _Traced):
            return number.origin[1] if number.origin[0] is self else plain(number)
        return int(number) if isinstance(number, int) else number

    def _named(self, symbol: Symbol) -> str:
        name = f"s{len(self.symbols)}"
        self.symbols[name] = symbol
        return name

    def _extent(self, number: int, size: Size) -> Extent:
        """The integer *number* as an extent whose polynomial is *size*."""
        made = Extent(number)
        made.origin = self, size
        return made

    def combined(self, operation: Callable[..., Any], operands: Sequence[int | float]) -> Any:
        """The result of *operation* on *operands*, traced where it is a number."""
        result = operation(*map(plain, operands))
        if not self.seen or type(result) not in (int, float):
            return result
        numbers = tuple(map(self._number, operands))
        exactly = _POLYNOMIALS.get(operation)  # of integers
        if exactly is not None and type(result) is int:
            with contextlib.suppress(GraphirError):  # a product of too many terms
                size: Size = exactly(*numbers)
                return self._extent(result, size)
        symbol = dimension(self._named(Derived(operation, numbers, self._place())))
        if type(result) is int:
            return self._extent(result, symbol)
        made = Ratio(result)
        made.origin = self, symbol
        return made

    def counted(self, number: int, length: int, step: int) -> None:
        """Note that *length* consists of *number* parts of *step* each, the last of which may be shorter."""
        self.compared(operator.le, length, number * step)
        if number:
            self.compared(operator.gt, length, (number - 1) * step)

    def compared(self, holds: Callable[[Any, Any], bool], left: int | float, right: int | float) -> bool:
        """The outcome of the comparison *holds* of two numbers, which is noted as a test."""
        outcome = holds(plain(left), plain(right))
        if self.seen:
            test = Test(holds if outcome else _OTHERWISE[holds], self._number(left), self._number(right), "")
            if test not in self._tested:
                self._tested.add(test)
                self.tests.append(test._replace(place=self._place()))
        return outcome


class _Kind(type):
    """The metaclass of traced numbers: their types are equal to Python's own, so that ``type(n) == int``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[-2]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[-2])


class _Traced(metaclass=_Kind):
    """A number that knows its origin.

    Attributes:
        origin: the :class:`Extents` of its recording, and the polynomial of their symbols that it is.
    """

    origin: tuple[Extents, Size]

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self) -> bool:
        return self.origin[0].compared(operator.ne, self, 0)  # type: ignore[arg-type]

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __reduce__(self) -> Any:
        return type(plain(self)), (plain(self),)  # type: ignore[arg-type]


class Extent(_Traced, int):
    """The size of a tensor, or an integer that Python computes from sizes."""

    __hash__ = int.__hash__

    @property
    def real(self) -> int:
        return self

    @property
    def numerator(self) -> int:
        return self

    def conjugate(self) -> int:
        return self

    def bit_length(self) -> int:
        return self.origin[0].combined(int.bit_length, (self,))  # type: ignore[no-any-return]

    def bit_count(self) -> int:
        return self.origin[0].combined(int.bit_count, (self,))  # type: ignore[no-any-return]


class Ratio(_Traced, float):
    """A float that Python computes from sizes."""

    __hash__ = float.__hash__

    def is_integer(self) -> bool:
        return self % 1 == 0

    def __int__(self) -> int:
        return int(plain(math.trunc(self)))


def plain(number: int | float) -> int | float:
    """The number as an ``int`` or ``float`` of Python's, without its origin."""
    return int(number) if isinstance(number, Extent) else float(number) if isinstance(number, Ratio) else number


_POLYNOMIALS: Final[dict[Callable[..., Any], Callable[..., Size]]] = {
    operator.add: add,
    operator.sub: lambda a, b: add(a, multiply(-1, b)),
    operator.mul: multiply,
    operator.neg: lambda a: multiply(-1, a),
    operator.pos: lambda a: a,
}
_OTHERWISE: Final = {
    operator.lt: operator.ge,
    operator.ge: operator.lt,
    operator.gt: operator.le,
    operator.le: operator.gt,
    operator.eq: operator.ne,
    operator.ne: operator.eq,
}
_UNARY: Final[dict[str, Callable[..., Any]]] = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": operator.abs,
    "__invert__": operator.invert,
    "__round__": round,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
}
_BINARY: Final[dict[str, Callable[..., Any]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def _trace(name: str, operation: Callable[..., Any], reflected: bool = False) -> None:
    """Define the method *name* of both kinds of traced numbers, which traces or notes *operation*."""
    tests = operation in _OTHERWISE

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        traced = [operand.origin[0] for operand in operands if isinstance(operand, _Traced)]
        extents = next((found for found in traced if not found.released), traced[0])
        return extents.compared(operation, *operands) if tests else extents.combined(operation, operands)

    setattr(_Traced, name, method)


for _name, _operation in _UNARY.items():
    _trace(_name, _operation)
for _name, _operation in _BINARY.items():
    _trace(f"__{_name}__", _operation)
    _trace(f"__r{_name}__", _operation, reflected=True)
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    _trace(f"__{_name}__", getattr(operator, _name))
