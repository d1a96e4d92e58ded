"""Sizes at which torch takes a view of a tensor that it copies at others: a program does not cover them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eager import assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import CoverageError


class Overwrites(nn.Module):
    """Overwrites what a reshape or a copy of a slice returns, and reads the sliced tensor afterwards."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        nn.functional.relu(self.part(h), inplace=True)
        return h


@pytest.mark.parametrize(
    ("part", "guard", "covered", "refused"),
    [
        (lambda h: h[:, :5].reshape(-1), "length>=6", 6, 5),
        (lambda h: h[:, :5].contiguous(), "length>=6", 7, 5),
        (lambda h: h[:, 2:].reshape(-1), "length>=2", 6, None),
    ],
)
def test_a_slice_that_may_be_the_whole_tensor_is_guarded(
    part: Callable[[Tensor], Tensor], guard: str, covered: int, refused: int | None
) -> None:
    model = Overwrites(part)
    program = graphir.capture(model, (torch.randn(4, 12),), batch_dims={0: "batch", 1: "length"})
    assert guard in [str(found) for found in program.covers.guards]
    with Session(emit(program), program.state) as session:
        x = torch.randn(3, covered)
        assert_same_bits({"out": session.step(x)}, {"out": model(x).detach()}, "covered")
        if refused is not None:
            with pytest.raises(CoverageError, match=rf"{guard}"):
                session.step(torch.randn(3, refused))


def test_a_linear_layer_on_a_slice_is_guarded() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(512, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x[:, :16])

    program = graphir.capture(First(), (torch.randn(2, 24, 512),), batch_dims={0: "batch", 1: "length"})
    assert "length>=17" in [str(guard) for guard in program.covers.guards]


def test_whole_tensors_are_not_guarded() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(12, 36)
            self.register_buffer("mask", torch.ones(32, 32, dtype=torch.bool).tril())

        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            q, k, v = (t.view(batch, length, 3, 4).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
            weights = (q @ k.mT).masked_fill(~self.mask[:length, :length], -1e9).softmax(-1)
            return (weights @ v).transpose(1, 2).reshape(batch, length, width)

    program = graphir.capture(Attends(), (torch.randn(4, 9, 12),), batch_dims={0: "batch", 1: "length"})
    assert all("length!=" not in str(guard) for guard in program.covers.guards)
