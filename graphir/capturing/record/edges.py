"""Where gradients arrive: at tensors, or at edges of autograd's graph once a tensor was overwritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .values import Alias, Value

__all__ = ["differentiable", "keep_edges"]


def keep_edges(target: Alias) -> None:
    """Keep the gradient edges of the values that a write to *target* hides: the overwritten tensor loses its own."""
    for alias in (target, target.store.base):
        tensor = alias.tensor
        value = _bearer(alias)
        if value is not None:
            value.edge = tensor if tensor.is_leaf else get_gradient_edge(tensor)


def differentiable(aliases: Iterable[Alias], values: Iterable[Value]) -> Iterator[tuple[Value, Any]]:
    """Each forward value that has a gradient, and where the gradient arrives: a tensor, or an edge of the graph."""
    for alias in aliases:
        value = _bearer(alias)
        if value is not None:
            value.edge = alias.tensor
    return ((value, value.edge) for value in values if value.edge is not None)


def _bearer(alias: Alias) -> Value | None:
    """The forward value, still without an edge, whose gradient arrives at the tensor of *alias*; None if there is none.

    A parameter has one gradient, however often the forward overwrites it: its first version bears it.
    """
    if alias.generation != alias.store.generation or not alias.tensor.requires_grad:
        return None
    value = alias.value.root if alias.value.kind == "param" else alias.value
    return value if value.phase == "forward" and value.edge is None and _in_graph(alias.tensor) else None


def _in_graph(tensor: torch.Tensor) -> bool:
    """Whether gradients arrive at *tensor*: at views made under ``no_grad`` none do."""
    try:
        return not (tensor.is_leaf and tensor._is_view())
    except RuntimeError:  # torch refuses to answer for a view made under no_grad that was overwritten
        return False
