"""A batch or a length of 1, where PyTorch may run another step: the same bits, or a refusal that says what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from graphir.runtime import Session
from models import Example
from torch import Tensor, nn

import graphir
from graphir import CoverageError, GraphirError, PassError, capture, passes
from graphir.ir.guard import parse_guard
from graphir.ir.program import Program


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(6, 6), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def convolved(y: Tensor) -> Tensor:
    """With one row the transposed tensor counts as contiguous, and the backward takes a view where it copied."""
    return F.conv1d(y.transpose(1, 2), torch.ones(6, 6, 3), padding=1)


def rows_last(y: Tensor) -> Tensor:
    return y.transpose(0, 1).reshape(-1, 6).relu()


def patches(y: Tensor) -> Tensor:
    """One row of the reshaped tensor counts as contiguous, so the convolution does not lay out the channels last."""
    return F.conv2d(y.transpose(1, 2).reshape(-1, 6, 2, 4), torch.ones(6, 6, 1, 2))


def captured(body: Callable[[Tensor], Tensor], dims: Any = 0) -> Program:
    return capture(Model(body), (torch.randn(3, 8, 6),), loss=lambda y: y.square().mean(), batch_dims=dims)


def above_one(program: Program) -> dict[str, str]:
    """The dimensions that are bound from 2 on, and why."""
    return {
        guard.dims[0]: guard.reason for guard in program.covers.guards if (guard.relation, guard.number) == (">=", 2)
    }


def test_where_the_step_is_the_same_one_row_is_taken() -> None:
    program = captured(torch.relu, {0: "batch", 1: "length"})
    assert program.covers.guards == ()
    assert program.module is not None
    matches_eager(
        program, Example(program.module, (torch.randn(3, 8, 6),), (), lambda y: y.square().mean()), batches=(1,)
    )


@pytest.mark.parametrize("body", [convolved, patches, rows_last])
def test_where_it_is_another_one_row_is_recorded_when_it_comes(body: Callable[[Tensor], Tensor]) -> None:
    program = captured(body)
    assert program.covers.fixed == "" and program.dims == {"batch": 3} and above_one(program).keys() == {"batch"}
    eager = program.module
    assert eager is not None
    with Session(passes.emit(program), program.state) as session:
        for rows in (2, 1, 4):
            x = torch.randn(rows, 8, 6)
            eager.zero_grad()
            expected = eager(x).square().mean()
            expected.backward()
            assert torch.equal(session.step(x), expected.detach())
            gradients = session.gradients()
            assert all(torch.equal(gradients[name], param.grad) for name, param in eager.named_parameters())


@pytest.mark.parametrize("body", [convolved, patches, rows_last])
def test_what_was_recorded_elsewhere_refuses_one_row(body: Callable[[Tensor], Tensor]) -> None:
    program = captured(body).with_(witness=None)
    with Session(passes.emit(program), program.state) as session:
        session.step(torch.randn(2, 8, 6))
        with pytest.raises(CoverageError, match=r"'x'\): batch is 1, the program takes batch>=2: ") as error:
            session.step(torch.randn(1, 8, 6))
        assert above_one(program)["batch"] in error.value.what
        session.step(torch.randn(4, 8, 6))


def test_only_the_dimension_that_differs_is_bound() -> None:
    program = captured(rows_last, {0: "batch", 1: "length"})
    assert program.dims == {"batch": 3, "length": 8} and set(above_one(program)) <= {"batch", "length"}
    assert "batch" in above_one(program)


def test_what_a_module_refuses_a_session_refuses() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    program = capture(model, (torch.randn(4, 6),), loss=lambda y: y.square().mean())
    assert "Expected more than 1 value per channel" in above_one(program)["batch"]
    program = passes.replicate(program, [0, 1])
    assert above_one(program).keys() == {"gpu_0/batch", "gpu_1/batch"}
    with Session(passes.emit(program), program.state) as session:
        session.step(torch.randn(4, 6))
        with pytest.raises(CoverageError, match="batch is 1"):
            session.step(torch.randn(1, 6))
        session.step(torch.randn(3, 6))  # not two rows and one: three


def test_it_is_printed_saved_verified_and_asked_by_emit(tmp_path: Any) -> None:
    program = captured(rows_last)
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json")
    assert graphir.load(tmp_path / "p.json") == program
    with pytest.raises(PassError, match="takes batch>=2, not batch 1: operator"):
        passes.emit(program, dims={"batch": 1})
    with pytest.raises(GraphirError, match="dimension 'rows' of the guard rows>=2 has no value"):
        graphir.verify(program.with_(covers=program.covers.with_guards([parse_guard("rows>=2", "why")])))
    with pytest.raises(GraphirError, match="dimension 'rows' of recorded sizes is none of the program's"):
        graphir.verify(program.with_(covers=replace(program.covers, recorded=({"rows": 2},))))


def test_fixed_sizes_keep_the_strides_of_dimensions_of_one() -> None:
    class Permuted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.permute(0, 2, 1).exp()

    program = capture(Permuted(), (torch.randn(1, 3, 4),), batch_dims=((None,), {}, ()))
    assert program.step.blobs["exp"].strides == (12, 1, 4)


def test_graphs_refuse_one_row() -> None:
    program = captured(rows_last)
    with pytest.raises(GraphirError, match="the program takes batch>=2: operator"):
        graphir.to_fx(program)(torch.randn(1, 8, 6))


def test_compile_takes_one_row() -> None:
    model = Model(convolved)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    eager = Model(convolved)
    eager.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)

    def loss(y: Tensor) -> Tensor:
        return y.square().mean()

    with graphir.compile(model, (torch.randn(3, 8, 6),), loss=loss, optimizer=optimizer) as compiled:
        for rows in (3, 1, 2):
            x = torch.randn(rows, 8, 6)
            found = compiled.step(x)
            theirs.zero_grad()
            expected = loss(eager(x))
            expected.backward()
            theirs.step()
            assert torch.equal(found, expected.detach())
