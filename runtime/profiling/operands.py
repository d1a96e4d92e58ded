"""Operands for a call that nobody has made yet: tensors of the right geometry, with values that every kernel takes.

What a kernel allocates follows from sizes, and its time hardly depends on values, so any will do that it does not
refuse: numbers between 0 and 1 where it wants numbers, 0 where it may want an index. Where more depends on values, as
for sparse gradients, whose rows may coincide, a call is made on several kinds of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphir.ir.blob import Blob, bound_layout, reach
from graphir.ir.operator import Operator
from graphir.ir.opset import signature
from graphir.ir.size import Dims, bind
from graphir.ir.symbols import to_torch

from ..kernels.ctc import CTC
from ..kernels.slots import SLOT_BY_SLOT

__all__ = ["Geometry", "geometries", "variants"]


class Geometry(NamedTuple):
    """An operand, its sizes bound."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """How many it has, each address once, gaps included."""
        return reach(self.shape, self.strides)


def geometries(names: Sequence[str], blobs: Mapping[str, Blob], dims: Dims) -> list[Geometry]:
    """Those of blobs whose shape and type are known."""
    return [Geometry(*bound_layout(blobs[name], dims), to_torch(str(blobs[name].dtype))) for name in names]


Values: TypeAlias = Callable[["Request"], Tensor]


class Request(NamedTuple):
    """What integers are made for: one operand among all of a call.

    Attributes:
        op: the operator.
        given: its operands, by parameter.
        made: its results.
        dims: the value of each dimension.
        shape: of the operand.
        number: which of the parameter's operands it is.
    """

    op: Operator
    given: Mapping[str, Geometry]
    made: Sequence[Geometry]
    dims: Dims
    shape: tuple[int, ...]
    number: int

    def argument(self, name: str) -> int:
        """A whole number among the operator's arguments."""
        found: Any = self.op.args[name]
        return int(bind(found, self.dims))


def variants(op: Operator, blobs: Mapping[str, Blob], dims: Dims) -> Iterator[list[Tensor]]:
    """The operands of *op*, once for each kind of values on which what it allocates may depend; most types have one."""
    names = signature(op.type).names(op.operands, len(op.inputs))
    given = geometries(op.inputs, blobs, dims)
    made = geometries(op.outputs, blobs, dims)
    by_name = dict(zip(names, given, strict=True))

    def values(position: int, special: Mapping[str, Values]) -> Tensor:
        name, geometry = names[position], given[position]
        if name in special:
            number = names[:position].count(name)
            return special[name](Request(op, by_name, made, dims, geometry.shape, number))
        return _usual(name, geometry)

    masked = op.type in _MASKED and any(geometry.dtype == torch.bool for geometry in given)
    for special in _MASKS if masked else _SPECIAL.get(op.type, ({},)):
        yield [_laid_out(values(position, special), geometry) for position, geometry in enumerate(given)]


def _usual(name: str, geometry: Geometry) -> Tensor:
    """Values that fit most parameters, as one dimension that is repeated."""
    dtype = geometry.dtype
    if dtype == torch.bool:
        return torch.ones(1, dtype=dtype)
    if name == "found_inf" or not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(1, dtype=dtype)
    return _numbers().to(dtype)


@cache
def _numbers() -> Tensor:
    """Numbers from 0.25 to 0.75, in no order: where a kernel branches on values, as pools do that look for the largest,
    the processor guesses most branches right in what ascends."""
    order = torch.randperm(_PERIOD, generator=torch.Generator().manual_seed(0))
    return torch.linspace(0.25, 0.75, _PERIOD, dtype=torch.float32)[order]


_PERIOD: Final = 65_521
"""After so many elements numbers repeat: a prime, so that rows differ."""


def _laid_out(values: Tensor, geometry: Geometry) -> Tensor:
    """A tensor of this geometry, in memory of its own, that holds the values, repeated as often as it takes."""
    storage = torch.empty(geometry.elements, dtype=geometry.dtype)
    if values.numel() == prod(geometry.shape) and values.numel() != 1:
        return storage.as_strided(geometry.shape, geometry.strides).copy_(values.view(geometry.shape))
    flat = values.flatten().to(geometry.dtype)
    whole = geometry.elements // flat.numel() * flat.numel()
    storage[:whole].view(-1, flat.numel()).copy_(flat)
    storage[whole:] = flat[: geometry.elements - whole]
    return storage.as_strided(geometry.shape, geometry.strides)


def _rows(request: Request) -> int:
    """How many rows a sparse gradient's tensor has."""
    return request.argument("rows") if "rows" in request.op.args else request.given["param"].shape[0]


def _distinct(request: Request) -> Tensor:
    """As many rows as there can be, none of them twice if possible."""
    return torch.arange(prod(request.shape)) % max(_rows(request), 1)


def _same(request: Request) -> Tensor:
    return torch.zeros(prod(request.shape), dtype=torch.int64)


def _with_an_empty_slot(request: Request) -> Tensor:
    found = _distinct(request)
    found[-1:] = -1
    return found


