"""Sizes as a step's Python sees them: integers that know where they came from, and the tests that are made of them.

``if x.shape[1] > 1024`` decides which operators run, and no dispatcher sees it. So while a step is recorded the sizes
of its tensors are :class:`Extent`, an ``int`` whose arithmetic gives extents again and whose comparisons are noted.
Who asks otherwise gets a plain number: ``int(n)``, ``float(n)``, ``math.sqrt(n)``, numpy, and whether ``n``
is in a set or among the keys of a dict.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import reduce
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import GraphirError
from ..ir.size import Size, add, dimension, multiply
from .values import Alias, Value

__all__ = ["Axis", "Derived", "Extents", "Number", "Symbol", "Test", "plain"]

Number: TypeAlias = Size | float
"""An integer or a float, or a polynomial of symbols."""


class Axis(NamedTuple):
    """The size of one dimension of a value."""

    value: Value
    dim: int

    @property
    def size(self) -> int:
        """In the recording that it belongs to."""
        return self.value.shape[self.dim]


class Derived(NamedTuple):
    """What *operation* makes of numbers, where that is no polynomial of them."""

    operation: Callable[..., int | float]
    operands: tuple[Number, ...]


Symbol: TypeAlias = Axis | Derived


class Test(NamedTuple):
    """A comparison of two numbers, as it came out.

    Attributes:
        holds: such as ``operator.lt``.
        left, right: the numbers.
        place: the module and the source line that asked.
    """

    holds: Callable[[Any, Any], bool]
    left: Number
    right: Number
    place: str


class Extents:
    """The sizes that the tensors of one recording have, and what was asked about them.

    Attributes:
        symbols: what each name in a number stands for; a derived one stands behind those that it is made of.
        tests: in order, each once.
        seen: whether sizes are extents now: between the step's own lines, not while an operator runs.

    Args:
        find: the alias of a tensor, if it belongs to the recording.
        place: the module and the source line that run.
    """

    def __init__(self, find: Callable[[torch.Tensor], Alias | None], place: Callable[[], str]) -> None:
        self.symbols: dict[str, Symbol] = {}
        self.tests: list[Test] = []
        self.seen = False
        self._find, self._place = find, place
        self._names: dict[tuple[int, int], str] = {}
        self._tested: set[tuple[object, ...]] = set()

    def release(self) -> None:
        """Forget the recording, of which somebody may have kept an extent."""
        self.seen = False
        for found in (self.symbols, self.tests, self._names, self._tested):
            found.clear()

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """While this is active, the sizes that fake tensors tell are extents."""

        def size(tensor: torch.Tensor, dim: Any = None) -> Any:
            shape = self._shape(tensor)
            return shape if dim is None else shape[dim] if -len(shape) <= dim < len(shape) else _size_of(tensor, dim)

        def numel(tensor: torch.Tensor) -> int:
            return reduce(operator.mul, self._shape(tensor), 1)

        def length(sized: Sized) -> int:
            if self.seen and isinstance(sized, FakeTensor) and (shape := self._shape(sized)):
                return shape[0]
            return _length_of(sized)

        patched = {"shape": property(self._shape), "size": size, "numel": numel, "nelement": numel}
        before, self.seen = self.seen, True
        try:
            for name, value in patched.items():
                setattr(FakeTensor, name, value)
            builtins.len = length  # it makes a plain integer of what a tensor's __len__ returns
            yield
        finally:
            builtins.len = _length_of
            self.seen = before
            for name in patched:  # they belong to its base class
                delattr(FakeTensor, name)

    def _shape(self, tensor: torch.Tensor) -> torch.Size:
        shape = _shape_of(tensor)
        alias = self._find(tensor) if self.seen else None
        if alias is None or alias.value.shape != shape:
            return shape
        value = alias.value
        return torch.Size([self._axis(value, dim, size) for dim, size in enumerate(shape)])

    def _axis(self, value: Value, dim: int, size: int) -> Extent:
        name = self._names.get((value.index, dim))
        if name is None:
            name = self._names[value.index, dim] = self._named(Axis(value, dim))
        return self._extent(size, dimension(name))

    def _named(self, symbol: Symbol) -> str:
        name = f"s{len(self.symbols)}"
        self.symbols[name] = symbol
        return name

    def _extent(self, number: int, size: Size) -> Extent:
        """The integer *number*, which is *size*."""
        made = Extent(number)
        made.origin = self, size
        return made

    def combined(self, operation: Callable[..., Any], operands: Sequence[int | float]) -> Any:
        """What *operation* makes of *operands*."""
        result = operation(*map(plain, operands))
        if not self.seen or type(result) not in (int, float):
            return result
        numbers = tuple(map(_number_of, operands))
        exactly = _POLYNOMIALS.get(operation)  # of integers
        if exactly is not None and type(result) is int:
            with contextlib.suppress(GraphirError):  # a product of too many terms
                size: Size = exactly(*numbers)
                return self._extent(result, size)
        symbol = dimension(self._named(Derived(operation, numbers)))
        if type(result) is int:
            return self._extent(result, symbol)
        made = Ratio(result)
        made.origin = self, symbol
        return made

    def compared(self, holds: Callable[[Any, Any], bool], left: int | float, right: int | float) -> bool:
        """Whether *holds* of the two numbers, which is noted."""
        outcome = holds(plain(left), plain(right))
        if self.seen:
            test = Test(holds if outcome else _OTHERWISE[holds], _number_of(left), _number_of(right), "")
            if test not in self._tested:
                self._tested.add(test)
                self.tests.append(test._replace(place=self._place()))
        return outcome


class _Traced:
    """A number that knows where it came from.

    Attributes:
        origin: the extents of which recording it belongs to, and which polynomial of their symbols it is.
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
    """The size of a tensor, or what Python computes from such sizes."""

    __hash__ = int.__hash__


class Ratio(_Traced, float):
    """A float that Python computes from sizes."""

    __hash__ = float.__hash__


def plain(number: int | float) -> int | float:
    """The number without what it knows of its origin."""
    return int(number) if isinstance(number, Extent) else float(number) if isinstance(number, Ratio) else number


def _number_of(number: int | float) -> Number:
    if isinstance(number, _Traced):
        return number.origin[1]
    return int(number) if isinstance(number, int) else number


_shape_of: Final[Callable[[torch.Tensor], torch.Size]] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_size_of: Final = torch.Tensor.size
_length_of: Final = builtins.len
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
    """Let both kinds of traced numbers do an operation of Python's."""
    tests = operation in _OTHERWISE

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        extents = self.origin[0]
        return extents.compared(operation, *operands) if tests else extents.combined(operation, operands)

    setattr(_Traced, name, method)


for _name, _operation in _UNARY.items():
    _trace(_name, _operation)
for _name, _operation in _BINARY.items():
    _trace(f"__{_name}__", _operation)
    _trace(f"__r{_name}__", _operation, reflected=True)
for _name in ("lt", "le", "eq", "ne", "gt", "ge"):
    _trace(f"__{_name}__", getattr(operator, _name))
