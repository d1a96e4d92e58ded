"""The kernels that are said to allocate nothing but results and converted operands: each is called and watched."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import torch
from graphir.runtime.profiling.calls import Subject, measured
from single_calls import subject_of
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.analysis.formulas.plain_kernels import PLAIN
from graphir.analysis.scratch import scratch
from graphir.ir.opset import signature

SHAPE: Final = (4, 8, 6, 10)
EACH: Final = prod(SHAPE)
INDEX: Final = torch.zeros(SHAPE, dtype=torch.int64)

VALUES: Final[dict[str, Any]] = {
    "alpha": 1.0, "beta": 1.0, "ceil_mode": False, "count_include_pad": True, "delta": 1.0, "dilation": (1, 1),
    "dim": 1, "dims": (1,), "divisor_override": None, "end": 3, "exponent": 2, "fill_value": 1, "ignore_index": -100,
    "index": 1, "input_scale": 1.0, "is_result": False, "kernel_size": (2, 2), "lambd": 0.5, "max": 1, "max_val": 1.0,
    "min": 0, "min_val": 0.0, "n": 40, "negative_slope": 0.1, "num_weights": 50, "other": 2, "p": 0.5, "pad": (1, 2),
    "padding": (0, 0), "padding_idx": -1, "reduction": 1, "repeats": (1, 2, 1, 1), "s": 1.0, "scale": 1.0,
    "scale_grad_by_freq": False, "self": 2, "self_is_result": False, "shifts": (1,), "size": SHAPE, "start": 0,
    "step": 1, "stride": (480, 60, 10, 1), "threshold": 0.5, "upscale_factor": 2, "value": 1.0, "weight": 0.5,
    "downscale_factor": 2, "output_size": (3, 5),
}  # fmt: skip
"""What arguments that a type requires are given."""

SMALL: Final = torch.rand(4, 8, 3, 5)
SPECIAL: Final[dict[str, tuple[list[Any], dict[str, Any]]]] = {
    "aten.cat.default": ([[torch.rand(SHAPE), torch.rand(SHAPE)]], {"dim": 1}),
    "aten.stack.default": ([[torch.rand(SHAPE), torch.rand(SHAPE)]], {"dim": 1}),
    "aten.index.Tensor": ([torch.rand(SHAPE), [None, torch.zeros(70, dtype=torch.int64)]], {}),
    "aten._unsafe_index.Tensor": ([torch.rand(SHAPE), [None, torch.zeros(70, dtype=torch.int64)]], {}),
    "aten.where.self": ([torch.ones(SHAPE, dtype=torch.bool), torch.rand(SHAPE), torch.rand(SHAPE)], {}),
    "aten.masked_fill.Scalar": ([torch.rand(SHAPE), torch.ones(SHAPE, dtype=torch.bool)], {}),
    "aten.masked_fill_.Scalar": ([torch.rand(SHAPE), torch.ones(SHAPE, dtype=torch.bool)], {}),
    "aten.masked_fill.Tensor": ([torch.rand(SHAPE), torch.ones(SHAPE, dtype=torch.bool), torch.rand(())], {}),
    "aten.masked_fill_.Tensor": ([torch.rand(SHAPE), torch.ones(SHAPE, dtype=torch.bool), torch.rand(())], {}),
    "aten.gather.default": ([torch.rand(SHAPE), INDEX], {}),
    "aten.index_select.default": ([torch.rand(SHAPE), torch.zeros(70, dtype=torch.int64)], {}),
    "aten.scatter.src": ([torch.rand(SHAPE), INDEX, torch.rand(SHAPE)], {}),
    "aten.scatter.value": ([torch.rand(SHAPE), INDEX], {}),
    "aten.scatter_add.default": ([torch.rand(SHAPE), INDEX, torch.rand(SHAPE)], {}),
    "aten.select_scatter.default": ([torch.rand(SHAPE), torch.rand(4, 6, 10)], {}),
    "aten.slice_scatter.default": ([torch.rand(SHAPE), torch.rand(4, 3, 6, 10)], {"dim": 1, "start": 0, "end": 3}),
    "aten.select_backward.default": ([torch.rand(4, 6, 10)], {"input_sizes": SHAPE}),
    "aten.slice_backward.default": ([torch.rand(4, 3, 6, 10)], {"input_sizes": SHAPE}),
    "aten.embedding.default": ([torch.rand(50, 16), INDEX], {}),
    "aten.embedding_dense_backward.default": ([torch.rand(*SHAPE, 7), INDEX], {}),
    "aten.nll_loss_forward.default": ([torch.rand(40, 10), INDEX[0, 0, 0].repeat(4)], {}),
    "aten.nll_loss_backward.default": (
        [torch.rand(()), torch.rand(40, 10), INDEX[0, 0, 0].repeat(4), None, torch.rand(())], {}
    ),
    "aten.avg_pool2d_backward.default": ([SMALL, torch.rand(SHAPE)], {"stride": (2, 2)}),
    "aten._adaptive_avg_pool2d_backward.default": ([SMALL, torch.rand(SHAPE)], {}),
    "aten.max_pool2d_with_indices_backward.default": (
        [SMALL, torch.rand(SHAPE), torch.zeros(4, 8, 3, 5, dtype=torch.int64)], {"stride": (2, 2)}
    ),
    "aten.bmm.default": ([torch.rand(4, 60, 70), torch.rand(4, 70, 80)], {}),
    "aten.sum.dim_IntList": ([torch.rand(SHAPE)], {"dim": (1,)}),
    "aten.mean.dim": ([torch.rand(SHAPE)], {"dim": (1,)}),
    "aten.amax.default": ([torch.rand(SHAPE)], {"dim": (1,)}),
    "aten.amin.default": ([torch.rand(SHAPE)], {"dim": (1,)}),
    "aten.argmax.default": ([torch.rand(SHAPE)], {"dim": 1}),
    "aten.argmin.default": ([torch.rand(SHAPE)], {"dim": 1}),
    "aten.arange.start": ([], {"end": 1000}),
    "aten.clamp.default": ([torch.rand(SHAPE)], {"min": 0.25, "max": 0.5}),
    "aten.clamp_.default": ([torch.rand(SHAPE)], {"min": 0.25}),
    "aten._to_copy.default": ([torch.rand(SHAPE)], {"dtype": torch.bfloat16}),
}  # fmt: skip
"""Operands that are not all alike, and arguments, of the types that want them."""

DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


def operands_of(type: str) -> tuple[list[Any], dict[str, Any]]:
    """Operands and arguments with which a type can be called."""
    given, args = SPECIAL.get(type, (None, {}))
    sig = signature(type)
    if given is None:
        given = [torch.rand(SHAPE) for p in sig.tensors if p.required]
    required = {p.name: VALUES[p.name] for p in sig.params if p.kind == "value" and p.required and p.name not in args}
    return given, {**required, **args}


def versions(given: list[Any]) -> Iterator[list[Any]]:
    """These operands in other layouts, and of other types."""

    def each(change: Any, only_first: bool = False) -> list[Any]:
        count = iter(range(99))
        return pytree.tree_map(  # type: ignore[no-any-return]
            lambda x: change(x) if isinstance(x, Tensor) and not (only_first and next(count)) else x, given
        )

    yield given
    for only_first in (False, True):
        yield each(lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x, only_first)
        yield each(lambda x: x.to(memory_format=torch.channels_last) if x.dim() == 4 else x, only_first)
        yield each(lambda x: x[..., ::2] if x.dim() == 4 else x, only_first)
        yield each(lambda x: x[:1].expand(x.shape) if x.dim() > 1 else x, only_first)
        for dtype in DTYPES:
            yield each(lambda x, dtype=dtype: x.to(dtype) if x.is_floating_point() else x, only_first)


def subjects(type: str) -> Iterator[tuple[str, Subject]]:
    given, args = operands_of(type)
    seen = set()
    for number, version in enumerate(versions(given)):
        kind = tuple((x.dtype, x.stride()) for x in pytree.tree_leaves(version) if isinstance(x, Tensor))
        if kind in seen:
            continue
        seen.add(kind)
        subject = subject_of(type, version, args)
        if subject is not None:
            yield f"{type} {number}", subject


def test_each_type_allocates_what_its_rule_says() -> None:
    """All are measured under one profiler, whose start takes long."""
    calls, threads = {}, 2
    for type in PLAIN:
        calls.update(dict(subjects(type)))
    found, failed = measured(calls, threads)
    covered, wrong = set(), []
    for name, figures in found.items():
        op, blobs, dims, _ = calls[name]
        said = scratch(op, blobs, dims, threads)
        if said is None:
            continue
        covered.add(op.type)
        # Scalars, and what threads add up in: not in any rule.
        if abs(said - figures.scratch) > 128 * threads or abs(figures.kept) > 64:
            wrong.append((name, [blobs[x][1:3] + blobs[x][6:7] for x in op.inputs], said, figures))
    assert not wrong, f"{len(wrong)}: " + "\n".join(map(str, wrong[:80]))
    assert set(PLAIN) - covered == set(), "types that nothing has measured"
    assert not failed


def test_every_type_is_one_of_torchs() -> None:
    for type in PLAIN:
        assert signature(type)