def _apart_with_empty_slots(request: Request) -> Tensor:
    """Rows of gradients that are added, of which no two have one in common, and each has an empty slot: each is copied
    without that, the sum has as many rows as there can be, and is copied again with the slots that are empty then."""
    found = torch.full((prod(request.shape),), min(request.number, max(_rows(request) - 1, 0)))
    found[-1:] = -1
    return found


def _with_padding(request: Request) -> Tensor:
    """Indices of which one is padding, if there is any."""
    found = torch.zeros(prod(request.shape), dtype=torch.int64)
    padding: Any = request.op.args.get("padding_idx", -1)
    found[-1:] = max(padding, 0)
    found[:-1] = int(padding == 0)
    return found


def _offsets(request: Request) -> Tensor:
    """Where bags begin that are about as long as each other; the last offset may be the end of the indices."""
    (count,) = request.shape
    lookups = request.given["indices"].shape[0]
    bags = count - bool(request.op.args.get("include_last_offset", False))
    return torch.arange(count) * lookups // max(bags, 1)


def _bag_of_each(request: Request) -> Tensor:
    count = prod(request.shape)
    bags = request.given["bag_size"].shape[0]
    return torch.arange(count) * bags // max(count, 1)


def _bag_sizes(request: Request) -> Tensor:
    bags = prod(request.shape)
    return torch.full((bags,), max(request.given["indices"].shape[0] // max(bags, 1), 1))


def _group_ends(request: Request) -> Tensor:
    """Where groups of rows end, for products of the rows of each group."""
    (count,) = request.shape
    shapes = [geometry.shape for geometry in request.given.values()]
    return torch.arange(1, count + 1) * shapes[0][-2] // count


def _frames(request: Request) -> Tensor:
    """All frames, for each sequence."""
    return torch.full((prod(request.shape),), request.given["log_probs"].shape[0])


def _labels(request: Request) -> Tensor:
    """As many labels as each row of targets has, or about the same part of the concatenated ones."""
    targets = request.given["targets"].shape
    batch = prod(request.shape)
    if len(targets) == 2:
        return torch.full((batch,), targets[1])
    return (torch.arange(batch + 1) * targets[0] // max(batch, 1)).diff()


def _selected(request: Request) -> Tensor:
    """A mask that selects as many elements as the results have, or the operand that is written."""
    size = prod(request.shape)
    whole = max(request.given["self"].elements // max(size, 1), 1)
    values = request.given.get("values")
    wanted = prod(values.shape if values is not None else request.made[0].shape) // whole
    return torch.arange(size) < (size if values is not None and wanted <= 1 else wanted)


def _nothing_selected(request: Request) -> Tensor:
    return torch.zeros(prod(request.shape), dtype=torch.bool)


_MASKED: Final = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_index.Tensor",
        "_unsafe_index_put.default",
        "index.Tensor",
        "index_put.default",
        "index_put_.default",
    )
)
"""Types that take a mask for indices."""

_MASKS: Final[Sequence[Mapping[str, Values]]] = ({"indices": _selected}, {"indices": _nothing_selected})

_SPARSE: Final[Sequence[Mapping[str, Values]]] = (
    {"indices": _distinct},
    {"indices": _same},
    {"indices": _with_an_empty_slot},
)

_BAGS: Final[Sequence[Mapping[str, Values]]] = ({"offsets": _offsets, "bag_size": _bag_sizes},)

_SEQUENCES: Final[Sequence[Mapping[str, Values]]] = ({"input_lengths": _frames, "target_lengths": _labels},)

_BAG_BACKWARD: Final[Mapping[str, Values]] = {
    "offsets": _offsets,
    "offset2bag": _bag_of_each,
    "bag_size": _bag_sizes,
}

_BAG_BACKWARDS: Final[Sequence[Mapping[str, Values]]] = (
    _BAG_BACKWARD,
    {**_BAG_BACKWARD, "indices": _with_padding},
)

_SPECIAL: Final[Mapping[str, Sequence[Mapping[str, Values]]]] = {
    **dict.fromkeys(SLOT_BY_SLOT, _SPARSE),
    "graphir.sparse_sum": (*_SPARSE, {"indices": _apart_with_empty_slots}),
    "graphir.sparse_sgd": _SPARSE,
    "graphir.sparse_adagrad": _SPARSE,
    "graphir.sparse_adam": _SPARSE,
    "graphir.sparse_row_wise_adagrad": _SPARSE,
    "graphir.embedding_bag_backward": _BAG_BACKWARDS,
    "aten._embedding_bag_backward.default": _BAG_BACKWARDS,
    "graphir.block_embedding_bag": _BAGS,
    **dict.fromkeys(CTC, _SEQUENCES),
    "graphir.block_embedding_bag_backward": _BAGS,
    "graphir.block_embedding_bag_per_sample_weights_backward": ({"offsets": _offsets},),
    "graphir.block_embedding_bag_sparse_backward": _BAGS,
    "graphir.bag_sizes": ({"offsets": _offsets},),
    "aten._embedding_bag.default": ({"offsets": _offsets},),
    "aten._embedding_bag_forward_only.default": ({"offsets": _offsets},),
    "aten._grouped_mm.default": ({"offs": _group_ends},),
}
"""Types that do not take the usual values, or whose scratch depends on them: for each kind, what makes operands."""
