"""Selections by a mask with known values: the number of selected elements is known while the step is recorded.

``similarities[~torch.eye(n, dtype=torch.bool)]`` leaves out the diagonal in every step of these sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["masks_in", "selected"]

_aten: Final = torch.ops.aten


def masks_in(func: object, args: Sequence[Any]) -> list[Tensor]:
    """The tensors whose numbers decide the shape of the result of *func*; empty if none do."""
    if func is _aten.index.Tensor:
        return [t for t in args[1] if isinstance(t, Tensor) and t.dtype == torch.bool]
    if func is _aten.masked_select.default:
        return [args[1]]
    return [args[0]] if func is _aten.nonzero.default else []


def selected(func: Any, args: Sequence[Any], known: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of *func* as a fake tensor.

    Args:
        func: an operator in whose arguments :func:`masks_in` finds masks.
        args: the arguments, with fake tensors.
        known: returns a real tensor with the numbers of a mask.

    Raises:
        IndexError: the shape of a mask differs from that of the dimensions it selects from.
    """
    tensor: Tensor = args[0]
    if func is _aten.nonzero.default:
        count = _count(known(tensor))
        return tensor.new_empty_strided((count, tensor.dim()), (1, count), dtype=torch.int64)
    if func is _aten.masked_select.default:
        shape = torch.broadcast_shapes(tensor.shape, args[1].shape)
        return tensor.new_empty((_count(known(args[1]), shape),))
    positions: list[Tensor | None] = []
    for index in args[1]:
        if index is None or index.dtype != torch.bool:
            positions.append(index)
            continue
        place = slice(len(positions), len(positions) + index.dim())
        if index.shape != tensor.shape[place]:
            raise IndexError(f"a mask of shape {list(index.shape)} selects from {list(tensor.shape[place])}")
        positions += [index.new_empty((_count(known(index)),), dtype=torch.int64)] * index.dim()
    return func(tensor, positions)  # type: ignore[no-any-return]


def _count(mask: Tensor, shape: Sequence[int] | None = None) -> int:
    """The number of nonzero elements of a real tensor, expanded to *shape*."""
    with _disable_current_modes():
        return int(torch.count_nonzero(mask if shape is None else mask.expand(shape)))
