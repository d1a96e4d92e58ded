"""Eager replicas train as a session does whose program was replicated, with the same masks and the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphir
from graphir import parallel, passes, runtime

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3


class WithLoss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.module(x), y)


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_dropout_and_batch_norm_train_as_in_a_session() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)
    )
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(STEPS)]

    eager = copy.deepcopy(module)
    wrapped = graphir.DataParallel(WithLoss(eager), [0, 1])
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        with graphir.seeded(step):
            loss = wrapped(x, y).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    x, y = batches[0]
    program = graphir.capture(module, inputs=(x[:4],), targets=(y[:4],), loss=F.cross_entropy, optimizer=optimizer)
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for (x, y), loss in zip(batches, losses, strict=True):
            assert torch.equal(session.step(x, y), loss)
        state = session.state_dict()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_synchronised_norms_train_as_in_a_session() -> None:
    """To rounding: a plan merges statistics in double precision."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), parallel.SynchronizedBatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    program = graphir.capture(module, inputs=(x[:4],), targets=(y[:4],), loss=F.cross_entropy, optimizer=optimizer)
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        planned = [session.step(x, y) for _ in range(STEPS)]
        state = session.state_dict()
    for loss in planned:
        optimizer.zero_grad()
        eager = graphir.DataParallel(WithLoss(module), [0, 1])(x, y).mean()
        eager.backward()
        optimizer.step()
        torch.testing.assert_close(loss, eager.detach(), rtol=1e-6, atol=1e-6)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-6)
