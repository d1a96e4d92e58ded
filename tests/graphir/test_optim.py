"""graphir.optim.RowWiseAdagrad."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from eager import assert_same_bits
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.optim import RowWiseAdagrad


def caffe2(param: Any, moment: Any, indices: Any, gradients: Any, lr: float, epsilon: float) -> None:
    """``RowWiseSparseAdagrad`` of Caffe2's ``sgd/adagrad_op.h``, one row after the other; its rate is negative."""
    for index, gradient in zip(indices, gradients, strict=True):
        moment[index] += sum(g * g for g in gradient) / len(gradient)
        step = lr / (math.sqrt(moment[index]) + epsilon)
        param[index] += gradient * step


@pytest.mark.parametrize("sparse", [False, True])
def test_it_is_caffe2s(sparse: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(9, 5, sparse=sparse, dtype=torch.float64)
    theirs, moment = table.weight.detach().numpy().copy(), np.full(9, 0.25)
    optimizer = RowWiseAdagrad(table.parameters(), lr=0.1, eps=1e-3, initial_accumulator_value=0.25)
    for step in range(4):
        rows = torch.randperm(9, generator=torch.Generator().manual_seed(step))[:4]
        weights = torch.randn(4, 5, dtype=torch.float64)
        optimizer.zero_grad()
        (table(rows) * weights).sum().backward()
        optimizer.step()
        caffe2(theirs, moment, rows.numpy(), weights.numpy(), -0.1, 1e-3)
    np.testing.assert_allclose(table.weight.detach().numpy(), theirs, rtol=1e-12)
    np.testing.assert_allclose(optimizer.state[table.weight]["row_sum"].numpy(), moment, rtol=1e-12)


def test_equal_indices_are_added_up_first() -> None:
    tables = [nn.Embedding(4, 3, sparse=sparse) for sparse in (False, True)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        table(torch.tensor([1, 1, 2])).pow(2).sum().backward()
        RowWiseAdagrad(table.parameters(), lr=0.1).step()
    assert torch.allclose(tables[0].weight, tables[1].weight)


class Mixed(nn.Module):
    """A table, a matrix, a vector, a number a row, and a parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 3)
        self.conv = nn.Conv1d(1, 2, 3).to(memory_format=torch.contiguous_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.table(x)).sum() + self.conv(self.table(x)[:, None]).pow(2).mean()


@pytest.mark.parametrize("options", [{}, {"maximize": True, "initial_accumulator_value": 0.5}])
def test_sessions_have_its_bits_and_its_state(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.tensor([1, 3, 5])
    optimizer = RowWiseAdagrad(model.parameters(), lr=0.1, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    step()  # it begins with state
    program = graphir.capture(model, (x,), loss=lambda out: out, optimizer=optimizer)
    plan = passes.emit(passes.inject_copies(passes.shift_modules(program, {"linear": 1})))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for _ in range(3):
            session.step(x)
            step()
        assert_same_bits(session.state_dict(), model.state_dict(), "parameters")
        ours, theirs = session.optimizer_state_dict()["state"], optimizer.state_dict()["state"]
        for i, own in theirs.items():
            assert_same_bits(ours[i], own, f"state of {i}")


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"eps": -1e-3}, {"initial_accumulator_value": float("nan")}])
def test_numbers_out_of_range(option: dict[str, float]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=f"{name} is {value}, and has to be at least 0"):
        RowWiseAdagrad([nn.Parameter(torch.zeros(2))], **option)
