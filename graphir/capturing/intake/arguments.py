"""A step's arguments: their leaves, names, and named dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.program import Scalar
from ...ir.size import BATCH
from ...ir.tensor import PLAIN
from .dimensions import read_dims
from .structures import named_leaves, tuple_of, written_structure

__all__ = ["Arguments", "Leaf", "read_arguments"]

_AS_REAL: Final = "pass torch.view_as_real(tensor), and let the model begin with torch.view_as_complex"
_AS_PARTS: Final = (
    "pass the dense parts of the tensor: for a sparse matrix indices() and values() of a.coalesce(); its product "
    "with x is y.index_add(0, indices[0], values[:, None] * x[indices[1]])"
)


class Leaf(NamedTuple):
    """One leaf of the arguments: its name, the names of its dimensions that have one, and the leaf itself."""

    name: str
    dims: Mapping[int, str]
    value: torch.Tensor | Scalar

    @property
    def batch_dim(self) -> int | None:
        """The dimension along which the leaf is split over replicas; None if it is passed whole."""
        return next((d for d, name in self.dims.items() if name == BATCH), None)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The leaf where it is a tensor."""
        return self.value if isinstance(self.value, torch.Tensor) else None


class Arguments(NamedTuple):
    """A step's arguments, taken apart into their leaves.

    Attributes:
        leaves: in the order of the structure ``((*inputs, *targets), kwargs)``.
        spec: that structure.
        inputs: how many inputs there are.
        dims: the captured size of each named dimension, ``batch`` first; empty where there is none.
    """

    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec
    inputs: int
    dims: Mapping[str, int]

    def split(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """``(inputs, kwargs, targets)`` with these leaves."""
        args, kwargs = pytree.tree_unflatten(list(leaves), self.spec)
        return args[: self.inputs], kwargs, args[self.inputs :]

    @property
    def positional(self) -> int:
        """The number of leaves of the positional arguments, which come first."""
        return self.spec.child(0).num_leaves

    def with_tuple(self, count: int) -> Arguments:
        """The structure with a tuple of *count* leaves as one more positional argument; the leaves are not added."""
        args, kwargs = self.spec.children()
        added = pytree.tree_structure((0,) * count)
        return self._replace(spec=tuple_of([tuple_of([*args.children(), added]), kwargs]))

    def dumps(self) -> str:
        """The structure as JSON."""
        return written_structure(self.spec, "the arguments")


def read_arguments(
    called: Callable[..., Any],
    inputs: Any,
    kwargs: Mapping[str, Any] | None,
    targets: Any,
    loss: Callable[..., Any] | None,
    batch_dims: Any,
) -> Arguments:
    """The arguments of a step, as leaves with names and named dimensions; *called* is the model, or a step function.

    Raises:
        CaptureError: an argument is of a kind that programs don't have, or *batch_dims* does not fit the arguments.
    """
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, (tuple, list)):
            raise CaptureError(f"{name} is a {type(value).__name__}, not a tuple", fix=f"write {name}=(x,)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)):
        raise CaptureError("kwargs is no mapping of names to arguments", fix='write kwargs={"mask": mask}')
    if targets and loss is None:
        raise CaptureError("targets are given, but no loss that takes them", fix="pass loss=")
    inputs, targets, kwargs = tuple(inputs), tuple(targets), dict(kwargs or {})
    named = [
        *zip(_positional(called, len(inputs), "input"), inputs, strict=True),
        *zip(_positional(loss, len(targets), "target", skip=1), targets, strict=True),
        *kwargs.items(),
    ]
    leaves = [leaf for name, value in named for leaf in _leaves(name, value)]
    flat, spec = pytree.tree_flatten(((*inputs, *targets), kwargs))
    if len(flat) != len(leaves):
        raise AssertionError("the arguments have as many names as leaves")
    named_dims = read_dims(batch_dims, inputs, kwargs, targets, leaves)
    found = tuple(Leaf(name, dims, value) for (name, value), dims in zip(leaves, named_dims, strict=True))
    return Arguments(found, spec, len(inputs), _sizes_of(found))


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
                fix = _AS_REAL if leaf.is_complex() else _AS_PARTS
                raise CaptureError(f"argument {path!r} is a {kind} tensor", fix=fix)
            if type(leaf) not in PLAIN:
                raise CaptureError(
                    f"argument {path!r} is a {type(leaf).__name__}, whose operators may differ from a plain tensor's",
                    fix="pass tensor.as_subclass(torch.Tensor)",
                )
        elif not isinstance(leaf, (bool, int, float, str, type(None))):
            raise CaptureError(
                f"argument {path!r} is a {type(leaf).__name__}",
                fix="pass tensors, numbers, strings and None in tuples, lists, dicts and classes that "
                "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known)",
            )
        yield path, leaf


def _sizes_of(leaves: Sequence[Leaf]) -> dict[str, int]:
    """The size of each named dimension, ``batch`` first.

    Raises:
        CaptureError: one name has several sizes, or the size is 0.
    """
    sizes: dict[str, dict[str, int]] = {BATCH: {}}
    seen: dict[int, Leaf] = {}
    for leaf in leaves:
        tensor = leaf.tensor
        if tensor is None:
            continue
        first = seen.setdefault(id(tensor), leaf)
        if first.dims != leaf.dims:
            raise CaptureError(
                f"{first.name!r} and {leaf.name!r} are one tensor, but batch_dims names its dimensions differently",
                fix="use the same names for both, or pass a copy of the tensor",
            )
        for d, name in leaf.dims.items():
            of_name = sizes.setdefault(name, {})
            if of_name.setdefault(leaf.name, tensor.shape[d]) != tensor.shape[d]:
                of_name[f"{leaf.name} along {d}"] = tensor.shape[d]
    return {name: _size(name, found) for name, found in sizes.items() if found}


def _size(name: str, found: Mapping[str, int]) -> int:
    what = "the batch dimensions" if name == BATCH else f"the dimensions {name!r}"
    if len(set(found.values())) > 1:
        text = ", ".join(f"{leaf}: {size}" for leaf, size in found.items())
        raise CaptureError(
            f"{what} differ in size ({text})", fix="pass batch_dims, with None for tensors without such a dimension"
        )
    leaf, size = next(iter(found.items()))
    if size == 0:
        noun = "batch" if name == BATCH else f"dimension {name!r}"
        raise CaptureError(
            f"the {noun} is empty: {leaf!r} has no samples",
            fix="capture with at least one sample, preferably at the batch size that runs later",
        )
    return size
