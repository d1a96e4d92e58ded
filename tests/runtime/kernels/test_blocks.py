"""Lookups in blocks of rows: together those of the table; what is refused, and what a call allocates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from allocations import measured_peak
from graphir.runtime.kernels.blocks import BLOCKS
from torch import Tensor
from torch.nn import functional as F

from graphir.analysis.scratch import scratch
from graphir.ir.blob import Blob
from graphir.ir.calls import call_of
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
from graphir.ir.symbols import to_symbol

ROWS, WIDTH = 10, 6
CUTS = ((0, 4), (4, 4), (8, 2))


def block(name: str, *operands: Any, **options: Any) -> Any:
    return BLOCKS[f"graphir.{name}"](*operands, **options)


def blob(name: str, tensor: Tensor) -> Blob:
    return Blob(name, tuple(tensor.shape), str(to_symbol(tensor.dtype)), gpu(0), "temporary", name)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", ["sum", "mean", "weighted"])
def test_bags_of_all_blocks_are_those_of_the_table(kind: str, last: bool, padding: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    indices = torch.randint(ROWS, (23,), dtype=dtype, generator=generator)
    offsets = torch.tensor([0, 0, 5, 5, 9, 20] + [23] * last, dtype=dtype)
    weights = torch.randn(23, dtype=torch.float64, generator=generator).requires_grad_() if kind == "weighted" else None
    out = F.embedding_bag(
        indices, weight, offsets, mode="mean" if kind == "mean" else "sum", per_sample_weights=weights,
        include_last_offset=last, padding_idx=None if padding < 0 else padding,
    )  # fmt: skip
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    out.backward(grad)
    ended = {"include_last_offset": last}
    total, dense, sparse, of_weights = torch.zeros_like(out), [], torch.zeros_like(weight), torch.zeros(23).double()
    with torch.inference_mode():
        sizes = block("bag_sizes", indices, offsets, padding_idx=padding, **ended) if kind == "mean" else None
        given = None if weights is None else weights.detach()
        for first, rows in CUTS:
            own = weight.detach()[first : first + rows]
            local = block("block_indices", indices, first=first, rows=rows, num_weights=ROWS, padding_idx=padding)
            bags = (local, offsets, sizes, given)
            total += block("block_embedding_bag", own, *bags, **ended)
            dense.append(block("block_embedding_bag_backward", grad, *bags, num_weights=rows, **ended))
            slots, values = block("block_embedding_bag_sparse_backward", grad, *bags, **ended)
            assert slots.dtype == dtype
            present = slots[0] >= 0
            assert not values[~present].any(), "an empty slot holds nothing"
            sparse[first : first + rows].index_add_(0, slots[0][present], values[present])
            if given is not None:
                name = "block_embedding_bag_per_sample_weights_backward"
                of_weights += block(name, grad, own, local, offsets, **ended)
    assert torch.allclose(total, out, rtol=1e-12)
    assert weight.grad is not None
    assert torch.allclose(torch.cat(dense), weight.grad, rtol=1e-12)
    assert torch.allclose(sparse, weight.grad, rtol=1e-12)
    if weights is not None:
        assert weights.grad is not None
        assert torch.allclose(of_weights, weights.grad, rtol=1e-12)


def test_embeddings_of_all_blocks_are_those_of_the_table() -> None:
    weight, indices = torch.randn(ROWS, WIDTH), torch.randint(ROWS, (4, 3))
    found = torch.zeros(4, 3, WIDTH)
    for first, rows in CUTS:
        local = block("block_indices", indices, first=first, rows=rows, num_weights=ROWS)
        found += block("block_embedding", weight[first : first + rows], local)
    assert torch.equal(found, weight[indices])


def test_a_block_without_lookups_has_zeros() -> None:
    nothing = torch.full((5,), -1)
    offsets, weight, grad = torch.tensor([0, 2]), torch.randn(4, 3), torch.randn(2, 3)
    assert torch.equal(block("block_embedding_bag", weight, nothing, offsets), torch.zeros(2, 3))
    assert torch.equal(block("block_embedding", weight, nothing), torch.zeros(5, 3))
    assert torch.equal(block("block_embedding_bag_backward", grad, nothing, offsets, num_weights=4), torch.zeros(4, 3))
    empty = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(block("block_embedding_bag", weight, empty, torch.zeros_like(offsets)), torch.zeros(2, 3))


WIDE = {"weight": torch.ones(4, 3), "grad": torch.ones(2, 3), "indices": torch.tensor([0, 3, -1, 2, 0])}
OFFSETS = torch.tensor([0, 2])
_SPARSE = "block_embedding_bag_sparse_backward"
"""It follows no index: it hands them on to an update, which does."""

CALLS: Mapping[str, tuple[tuple[Tensor, ...], Mapping[str, Any], int]] = {
    "block_indices": ((WIDE["indices"].clamp(min=0),), {"first": 0, "rows": 2, "num_weights": 4}, 0),
    "block_embedding": ((WIDE["weight"], WIDE["indices"]), {}, 1),
    "block_embedding_bag": ((WIDE["weight"], WIDE["indices"], OFFSETS), {}, 1),
    "block_embedding_bag_backward": ((WIDE["grad"], WIDE["indices"], OFFSETS), {"num_weights": 4}, 1),
    _SPARSE: ((WIDE["grad"], WIDE["indices"], OFFSETS), {}, 1),
    "block_embedding_bag_per_sample_weights_backward": (
        (WIDE["grad"], WIDE["weight"], WIDE["indices"], OFFSETS),
        {},
        2,
    ),
    "bag_sizes": ((WIDE["indices"], OFFSETS), {}, 0),
}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("bag_sizes", _SPARSE)])
@pytest.mark.parametrize("index", [4, -2, 2**40])
def test_indices_that_lead_out_of_the_table_are_refused(name: str, index: int) -> None:
    operands, options, at = CALLS[name]
    block(name, *operands, **options)
    wrong = [*operands]
    wrong[at] = operands[at].clone()
    wrong[at][1] = index
    with pytest.raises(IndexError, match=f"the index {index} is out of bounds"):
        block(name, *wrong, **options)


@pytest.mark.parametrize("name", [name for name in CALLS if "bag" in name])
@pytest.mark.parametrize("offset", [6, -1])
def test_offsets_that_lead_out_of_the_lookups_are_refused(name: str, offset: int) -> None:
    operands, options, _ = CALLS[name]
    with pytest.raises(IndexError, match=f"the index {offset} is out of bounds for 6"):
        block(name, *operands[:-1], torch.tensor([0, offset]), **options)


@pytest.mark.parametrize("name", [name for name in CALLS if name.startswith("block_embedding_bag")])  # those with bags
def test_bags_that_do_not_fit_are_no_call(name: str) -> None:
    """Verification knows the shapes."""
    from graphir.ir.optypes.own import OWN

    operands, options, at = CALLS[name]
    meta = [operand.to("meta") for operand in operands]
    fake = OWN[f"graphir.{name}"].fake
    assert fake is not None
    fake(*meta, **options)
    meta[at] = meta[at].view(5, 1)
    with pytest.raises(RuntimeError, match="the operands are not bags of lookups"):
        fake(*meta, **options)


def _scratch(name: str, operands: list[Tensor | None], options: Mapping[str, Any], result: Any) -> int:
    given = [operand for operand in operands if operand is not None]
    pattern = "".join("_" if operand is None else "t" for operand in operands)
    made = list(result) if isinstance(result, tuple) else [result]
    inputs, outputs = [f"x{i}" for i in range(len(given))], [f"y{i}" for i in range(len(made))]
    blobs = {n: blob(n, t) for n, t in zip([*inputs, *outputs], [*given, *made], strict=True)}
    op = Operator(f"graphir.{name}", tuple(inputs), tuple(outputs), options, gpu(0), operands=pattern)
    assert call_of(op.type, op.args, pattern, len(inputs)) is not None
    found = scratch(op, blobs, {}, 1)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("lookups", "bags", "width"), [(4000, 400, 16), (2000, 1500, 64), (3000, 100, 4)])
@pytest.mark.parametrize("kind", ["sum", "mean", "weighted"])
def test_scratch_is_as_much_as_where_every_lookup_is_the_blocks_own(
    kind: str, lookups: int, bags: int, width: int, dtype: torch.dtype
) -> None:
    rows = 50
    indices = torch.randint(rows, (lookups,)).to(dtype)
    offsets = (torch.arange(bags) * lookups // bags).to(dtype)
    weight, grad = torch.randn(rows, width), torch.randn(bags, width)
    sizes = torch.full((bags,), 2, dtype=dtype) if kind == "mean" else None
    weights = torch.randn(lookups) if kind == "weighted" else None
    tail: list[Tensor | None] = [indices, offsets, sizes, weights]
    calls: list[tuple[str, list[Tensor | None], dict[str, Any]]] = [
        ("block_indices", [indices], {"first": 0, "rows": rows, "num_weights": rows, "padding_idx": 1}),
        ("bag_sizes", [indices, offsets], {"padding_idx": 1}),
        ("bag_sizes", [indices, offsets], {}),
        ("block_embedding", [weight, indices], {}),
        ("block_embedding_bag", [weight, *tail], {}),
        ("block_embedding_bag_backward", [grad, *tail], {"num_weights": rows}),
        ("block_embedding_bag_sparse_backward", [grad, *tail], {}),
        ("block_embedding_bag_per_sample_weights_backward", [grad, weight, indices, offsets], {}),
    ]
    with torch.inference_mode():
        for name, operands, options in calls:
            result = block(name, *operands, **options)
            made = sum(t.nbytes for t in (result if isinstance(result, tuple) else (result,)))
            measured = measured_peak(lambda n=name, o=operands, k=options: block(n, *o, **k)) - made  # type: ignore[misc]
            predicted = _scratch(name, operands, options, result)
            assert measured <= predicted + 64, name
            assert predicted <= 1.35 * measured + 256, name
