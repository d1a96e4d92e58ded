"""Containers that torch's pytree does not know, in what a module returns: taken apart, and put together again.

``gather`` makes the container of all replicas of an iterable of its parts, as torch does: ``kind(parts)``. Programs
have tuples, lists, dicts and what torch knows. So the program of a module that returns a cache of transformers returns
the cache's parts, and the call makes a cache of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .scatter import is_namedtuple

__all__ = ["Containers"]


class _Shape(NamedTuple):
    """What a value was before it was taken apart.

    Attributes:
        spec: its structure, as torch knows it.
        containers: of the leaves that are containers, by their positions: the type, and the shape of its list of parts.
    """

    spec: pytree.TreeSpec
    containers: Mapping[int, tuple[type[Any], _Shape]]


class Containers:
    """Takes a module's outputs apart, and puts together what is made of their parts in the shape of the last one."""

    def __init__(self) -> None:
        self._shape: _Shape | None = None

    def opened(self, output: Any) -> Any:
        """The leaves of an output, with a list of its parts for each container; the output itself if it has none."""
        parts, shape = _opened(output)
        self._shape = shape if shape.containers else None
        return output if self._shape is None else parts

    def closed(self, parts: Any) -> Any:
        """An output with these parts, of the structure that :meth:`opened` gave."""
        return parts if self._shape is None else _closed(parts, self._shape)


def _opened(value: Any) -> tuple[list[Any], _Shape]:
    leaves, spec = pytree.tree_flatten(value)
    containers = {}
    for i, leaf in enumerate(leaves):
        if _is_container(leaf):
            leaves[i], shape = _opened(list(leaf))
            containers[i] = type(leaf), shape
    return leaves, _Shape(spec, containers)


def _closed(parts: Sequence[Any], shape: _Shape) -> Any:
    made = list(parts)
    for i, (kind, inner) in shape.containers.items():
        made[i] = kind(_closed(made[i], inner))
    return pytree.tree_unflatten(made, shape.spec)


def _is_container(leaf: Any) -> bool:
    """Whether ``gather`` makes it of an iterable of its parts."""
    if isinstance(leaf, (torch.Tensor, str, bytes, dict, Iterator)) or is_namedtuple(leaf):
        return False
    return isinstance(leaf, Iterable)
