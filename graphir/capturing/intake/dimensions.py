"""``batch_dims``: which dimensions of a step's arguments have a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.size import BATCH

__all__ = ["read_dims"]

_MOST: Final = 64
"""How many dimensions may be named: each further one costs a recording or more."""

_FIX: Final = 'pass an int, None, {0: "batch", 1: "length"}, or a tree (inputs, kwargs, targets) of these'


def read_dims(
    batch_dims: Any,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: tuple[Any, ...],
    leaves: Sequence[tuple[str, Any]],
) -> list[dict[int, str]]:
    """The named dimensions of each leaf; *leaves* are names and values in the order of ``((inputs, targets), kwargs)``.

    Raises:
        CaptureError: *batch_dims* does not fit the arguments, or names a dimension in a way that is not allowed.
    """
    if batch_dims is None:
        return _by_length(inputs, kwargs, [value for _, value in leaves])
    # The caller's tree is over (inputs, kwargs, targets).
    ours = pytree.tree_structure((inputs, kwargs, targets))
    try:
        flat = pytree._broadcast_to_and_flatten(batch_dims, ours, is_leaf=_is_names)
    except RecursionError:  # batch_dims contains itself
        flat = None
    if flat is None or not all(d is None or type(d) is int or _is_names(d) for d in flat):
        raise CaptureError("batch_dims does not fit the arguments", fix=_FIX)
    counts = [len(pytree.tree_leaves(part)) for part in (inputs, kwargs, targets)]
    first_kwarg, first_target = counts[0], counts[0] + counts[1]
    ordered = [*flat[:first_kwarg], *flat[first_target:], *flat[first_kwarg:first_target]]
    found = [_named(dims, name, value) for dims, (name, value) in zip(ordered, leaves, strict=True)]
    names = {name for dims in found for name in dims.values()}
    if names and BATCH not in names:
        raise CaptureError(
            f"batch_dims names {', '.join(sorted(names))}, but no dimension {BATCH!r}",
            fix=f'call the dimension that is split over replicas "{BATCH}"',
        )
    if len(names) > _MOST:
        raise CaptureError(
            f"batch_dims names {len(names)} dimensions: {', '.join(sorted(names))}", fix=f"name at most {_MOST}"
        )
    return found


def _is_names(tree: Any) -> bool:
    """Whether *tree* names the dimensions of one tensor, and is no container of such names."""
    return isinstance(tree, dict) and bool(tree) and all(isinstance(name, str) for name in tree.values())


def _by_length(inputs: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> list[dict[int, str]]:
    """The default: dimension 0 is the batch of every tensor that is as long there as the first tensor."""
    given = pytree.tree_leaves((inputs, kwargs))
    first = next((t for t in given if isinstance(t, torch.Tensor)), None)
    if first is None or first.dim() == 0:
        return [{} for _ in leaves]
    length = first.shape[0]
    return [{0: BATCH} if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == length else {} for t in leaves]


def _named(dims: int | Mapping[Any, str] | None, path: str, value: Any) -> dict[int, str]:
    if dims is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return {}
    found: dict[int, str] = {}
    for d, name in ({dims: BATCH} if isinstance(dims, int) else dims).items():
        if type(d) is not int:
            raise CaptureError(f"batch_dims has the key {d!r} for argument {path!r}", fix=_FIX)
        if not (name.isidentifier() and name.isascii()):
            raise CaptureError(
                f"batch_dims names a dimension of {path!r} {name!r}, which is not an ASCII identifier",
                fix="use names such as length or src_len",
            )
        if not -value.dim() <= d < value.dim():
            raise CaptureError(
                f"batch_dims names dimension {d} of a tensor that has {value.dim()} dimensions",
                where=f"argument {path!r}",
                fix=_FIX,
            )
        if found.setdefault(d % value.dim(), name) != name or list(found.values()).count(BATCH) > 1:
            raise CaptureError(
                f"batch_dims names two dimensions of {path!r} {BATCH!r}, or names one dimension twice",
                fix=f"give each dimension one name, and one dimension the name {BATCH!r}",
            )
    return dict(sorted(found.items()))
