"""Replicas that share a batch unequally: which rows each gets, and what their mean is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import normed
import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits, furthest, optimizer_tensors, rows_by
from graphir.runtime import Session
from runnable import captured
from torch import Tensor, nn

import graphir
from graphir import SessionError, passes
from graphir.ir.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mlp(rows: int = 4, **options: Any) -> models.Example:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))
    return models.Example(model, *batch(rows, 0), F.cross_entropy)


def batch(rows: int, seed: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 5, generator=generator),), (torch.randint(3, (rows,), generator=generator),)


def assert_bits(session: Session, example: models.Example, shares: Sequence[int], steps: Sequence[int]) -> None:
    """A session takes the steps of eager PyTorch share by share, of so many rows each."""
    eager = ShareByShare(example.model, example.loss, sgd, len(shares))
    for step, rows in enumerate(steps):
        (x,), (y,) = batch(rows, step)
        sizes = rows_by(shares, rows)
        expected = eager.step_on([((a,), (b,), {}) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)])
        assert_same_bits({"loss": session.step(x, y)}, {"loss": expected}, f"step {step}")
        for replica, (model, optimizer) in enumerate(zip(eager.models, eager.optimizers, strict=True)):
            assert_same_bits(session.state_dict(replica), model.state_dict(), f"step {step}, replica {replica}")
            ours = optimizer_tensors(session.optimizer_state_dict(replica))
            assert_same_bits(ours, optimizer_tensors(optimizer.state_dict()), f"step {step}, replica {replica}")


@pytest.mark.parametrize(
    ("shares", "steps", "executor"),
    [
        ((3, 1), [8, 10, 7, 3, 1], "reference"),
        ((1, 3), [8, 5, 1], "serial"),
        ((3, 1, 4), [16, 11, 2, 3, 1], "threads"),
    ],
)
def test_steps_have_the_bits_of_eager_share_by_share(shares: tuple[int, ...], steps: list[int], executor: Any) -> None:
    """Of batches with fewer rows too, which leave the last replicas none."""
    example = mlp()
    program = captured(example, sgd(example.model))
    plan = passes.emit(passes.replicate(program, devices=range(len(shares)), shares=shares))
    with Session(plan, program.state, binding="cpu", executor=executor, witness=program) as session:
        assert_bits(session, example, shares, steps)


def test_a_plan_that_was_saved_divides_a_batch_by_the_same_shares(tmp_path: Path) -> None:
    example = mlp()
    program = captured(example, sgd(example.model))
    passes.emit(passes.replicate(program, devices=[0, 1], shares=[3, 1])).save(tmp_path / "p.json")
    plan = graphir.load(tmp_path / "p.json")
    with Session(plan, program.state, binding="cpu") as session:
        assert_bits(session, example, (3, 1), [8, 5])


def assert_trains_as_one_device(program: Program, model: nn.Module, steps: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The replicas' steps are those of the module on the whole batch, up to rounding in double precision."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    with Session(passes.emit(program), program.state, binding="cpu", witness=program) as session:
        for x, y in steps:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            assert torch.allclose(session.step(x, y), loss, rtol=1e-12)
        for name, value in session.state_dict().items():
            assert furthest(value.double(), model.state_dict()[name].double()) < 1e-11, name


def test_the_mean_is_that_of_the_whole_batch() -> None:
    """In micro-batches, each of which is divided by the shares."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batches = [batch(rows, rows) for rows in (24, 30, 15, 3)]
    steps = [(x.double(), y) for (x,), (y,) in batches]
    x, y = steps[0]
    program = graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=sgd(model), accumulate=3)
    replicated = passes.replicate(program, devices=[0, 1], shares=[3, 1])
    assert list(replicated.dims.values()) == [12, 4]
    assert_trains_as_one_device(replicated, model, steps)


def test_synchronised_batch_norms_count_the_rows_of_each_replica() -> None:
    torch.manual_seed(0)
    model = normed.Normed().double()
    program = passes.replicate(normed.captured(model, sgd(model)), devices=[0, 1, 2], shares=[3, 1, 2])
    steps = [normed.batch(rows, rows) for rows in (18, 7, 4, 3)]
    assert_trains_as_one_device(passes.sync_batch_norm(program), model, steps)


def test_where_a_share_of_one_row_is_refused_the_first_replicas_take_the_rows() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    example = models.Example(model, *batch(4, 0), F.cross_entropy)
    program = captured(example, sgd(model))
    plan = passes.emit(passes.replicate(program, devices=[0, 1, 2], shares=[3, 1, 4]), {"batch": 8})
    eager = ShareByShare(model, example.loss, sgd, 3)
    with Session(plan, program.state, binding="cpu", witness=program) as session:
        for rows, sizes in ((24, [9, 3, 12]), (9, [4, 2, 3]), (8, [6, 2]), (5, [5])):
            (x,), (y,) = batch(rows, rows)
            expected = eager.step_on([((a,), (b,), {}) for a, b in zip(x.split(sizes), y.split(sizes), strict=True)])
            assert_same_bits({"loss": session.step(x, y)}, {"loss": expected}, f"{rows} rows")


def test_outputs_are_gathered_in_the_order_of_the_rows() -> None:
    model = nn.Embedding(40, 3)
    program = graphir.capture(model, (torch.arange(4),))
    plan = passes.emit(passes.replicate(program, devices=[2, 0], shares=[1, 4]))
    with Session(plan, program.state, binding="cpu") as session:
        for rows in (15, 6, 2, 1):
            x = torch.arange(rows)
            assert torch.equal(session.step(x), model(x))


def test_a_batch_without_rows_is_refused() -> None:
    example = mlp()
    program = captured(example)
    plan = passes.emit(passes.replicate(program, devices=[0, 1], shares=[3, 1]))
    message = r"2 replicas: shares=\[3, 1\] makes 0 shares of at most 0\n.*\n  fix  give at least 1 row"
    with Session(plan, program.state, binding="cpu") as session:
        (x,), (y,) = batch(0, 0)
        with pytest.raises(SessionError, match=message):
            session.step(x, y)
