"""A step's arguments: their leaves, names, and batch dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..ir.program import Scalar
from .structures import named_leaves, written_structure

__all__ = ["Arguments", "Leaf", "read_arguments"]


class Leaf(NamedTuple):
    """One leaf of the arguments: its name, the dimension along which it is split, and the leaf itself."""

    name: str
    batch_dim: int | None
    value: torch.Tensor | Scalar

    @property
    def tensor(self) -> torch.Tensor | None:
        """The leaf where it is a tensor."""
        return self.value if isinstance(self.value, torch.Tensor) else None


class Arguments(NamedTuple):
    """Attributes:
    leaves: in the order of the structure ``((*inputs, *targets), kwargs)``.
    spec: that structure.
    inputs: how many inputs there are.
    batch: the common size of the batch dimensions; None where there are none.
    """

    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec
    inputs: int
    batch: int | None

    def split(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """``(inputs, kwargs, targets)`` with these leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args[: self.inputs], kwargs, args[self.inputs :]

    def dumps(self) -> str:
        """The structure as JSON."""
        return written_structure(self.spec, "the arguments")


def read_arguments(
    model: torch.nn.Module,
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    targets: Any,
    loss: Callable[..., Any] | None,
    batch_dims: Any,
) -> Arguments:
    """Take the arguments apart.

    Raises:
        CaptureError: they are of a kind that programs don't have, or the batch dimensions don't fit them.
    """
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, (tuple, list)):
            raise CaptureError(f"{name} is a {type(value).__name__}, not a tuple", fix=f"write {name}=(x,)")
    if targets and loss is None:
        raise CaptureError("targets are given, but no loss that takes them", fix="pass loss=")
    inputs, targets, kwargs = tuple(inputs), tuple(targets), dict(kwargs or {})
    named = [
        *zip(_positional(model.forward, len(inputs), "input"), inputs, strict=True),
        *zip(_positional(loss, len(targets), "target", skip=1), targets, strict=True),
        *kwargs.items(),
    ]
    leaves = [leaf for name, value in named for leaf in _leaves(name, value)]
    flat, spec = pytree.tree_flatten(((*inputs, *targets), kwargs))
    if len(flat) != len(leaves):
        raise AssertionError("the arguments have as many names as leaves")
    dims = _batch_dims(batch_dims, inputs, kwargs, targets, [value for _, value in leaves])
    sizes = {}
    for (name, value), dim in zip(leaves, dims, strict=True):
        if dim is not None and isinstance(value, torch.Tensor):
            sizes[name] = value.shape[dim]
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise CaptureError(
            f"the batch dimensions differ in size ({text})", fix="pass batch_dims, None for whole tensors"
        )
    batch = next(iter(sizes.values()), None)
    if batch == 0:
        raise CaptureError(
            f"the batch is empty: {next(iter(sizes))!r} has no samples",
            fix="capture with a batch of at least one sample, best of the size that runs later",
        )
    found = tuple(Leaf(name, dim, value) for (name, value), dim in zip(leaves, dims, strict=True))
    return Arguments(found, spec, len(inputs), batch)


def _positional(func: Callable[..., Any] | None, count: int, fallback: str, skip: int = 0) -> Iterator[str]:
    """Names of *count* positional arguments of *func* after the first *skip*."""
    names: list[str] = []
    if isinstance(func, torch.nn.Module):
        func = func.forward
    try:
        parameters = list(inspect.signature(func).parameters.values()) if func is not None else []
    except (TypeError, ValueError):
        parameters = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    for i in range(count):
        known = names[skip + i] if skip + i < len(names) else ""
        yield known or (f"{fallback}_{i}" if i else fallback)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor | Scalar]]:
    for path, leaf in named_leaves(name, value):
        path = path.replace("/", "_")
        if isinstance(leaf, torch.Tensor):
            if leaf.is_complex() or leaf.layout != torch.strided:
                kind = "complex" if leaf.is_complex() else str(leaf.layout).removeprefix("torch.")
                raise CaptureError(f"argument {path!r} is a {kind} tensor", fix="pass real, dense tensors")
        elif not isinstance(leaf, (bool, int, float, str, type(None))):
            raise CaptureError(
                f"argument {path!r} is a {type(leaf).__name__}",
                fix="pass tensors, numbers, strings and None in tuples, lists and dicts",
            )
        yield path, leaf


def _batch_dims(
    batch_dims: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Any, ...], leaves: list[Any]
) -> list[int | None]:
    tensors = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    if batch_dims is None:
        given = pytree.tree_leaves((inputs, kwargs))
        first = next((t for t in given if isinstance(t, torch.Tensor)), None)
        if first is None or first.dim() == 0:
            return [None] * len(leaves)
        size = first.shape[0]
        return [0 if t is not None and t.dim() and t.shape[0] == size else None for t in tensors]
    # The caller's tree is over (inputs, kwargs, targets); the leaves come as ((inputs, targets), kwargs).
    ours = pytree.tree_structure((inputs, kwargs, targets))
    flat = pytree._broadcast_to_and_flatten(batch_dims, ours)
    if flat is None or any(not isinstance(d, (int, type(None))) for d in flat):
        raise CaptureError(
            "batch_dims does not fit the arguments",
            fix="pass an int, or a tuple (inputs, kwargs, targets) of ints and None in the shape of the arguments",
        )
    counts = [len(pytree.tree_leaves(part)) for part in (inputs, kwargs, targets)]
    first_kwarg, first_target = counts[0], counts[0] + counts[1]
    ordered = [*flat[:first_kwarg], *flat[first_target:], *flat[first_kwarg:first_target]]
    return [_dim_of(dim, tensor) for dim, tensor in zip(ordered, tensors, strict=True)]


def _dim_of(dim: int | None, tensor: torch.Tensor | None) -> int | None:
    if dim is None or tensor is None or tensor.dim() == 0:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise CaptureError(
            f"batch_dims has {dim} for a tensor of {tensor.dim()} dimensions", fix="dimensions count from 0"
        )
    return dim % tensor.dim()
