"""Sizes as a step's Python sees them: integers that know where they came from, and the tests that are made of them.

``if x.shape[1] > 1024`` decides which operators run, and no dispatcher sees it. So while a step is recorded the sizes
of its tensors are :class:`Extent`, an ``int`` whose arithmetic gives extents again and whose comparisons are noted.
Who asks otherwise gets a plain number: ``int(n)``, ``float(n)``, ``math.sqrt(n)``, ``x.shape.numel()``,
numpy, text, and whether ``n`` is in a set or among the keys of a dict.

Some tests Python makes by itself: where a slice ends, and how many numbers a ``range``, or tensors a split, has.
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
from .patches import replaced
from .values import Alias, Value

__all__ = ["Axis", "Derived", "Extents", "Number", "Range", "Symbol", "Test", "plain"]

Number: TypeAlias = Size | float
"""An integer or a float, or a polynomial of symbols."""


class Axis(NamedTuple):
    """The size of one dimension of a value, its stride there, or the offset of the value.

    Attributes:
        value: in the recording that it belongs to.
        dim: counted from 0.
        of: ``shape``, ``strides`` or ``offset``.
    """

    value: Value
    dim: int
    of: str = "shape"

    @property
    def size(self) -> int:
        """In the recording that it belongs to."""
        if self.of == "offset":
            return self.value.offset
        return (self.value.shape if self.of == "shape" else self.value.strides)[self.dim]


class Derived(NamedTuple):
    """What *operation* makes of numbers, where that is no polynomial of them.

    Attributes:
        operation: of Python's.
        operands: in order.
        place: the module and the source line that made it.
    """

    operation: Callable[..., int | float]
    operands: tuple[Number, ...]
    place: str


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
        self._names: dict[tuple[int, int, str], str] = {}
        self._tested: set[tuple[object, ...]] = set()

    def release(self) -> None:
        """Forget the recording, of which somebody may have kept an extent."""
        self.seen = False
        for found in (self.symbols, self.tests, self._names, self._tested):
            found.clear()

    def asked(self) -> tuple[object, ...]:
        """What was asked about which sizes, but for the lines: equal where another recording asked the same."""
        symbols = [
            (s.value.index, s.dim, s.of) if isinstance(s, Axis) else (s.operation, s.operands)
            for s in self.symbols.values()
        ]
        return (*symbols, *[(test.holds, test.left, test.right) for test in self.tests])

    @contextlib.contextmanager
    def given(self) -> Iterator[None]:
        """While this is active, the sizes that fake tensors tell are extents."""

        def size(tensor: torch.Tensor, dim: Any = None) -> Any:
            shape = self._shape(tensor)
            return shape if dim is None else shape[dim] if -len(shape) <= dim < len(shape) else _size_of(tensor, dim)

        def stride(tensor: torch.Tensor, dim: Any = None) -> Any:
            found = self._strides(tensor)
            return found if dim is None else found[dim] if -len(found) <= dim < len(found) else _stride_of(tensor, dim)

        def numel(tensor: torch.Tensor) -> int:
            return reduce(operator.mul, self._shape(tensor), 1)

        def length(sized: Sized) -> int:
            if self.seen and isinstance(sized, FakeTensor) and (shape := self._shape(sized)):
                return shape[0]
            return _length_of(sized)

        def split(tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
            parts = _split_of(tensor, split_size, dim)  # type: ignore[no-untyped-call]
            size = self._shape(tensor)[dim]
            if isinstance(split_size, int) and isinstance(size, Extent):
                self.counted(len(parts), size, split_size)
            return parts

        def getitem(tensor: torch.Tensor, index: Any) -> Any:
            self._sliced(tensor, index)
            return _item_of(tensor, index)

        def setitem(tensor: torch.Tensor, index: Any, value: Any) -> None:
            self._sliced(tensor, index)
            _set_item_of(tensor, index, value)

        methods = {
            "shape": property(self._shape),
            "size": size,
            "stride": stride,
            "storage_offset": lambda tensor: self._offset(tensor),
            "numel": numel,
            "nelement": numel,
            "nbytes": property(lambda tensor: numel(tensor) * tensor.itemsize),
            "split": split,
            "__getitem__": getitem,
            "__setitem__": setitem,
        }
        # Python makes a plain integer of what a tensor's __len__ returns.
        own = {"len": length, "range": Range}
        before, self.seen = self.seen, True
        try:
            with (
                replaced(FakeTensor, methods),
                replaced(torch, {"numel": lambda input: input.numel()}),
                replaced(builtins, own),
            ):
                yield
        finally:
            self.seen = before

    def _value(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor shows, if it belongs to the recording and has the value's shape."""
        alias = self._find(tensor) if self.seen else None
        return alias.value if alias is not None and alias.value.shape == _shape_of(tensor) else None

    def _shape(self, tensor: torch.Tensor) -> torch.Size:
        shape, value = _shape_of(tensor), self._value(tensor)
        if value is None:
            return shape
        return torch.Size([self._axis(value, dim, size) for dim, size in enumerate(shape)])

    def _strides(self, tensor: torch.Tensor) -> tuple[int, ...]:
        strides, value = _stride_of(tensor), self._value(tensor)
        if value is None or value.strides != strides:
            return strides
        return tuple([self._axis(value, dim, stride, "strides") for dim, stride in enumerate(strides)])

    def _offset(self, tensor: torch.Tensor) -> int:
        offset, value = int(_offset_of(tensor)), self._value(tensor)
        return offset if value is None or value.offset != offset else self._axis(value, 0, offset, "offset")

    def _sliced(self, tensor: torch.Tensor, index: Any) -> None:
        """Note on which side of a tensor's size a slice starts and ends: what is beyond the end is left out."""
        items = index if isinstance(index, tuple) else (index,)
        if not any(type(item) is slice for item in items) or self._value(tensor) is None:
            return
        shape = self._shape(tensor)
        after = [_dims_of(item) for item in items]
        dim = 0
        for item, taken in zip(items, after, strict=True):
            if item is Ellipsis:
                dim = len(shape) - (sum(after) - dim)
            elif type(item) is slice and dim < len(shape):
                for bound in (item.start, item.stop):
                    if isinstance(bound, int):
                        self._clamped(bound, shape[dim])
            dim += taken

    def _clamped(self, bound: int, size: int) -> None:
        if plain(bound) < 0:
            bound, size = bound + size, 0
        holds = operator.le if plain(bound) <= plain(size) else operator.ge
        self.compared(holds, bound, size)

    def _axis(self, value: Value, dim: int, size: int, of: str = "shape") -> Extent:
        name = self._names.get((value.index, dim, of))
        if name is None:
            name = self._names[value.index, dim, of] = self._named(Axis(value, dim, of))
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
        symbol = dimension(self._named(Derived(operation, numbers, self._place())))
        if type(result) is int:
            return self._extent(result, symbol)
        made = Ratio(result)
        made.origin = self, symbol
        return made

    def counted(self, number: int, length: int, step: int) -> None:
        """Note that a *length* has a *number* of steps, the last of which may be shorter."""
        if number:
            self.compared(operator.eq, -(-length // step), number)
        else:
            self.compared(operator.le, length, 0)

    def compared(self, holds: Callable[[Any, Any], bool], left: int | float, right: int | float) -> bool:
        """Whether *holds* of the two numbers, which is noted."""
        outcome = holds(plain(left), plain(right))
        if self.seen:
            test = Test(holds if outcome else _OTHERWISE[holds], _number_of(left), _number_of(right), "")
            if test not in self._tested:
                self._tested.add(test)
                self.tests.append(test._replace(place=self._place()))
        return outcome


class _Kind(type):
    """The type of traced numbers' types, which are equal to Python's own: ``type(n) == int``."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[-2]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[-2])


class _Traced(metaclass=_Kind):
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

    def bit_length(self) -> int:
        return self.origin[0].combined(int.bit_length, (self,))  # type: ignore[no-any-return]


class Ratio(_Traced, float):
    """A float that Python computes from sizes."""

    __hash__ = float.__hash__

    def is_integer(self) -> bool:
        return self % 1 == 0

    def __int__(self) -> int:
        return int(plain(math.trunc(self)))


class _Ranges(type):
    """The type of what stands for ``range``, of which every range is an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _range)


class Range(metaclass=_Ranges):
    """``range``, which notes of extents how many numbers there are."""

    def __new__(cls, *bounds: Any) -> Any:
        made = _range(*bounds)
        for bound in bounds:
            if isinstance(bound, Extent):
                start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
                length = stop - start if plain(step) > 0 else start - stop
                bound.origin[0].counted(len(made), length, abs(step))
                break
        return made


def plain(number: int | float) -> int | float:
    """The number without what it knows of its origin."""
    return int(number) if isinstance(number, Extent) else float(number) if isinstance(number, Ratio) else number


def _number_of(number: int | float) -> Number:
    if isinstance(number, _Traced):
        return number.origin[1]
    return int(number) if isinstance(number, int) else number


def _dims_of(item: Any) -> int:
    """How many dimensions of a tensor an item of an index is about; an ellipsis: those that are left."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


_shape_of: Final[Callable[[torch.Tensor], torch.Size]] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_size_of: Final = torch.Tensor.size
_length_of: Final = builtins.len
_stride_of: Final = torch.Tensor.stride
_offset_of: Final = torch.Tensor.storage_offset
_split_of: Final = torch.Tensor.split
_item_of: Final = torch.Tensor.__getitem__
_set_item_of: Final = torch.Tensor.__setitem__
_range: Final = range
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
