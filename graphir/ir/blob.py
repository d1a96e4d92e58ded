"""Blobs: the named values of a net, and the storages that hold their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from .device import Device
from .dtype import ITEMSIZE
from .size import Dims, Polynomial, Shape, Size, bind_shape, multiply, numel

__all__ = [
    "ROLES",
    "ROLE_OF_PHASE",
    "STATE_ROLES",
    "Blob",
    "Role",
    "bound_layout",
    "contiguous_strides",
    "dense_nbytes",
    "dense_strides",
    "is_dense",
    "overlaps",
    "reach",
    "same_strides",
]

Role: TypeAlias = Literal[
    "param", "buffer", "state", "input", "constant", "activation", "gradient", "temporary", "output"
]
"""What a blob is for: a module's parameter or buffer, optimizer *state*, a step's *input*, a tensor that the model
holds as a plain attribute (*constant*), a forward value that depends on an input (*activation*), the gradient of a
parameter or activation, a result handed back (*output*), or none of these (*temporary*)."""

ROLES: Final[tuple[str, ...]] = get_args(Role)

ROLE_OF_PHASE: Final[Mapping[str, Role]] = {"forward": "activation", "backward": "gradient", "reduce": "gradient"}
"""The role of an operator's results by its phase, if nothing else decides the role. Other phases make temporaries."""

STATE_ROLES: Final = frozenset({"param", "buffer", "state", "constant"})
"""Roles of blobs that live from step to step; ``init`` fills them."""


class Blob(NamedTuple):
    """A named value: its geometry, where it lives, and the storage that holds its bytes.

    A blob whose ``storage`` is another blob's name is a *view* of it (or the result of an in-place operator): it has
    no bytes of its own, and lives where that storage lives.

    Attributes:
        name: with the replica's prefix, if any.
        shape: one size a dimension; None where it is not known (imported nets).
        dtype: a short name from :mod:`.dtype`; None where it is not known.
        device: the logical device that holds the storage.
        role: see :data:`Role`.
        storage: the blob that owns the bytes; its own name unless it is a view.
        strides: in elements; None for contiguous (row-major) ones.
        offset: of the first element, in elements, from the start of the storage.
    """

    name: str
    shape: Shape | None
    dtype: str | None
    device: Device
    role: Role
    storage: str
    strides: Shape | None = None
    offset: Size = 0

    @property
    def is_view(self) -> bool:
        """Whether another blob owns the bytes."""
        return self.storage != self.name

    def __repr__(self) -> str:
        return f"Blob({', '.join(f'{name}={_shown(value)}' for name, value in self._asdict().items())})"

    def on(self, device: Device) -> Blob:
        """This blob on another device, at half the cost of ``_replace(device=…)``: passes over large nets need that."""
        return Blob._make(self[:3] + (device,) + self[4:])  # noqa: RUF005  # half as long

    def nbytes(self, dims: Dims) -> int:
        """Bytes from the first element to the last: gaps count, repeated elements do not."""
        if self.shape is None or self.dtype is None:
            return 0
        itemsize = ITEMSIZE[self.dtype]
        if self.strides is None:
            return numel(self.shape, dims) * itemsize
        return reach(bind_shape(self.shape, dims), bind_shape(self.strides, dims)) * itemsize


def _shown(value: object) -> str:
    """An attribute, with sizes as in the text form."""
    if isinstance(value, tuple) and not isinstance(value, Polynomial):
        return f"[{', '.join(map(_shown, value))}]"
    return str(value) if isinstance(value, Polynomial) else repr(value)


def dense_nbytes(blob: Blob, dims: Dims) -> int:
    """Bytes of the blob's elements, however they are laid out: the bytes that a copy moves."""
    if blob.shape is None or blob.dtype is None:
        return 0
    return numel(blob.shape, dims) * ITEMSIZE[blob.dtype]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of a bound shape."""
    return dense_strides(shape, range(len(shape) - 1, -1, -1))


def dense_strides(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Strides without gaps, as torch computes them: an empty dimension counts as one.

    Args:
        shape: bound.
        order: the dimensions from the innermost in memory to the outermost.
    """
    strides, step = [1] * len(shape), 1
    for d in order:
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def is_dense(blob: Blob) -> bool:
    """Whether the blob's elements fill their storage from its first byte on without gaps, in whatever order, at every
    size. A blob without a shape counts as dense if its offset is 0."""
    if blob.shape is None or blob.strides is None:
        return blob.offset == 0
    left = [(stride, size) for stride, size in zip(blob.strides, blob.shape, strict=True) if size != 1]
    step: Size = 1
    while left:
        inner = next((d for d, (stride, _) in enumerate(left) if stride == step), None)
        if inner is None:
            return False
        step = multiply(step, left.pop(inner)[1])
    return blob.offset == 0


def same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two sets of strides place all elements alike. The stride of a dimension of size 1 does not count."""
    return all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def bound_layout(blob: Blob, dims: Dims) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the blob under *dims*; row-major strides if the blob declares none. Its shape must be known.

    Raises:
        GraphirError: a dimension has no value.
    """
    shape = bind_shape(blob.shape or (), dims)
    return shape, contiguous_strides(shape) if blob.strides is None else bind_shape(blob.strides, dims)


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last in memory, gaps included; 0 for an empty shape."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may lie at one address. Exact for all views of dense tensors."""
    if 0 in shape:
        return False
    last = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= last:
            return True
        last += (size - 1) * stride
    return False
