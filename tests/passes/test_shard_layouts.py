"""passes.shard of values that lie in memory otherwise than row by row: they are joined as the model had them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import passes, runtime


class Laid(nn.Module):
    """A placed layer between replicated ones, which hand on, and read, what is laid out in some order."""

    def __init__(self, order: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.order = order
        self.first, self.placed, self.last = nn.Conv2d(3, 4, 1), Scaling(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.order(self.placed(self.order(self.first(x)))).mean((2, 3)))  # type: ignore[no-any-return]


class Scaling(nn.Module):
    """Elementwise: its results lie as its operands do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4, 1, 1), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) + x


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def rows_innermost(x: Tensor) -> Tensor:
    return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)


def turned(x: Tensor) -> Tensor:
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("order", [last, rows_innermost, turned])
def test_what_is_joined_lies_as_it_was_captured(order: Callable[[Tensor], Tensor], parts: int) -> None:
    torch.manual_seed(0)
    model = Laid(order).double()
    theirs = copy.deepcopy(model)
    x, y = torch.randn(4 * parts, 3, 2, 5, dtype=torch.float64), torch.randn(4 * parts, 1, dtype=torch.float64)
    held, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, theirs))
    mse = nn.functional.mse_loss
    program = graphir.capture(model, (x,), targets=(y,), loss=mse, optimizer=held, accumulate=parts)
    sharded = passes.inject_copies(passes.shard(program, {"placed": 1}, [0, 1, 2]))
    with runtime.Session(passes.emit(sharded), program.state, binding="cpu") as session:
        for rows in (9, 8, 4):
            x, y = torch.randn(rows * parts, 3, 2, 5, dtype=torch.float64), torch.randn(rows * parts, 1).double()
            loss = mse(theirs(x), y)
            eager.zero_grad()
            loss.backward()
            eager.step()
            assert torch.allclose(session.step(x, y), loss.detach(), rtol=1e-10)
        for name, value in theirs.state_dict().items():
            assert torch.allclose(session.state_dict()[name], value, rtol=1e-9), name
