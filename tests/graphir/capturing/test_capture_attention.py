"""Attention is captured as an operator of graphir's own, which picks the kernel of its device; on the CPU it has
eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from direct import evaluate, matches_eager
from models import Example
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphir.capturing.capture import capture
from graphir.ir.blob import contiguous_strides
from graphir.ir.program import Program
from graphir.ir.size import bind_shape


class Attending(nn.Module):
    """Self-attention of ``[batch, length, width]``.

    Args:
        by_sequence: heads are views of the projection, as most models have them; else each head is contiguous.
        options: of ``scaled_dot_product_attention``.
    """

    def __init__(
        self, heads: int = 4, key_heads: int = 4, size: int = 8, mask: Tensor | None = None, learned: bool = False,
        by_sequence: bool = True, dtype: torch.dtype = torch.float32, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.key_heads, self.by_sequence, self.options = heads, key_heads, by_sequence, options
        width = heads * size
        self.query = nn.Linear(width, width, dtype=dtype)
        self.key_value = nn.Linear(width, 2 * key_heads * size, dtype=dtype)
        if learned:
            self.mask = nn.Parameter(mask)
        else:
            self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.key_value(x).chunk(2, -1)
        heads = [
            t.unflatten(-1, (n, -1)).transpose(1, 2)
            for t, n in ((self.query(x), self.heads), (key, self.key_heads), (value, self.key_heads))
        ]
        if not self.by_sequence:
            heads = [t.contiguous() for t in heads]
        return F.scaled_dot_product_attention(*heads, attn_mask=self.mask, **self.options).transpose(1, 2).flatten(2)


def example(dtype: torch.dtype = torch.float32, **options: Any) -> Example:
    torch.manual_seed(0)
    model = Attending(dtype=dtype, **options)
    width = model.query.in_features
    x, y = torch.randn(3, 6, width).to(dtype), torch.randn(3, 6, width).to(dtype)
    return Example(model, (x,), (y,), F.mse_loss)


def captured(given: Example) -> Program:
    return capture(given.model, given.inputs, targets=given.targets, loss=given.loss)


BOOL = torch.ones(6, 6, dtype=torch.bool).tril(1)
BOOL[2] = False

FUSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads contiguous": {"by_sequence": False},
    "causal": {"is_causal": True},
    "bool mask": {"mask": BOOL},
    "float mask": {"mask": torch.randn(1, 1, 6, 6)},
    "mask of keys": {"mask": torch.randn(1, 4, 1, 6)},
    "scaled": {"scale": 0.3},
    "grouped": {"key_heads": 2, "enable_gqa": True},
    "odd size": {"size": 7},
    "large size": {"size": 136, "heads": 2, "key_heads": 2},
    "bf16": {"dtype": torch.bfloat16},
    "f16": {"dtype": torch.float16},
    "f64": {"dtype": torch.float64},
}
MATH: dict[str, dict[str, Any]] = {
    "learned mask": {"mask": torch.randn(6, 6), "learned": True},
    "mask of three dimensions": {"mask": torch.randn(4, 6, 6)},
    "dropout": {"dropout_p": 0.3},
    "grouped with dropout": {"key_heads": 2, "enable_gqa": True, "dropout_p": 0.3},
    "causal with dropout": {"is_causal": True, "dropout_p": 0.3},
}


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_kernel_becomes_attention_with_the_bits_of_eager(name: str) -> None:
    given = example(**FUSED[name])
    program = captured(given)
    assert program.covers.fixed == ""
    assert [op.type for op in program.step.ops if "attention" in op.type] == [
        "graphir.attention", "graphir.attention_backward",
    ]  # fmt: skip
    matches_eager(program, given, batches=(5,))


@pytest.mark.parametrize("name", MATH)
def test_what_the_cpus_kernel_does_not_take_is_written_out(name: str) -> None:
    given = example(**MATH[name])
    program = captured(given)
    assert program.covers.fixed == ""
    assert not [op for op in program.step.ops if "attention" in op.type]
    matches_eager(program, given, batches=(1, 5))


def test_a_chosen_backend_is_kept() -> None:
    given = example()
    with sdpa_kernel(SDPBackend.MATH):
        program = captured(given)
        matches_eager(program, given)
    assert not [op for op in program.step.ops if "attention" in op.type]


@pytest.mark.parametrize("name", ["plain", "heads contiguous", "bool mask", "grouped", "odd size", "bf16", "f64"])
def test_declared_layouts_are_those_of_the_real_kernel(name: str) -> None:
    given = example(**FUSED[name])
    program = captured(given)
    x, y = (t.repeat(2, 1, 1) for t in (*given.inputs, *given.targets))
    feeds = [feed.blob for feed in program.interface.feeds]
    values = evaluate(program, dict(program.state), dict(zip(feeds, (x, y), strict=True)))  # type: ignore[arg-type]
    dims = {"batch": len(x)}
    for op in program.step.ops:
        for output in op.outputs if op.type.startswith("graphir.attention") else ():
            blob, real = program.step.blobs[output], values[output]
            shape = bind_shape(blob.shape, dims)
            strides = contiguous_strides(shape) if blob.strides is None else bind_shape(blob.strides, dims)
            assert real.stride() == tuple(strides), output


def test_results_and_gradients_are_called_after_the_function() -> None:
    program = captured(example())
    forward, backward = (op for op in program.step.ops if "attention" in op.type)
    assert forward.outputs == ("scaled_dot_product_attention", "scaled_dot_product_attention.logsumexp")
    assert program.step.gradients["scaled_dot_product_attention"] == backward.inputs[0]
    assert forward.args == {} and backward.args == {}


def test_dropout_draws_other_numbers_at_each_step_and_replica() -> None:
    given = example(dropout_p=0.5)
    program = captured(given)
    feeds = dict(zip([feed.blob for feed in program.interface.feeds], (*given.inputs, *given.targets), strict=True))
    losses = {
        evaluate(program, dict(program.state), feeds, step, replica)["loss"].item()  # type: ignore[arg-type]
        for step in range(2)
        for replica in range(2)
    }
    assert len(losses) == 4
