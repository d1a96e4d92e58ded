"""The methods of fake tensors that tell a step its sizes: in the thread that records, the sizes are extents.

Torch itself tests some sizes: where a slice ends, and how many tensors a split has. These tests are noted here. Uses of
an integer that call none of its methods are not noted: ``len``, and how many numbers a ``range`` has.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..isolate.patches import replaced
from .extents import Extent, Extents, plain
from .values import Alias, Value

__all__ = ["ToldSizes"]


class ToldSizes:
    """The sizes that the fake tensors of one recording tell.

    Args:
        extents: note the sizes and the tests of them.
        find: returns the alias of a tensor; None if the tensor is not of the recording.
    """

    def __init__(self, extents: Extents, find: Callable[[torch.Tensor], Alias | None]) -> None:
        self._extents, self._find = extents, find

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """While this is active, the sizes that fake tensors tell are extents."""

        def size(tensor: torch.Tensor, dim: Any = None) -> Any:
            shape = self._shape(tensor)
            return shape if dim is None else shape[dim] if -len(shape) <= dim < len(shape) else _size_of(tensor, dim)

        def stride(tensor: torch.Tensor, dim: Any = None) -> Any:
            found = self._strides(tensor)
            return found if dim is None else found[dim] if -len(found) <= dim < len(found) else _stride_of(tensor, dim)

        def numel(tensor: torch.Tensor) -> int:
            return reduce(operator.mul, self._shape(tensor), 1)

        def split(tensor: torch.Tensor, split_size: Any, dim: int = 0) -> Any:
            parts = _split_of(tensor, split_size, dim)  # type: ignore[no-untyped-call]
            size = self._shape(tensor)[dim]
            if isinstance(split_size, int) and isinstance(size, Extent):
                self._extents.counted(len(parts), size, split_size)
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
        before, self._extents.seen = self._extents.seen, True
        try:
            with (
                replaced(FakeTensor, methods),
                replaced(torch, {"numel": lambda input: input.numel()}),
            ):
                yield
        finally:
            self._extents.seen = before

    def _value(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor of the recording shows; None if the shapes differ, or for any other tensor."""
        alias = self._find(tensor) if self._extents.seen else None
        return alias.value if alias is not None and alias.value.shape == _shape_of(tensor) else None

    def _shape(self, tensor: torch.Tensor) -> torch.Size:
        shape, value = _shape_of(tensor), self._value(tensor)
        if value is None:
            return shape
        return torch.Size([self._extents.axis(value, dim, size) for dim, size in enumerate(shape)])

    def _strides(self, tensor: torch.Tensor) -> tuple[int, ...]:
        strides, value = _stride_of(tensor), self._value(tensor)
        if value is None or value.strides != strides:
            return strides
        return tuple([self._extents.axis(value, dim, stride, "strides") for dim, stride in enumerate(strides)])

    def _offset(self, tensor: torch.Tensor) -> int:
        offset, value = int(_offset_of(tensor)), self._value(tensor)
        return offset if value is None or value.offset != offset else self._extents.axis(value, 0, offset, "offset")

    def _sliced(self, tensor: torch.Tensor, index: Any) -> None:
        """Note whether the bounds of a slice lie within the tensor's size: torch clamps a bound beyond the end."""
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
        self._extents.compared(holds, bound, size)


def _dims_of(item: Any) -> int:
    """How many dimensions of a tensor an item of an index takes; 0 for an ellipsis, which takes the rest."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


_shape_of: Final[Callable[[torch.Tensor], torch.Size]] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_size_of: Final = torch.Tensor.size
_stride_of: Final = torch.Tensor.stride
_offset_of: Final = torch.Tensor.storage_offset
_split_of: Final = torch.Tensor.split
_item_of: Final = torch.Tensor.__getitem__
_set_item_of: Final = torch.Tensor.__setitem__
