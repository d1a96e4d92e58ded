"""Rules for tensors without data give the strides of torch's kernels, whatever the order of the dimensions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import permutations, product

import pytest
import torch
from torch import Tensor

from graphir.ir.meta import rule_of
from graphir.ir.opset import overload
from graphir.ir.optypes.table import LISTED, operator_type

ELSEWHERE = ("_grouped_mm", "_linalg_svd", "_unsafe_view", "linalg_eig", "view")
"""Names whose rules :mod:`test_meta` holds against the kernels."""
OF_TYPES = ("native_group_norm", "native_group_norm_backward", "native_layer_norm")
"""Names whose rules are about element types."""
LAYOUTS = sorted(
    type for type in LISTED if operator_type(type).rule and type.split(".")[1] not in (*ELSEWHERE, *OF_TYPES)
)


def in_order(shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A dense tensor whose dimensions lie in memory in *order*, from the outermost to the innermost."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.rand([shape[d] for d in order]).permute(back)


def windows(shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Tensors of *shape* in every order, with gaps, and repeated."""
    yield from (in_order(shape, order) for order in permutations(range(len(shape))))
    yield torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2]
    yield torch.rand(*shape[1:]).expand(shape)
    yield torch.rand(()).expand(shape)


PAIRED = {
    "_log_softmax_backward_data": (1, torch.float32),
    "hardsigmoid_backward": (),
    "hardswish_backward": (),
    "hardtanh_backward": (-1.0, 1.0),
    "logit_backward": (),
    "softplus_backward": (1.0, 20.0),
}
"""Types that take two tensors of one shape, and what follows."""

BROADCAST = {
    "copysign": {},
    "div": {"rounding_mode": "floor"},
    "floor_divide": {},
    "special_xlog1py": {},
    "xlogy": {},
}
"""Types that take two tensors, the second of which may lack the first dimension, and what follows by name."""

LOSSES = {"mse_loss_backward": (1,), "huber_loss_backward": (1, 1.0), "smooth_l1_loss_backward": (1, 1.0)}
"""Types that take a gradient, two tensors of one shape, and what follows."""


def calls(name: str) -> Iterator[tuple[object, ...]]:
    """Positional arguments in many layouts for an operator."""
    statistics, weight = (torch.rand(2, 3, 1), torch.rand(2, 3, 1)), torch.rand(4)
    channels = [torch.rand(3) for _ in range(5)]
    pairs = list(product(windows((2, 3, 4)), windows((2, 3, 4))))
    for a, b in random.Random(0).sample(pairs, len(pairs) // 4):
        if name in PAIRED:
            yield a, b, *PAIRED[name]
        elif name in BROADCAST:
            yield a, b
            yield a, b[0]
        elif name == "native_dropout_backward":
            yield a, b > 0.5, 2.0
        elif name in LOSSES:
            yield torch.rand(()), a, b, *LOSSES[name]
        elif name == "elu_backward":
            yield a, 1.0, 1.0, 1.0, False, b
        elif name == "native_layer_norm_backward":
            yield a, b, [4], *statistics, weight, weight, [True, True, True]
        elif name == "native_batch_norm_backward":
            yield a, b, *channels, True, 1e-5, [True, True, False]
            yield a, b, *channels[:3], torch.empty(0), torch.empty(0), False, 1e-5, [True, True, False]
        elif name == "normal" and (a.numel(), b.numel()) == (24, 24):
            yield a, b
    for a in (*windows((2, 3, 4, 5)), *windows((2, 3, 1))):
        if name in ("_standard_gamma", "log_sigmoid_forward", "poisson", "uniform"):
            yield (a,)
        elif name == "pow":
            yield 2.0, a
        elif name == "glu_backward" and a.dim() == 4:
            yield a, torch.rand(2, 6, 4, 5), 1
            yield torch.rand(2, 3, 4, 5), torch.cat([a, a], 1), 1
        elif name == "native_batch_norm":
            yield a, *channels[:4], True, 0.1, 1e-5
        elif name == "channel_shuffle" and a.dim() == 4:
            yield a.expand(2, 3, 4, 5), 3
        elif name == "max_unpool2d" and a.dim() == 4:
            yield a, torch.zeros(2, 3, 4, 5, dtype=torch.int64), [8, 10]
            yield a[:1], torch.zeros(1, 3, 4, 5, dtype=torch.int64), [8, 10]
        elif name == "replication_pad2d" and a.dim() == 4:
            yield a, [1, 1, 1, 1]
        elif name.endswith("_pad2d_backward") and a.dim() == 4:
            yield torch.rand(2, 3, 6, 7), a, [1, 1, 1, 1]


def layouts(returned: Tensor | tuple[Tensor | None, ...]) -> list[list[tuple[int, int]] | None]:
    """Sizes and strides of the dimensions that have a stride that means something."""
    results = [returned] if isinstance(returned, Tensor) else returned
    return [None if t is None else [(n, s) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in results]


def bare_of(tensor: Tensor) -> Tensor:
    """The tensor without its data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def torchs_own(type: str, bare: list[object], named: dict[str, str]) -> object:
    """The layouts that torch's rule gives; None where it fails."""
    try:
        return layouts(overload(type)(*bare, **named))
    except (RuntimeError, ValueError):
        return None


@pytest.mark.parametrize("type", LAYOUTS)
def test_rules_give_the_strides_of_the_kernels(type: str) -> None:
    mistaken, name = 0, type.split(".")[1]
    for args in calls(name):
        named = BROADCAST.get(name, {})
        bare = [bare_of(arg) if isinstance(arg, Tensor) else arg for arg in args]
        real = layouts(overload(type)(*args, **named))
        assert layouts(rule_of(type)(*bare, **named)) == real
        mistaken += torchs_own(type, bare, named) != real
    assert mistaken, "torch's own rule is right: this one is not needed"


@pytest.mark.parametrize("shape", [(2, 8, 1, 1), (2, 1, 3, 3), (1, 8, 1, 1)])
@pytest.mark.parametrize(
    ("type", "rest"),
    [
        ("relu.default", ()),
        ("hardswish.default", ()),
        ("mul.Tensor", (2.0,)),
        ("add.Tensor", (None,)),
        ("mse_loss_backward.default", (None, None, 1)),
        ("_log_softmax.default", (1, False)),
        ("upsample_nearest2d.default", ([4, 4],)),
    ],
)
def test_channels_last_of_what_is_contiguous_too(type: str, rest: tuple[object, ...], shape: tuple[int, ...]) -> None:
    """Every stride is the kernel's, those along dimensions of one element included. None stands for the tensor."""
    picture = torch.rand(shape).contiguous(memory_format=torch.channels_last)
    picture = picture.as_strided(shape, torch.empty_like(picture, memory_format=torch.channels_last).stride())
    type, bare = f"aten.{type}", bare_of(picture)
    real = overload(type)(picture, *(picture if arg is None else arg for arg in rest))
    assert rule_of(type)(bare, *(bare if arg is None else arg for arg in rest)).stride() == real.stride()
