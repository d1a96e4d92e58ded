"""A call's arguments as shares, one for each replica, by the rules of torch's ``scatter_kwargs``.

Tensors are split along a dimension as ``torch.chunk`` splits them, or by unlike shares; tuples, lists, dicts and named
tuples are mapped; everything else is handed to each replica as it is. Where a batch has fewer rows than there are
devices, there are fewer shares, and only as many replicas run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ..errors import GraphirError, counted, warn
from ..ir.shares import divided, read_shares
from .errors import ReplicationIndexError, ReplicationRuntimeError, ReplicationValueError

__all__ = ["has_rows", "is_namedtuple", "moved", "scatter", "scatter_kwargs", "shares_given", "shares_with_rows"]

_WHERE: Final = "DataParallel.scatter"


def scatter(
    inputs: Any, places: Sequence[torch.device], dim: int = 0, shares: Sequence[int] | None = None
) -> Sequence[Any]:
    """Split the tensors of a structure along *dim*.

    Each share is a tensor of its own: what a replica writes into it in place, the caller's tensor does not see.
    Gradients flow back.

    Args:
        inputs: tensors within tuples, lists, dicts and named tuples; of other types each share gets the object itself.
        places: the real device of each replica.
        dim: the dimension that is split.
        shares: a positive whole number for each replica, whose ratio is that of the rows; by default equal.

    Returns:
        The structure once for each share.

    Raises:
        ReplicationValueError: *shares* are no such numbers.
        ReplicationRuntimeError: a tensor has no dimensions, or holds no data.
        ReplicationIndexError: a tensor has no dimension *dim*.
    """
    return _Scatter(places, dim, shares_given(shares, len(places), _WHERE)).shares(inputs)


def scatter_kwargs(
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    places: Sequence[torch.device],
    dim: int = 0,
    shares: Sequence[int] | None = None,
) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
    """Split positional and keyword arguments: those of each replica, both tuples of the same length.

    Where some tensors make fewer shares than others, torch drops what is left over: rows within the positional
    arguments, or arguments of the last replicas. So does this, with a warning.

    Raises:
        ReplicationRuntimeError, ReplicationIndexError, ReplicationValueError: as :func:`scatter`.
    """
    splitting = _Scatter(places, dim, shares_given(shares, len(places), _WHERE))
    args = list(splitting.shares(inputs)) if inputs else []
    named = list(splitting.shares(dict(kwargs))) if kwargs else []
    if len(splitting.numbers) > 1:
        few, many = min(splitting.numbers), max(splitting.numbers)
        warn(
            f"some tensors were split into {counted(few, 'share')} along dimension {dim}, others into {many}: what is "
            "left over of the longer ones is not used; give all tensors the same size there",
            UserWarning,
        )
    if len(args) < len(named):
        args += [()] * (len(named) - len(args))
    elif len(named) < len(inputs):  # torch compares with the arguments, not with their shares: others it refuses
        named += [{} for _ in range(len(args) - len(named))]
    return tuple(args), tuple(named)


def shares_given(given: Sequence[int] | None, replicas: int, where: str) -> tuple[int, ...]:
    """The shares that somebody gives, as :func:`.read_shares` makes them.

    Raises:
        ReplicationValueError: they are none, or do not fit the replicas.
    """
    try:
        return read_shares(given, replicas)
    except GraphirError as e:
        raise ReplicationValueError(f"shares: {e.what}", where=where, fix=e.fix) from None


def shares_with_rows(args: Sequence[Any], kwargs: Sequence[Any], dim: int) -> int:
    """How many replicas have rows, of those that these are the arguments of: the ones after them have no tensor, or
    none with rows along *dim*. All of them, where no replica has any."""
    with_rows = [i for i, share in enumerate(zip(args, kwargs, strict=False)) if has_rows(share, dim)]
    return with_rows[-1] + 1 if with_rows else len(args)


def has_rows(share: Any, dim: int) -> bool:
    """Whether a replica's arguments hold a tensor that has rows along *dim*, or a tensor without that dimension."""
    tensors = (leaf for leaf in pytree.tree_leaves(share) if isinstance(leaf, torch.Tensor))
    return any(not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] for tensor in tensors)


def is_namedtuple(value: object) -> bool:
    """Whether a value is of a type that ``collections.namedtuple`` or ``typing.NamedTuple`` made."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def moved(share: Any, place: torch.device, dim: int) -> Any:
    """A share that is one already, with its tensors on *place*, each one of its own."""
    return _Whole([place], dim, ()).shares(share)[0]


class _Scatter:
    """Splits structures.

    Attributes:
        numbers: into how many shares tensors were split.
    """

    def __init__(self, places: Sequence[torch.device], dim: int, shares: Sequence[int]) -> None:
        self._places, self._dim, self._shares = places, dim, shares or [1] * len(places)
        self.numbers: set[int] = set()

    def shares(self, value: Any) -> Sequence[Any]:
        """One for each replica, as many as the first tensors make."""
        if isinstance(value, torch.Tensor):
            return self._split(value)
        if is_namedtuple(value):
            return [type(value)(*fields) for fields in self._mapped(value)]
        if isinstance(value, tuple) and value:
            return self._mapped(value)
        if isinstance(value, list) and value:
            return [list(items) for items in self._mapped(value)]
        if isinstance(value, dict) and value:
            return [type(value)(items) for items in self._mapped(value.items())]
        return [value for _ in self._places]

    def _mapped(self, values: Any) -> list[tuple[Any, ...]]:
        return list(zip(*map(self.shares, values), strict=False))

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        described = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if not tensor.dim():
            raise ReplicationRuntimeError(
                f"a tensor without dimensions cannot be split: {described}",
                where=_WHERE,
                fix="pass a number, or a tensor with one row for each sample",
            )
        if not -tensor.dim() <= self._dim < tensor.dim():
            raise ReplicationIndexError(
                f"a tensor has no dimension {self._dim} to split: {described}",
                where=_WHERE,
                fix="choose dim so that each tensor has it",
            )
        if tensor.is_meta:
            raise ReplicationRuntimeError(
                f"a tensor without data cannot be split: {described}",
                where=_WHERE,
                fix=f"make it on {self._places[0]}",
            )
        rows = divided(tensor.shape[self._dim], self._shares)
        parts = tensor.split([n for n in rows if n] or rows, self._dim)
        self.numbers.add(len(parts))
        return tuple(_moved(part, place) for part, place in zip(parts, self._places, strict=False))


class _Whole(_Scatter):
    """Moves the tensors of structures to the only place, and splits none."""

    def _split(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (_moved(tensor, self._places[0]),)


def _moved(part: torch.Tensor, place: torch.device) -> torch.Tensor:
    return part.clone() if part.device == place else part.to(place, non_blocking=True)
