"""Models of the zoo on replicas with synchronised batch norms train as one device does that has the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from eager import furthest
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_rows import Batch, Row
from zoo_vision import VISION

import graphir
from graphir import passes, runtime

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 3
CASES = [("resnet", 4), ("r3d", 3)]
"""A row, and the number of replicas: batch norms over pictures, and over clips."""


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def doubled(batch: Batch) -> Batch:
    """The batch, real numbers in double precision."""
    return Batch(
        *pytree.tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, tuple(batch))
    )


def batch_of(row: Row, size: int, step: int) -> Batch:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + step)
        return doubled(row.data(size))


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert furthest(ours.double(), theirs.double()) < 1e-6, what


@pytest.mark.parametrize(("name", "replicas"), CASES)
def test_training_is_that_of_the_whole_batch(name: str, replicas: int) -> None:
    """Losses, parameters, optimizer state and running statistics over several steps, of even and of uneven shares, down
    to one row."""
    row = VISION[name]
    model = seeded(row.model, 0).train().double()
    whole = copy.deepcopy(model)
    batch = batch_of(row, 4, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    program = graphir.capture(model, batch.inputs, targets=batch.targets, loss=row.loss, optimizer=optimizer)
    program = passes.sync_batch_norm(passes.replicate(program, list(range(replicas))))
    plan = passes.emit(program)
    assert runtime.check(plan) == []
    reference = torch.optim.SGD(whole.parameters(), lr=0.02, momentum=0.9)
    with runtime.Session(plan, program.state, executor="threads") as session:
        for step, size in enumerate((2 * replicas, replicas, 2 * replicas - 1)[:STEPS]):
            batch = batch_of(row, size, step)
            loss = session.step(*batch.inputs, *batch.targets)
            reference.zero_grad()
            expected = row.loss(whole(*batch.inputs), *batch.targets)
            expected.backward()
            reference.step()
            assert_close(loss, expected.detach(), f"loss of step {step}")
        states = [session.state_dict(replica=r) for r in range(replicas)]
    for key, value in whole.state_dict().items():
        assert_close(states[0][key], value, key)
        assert all(torch.equal(states[0][key], state[key]) for state in states[1:]), key


def test_shares_alone_do_not_train_as_the_whole_batch() -> None:
    """What the pass is for: without it, replicas normalise by their own shares."""
    row = VISION["resnet"]
    model = seeded(row.model, 0).train().double()
    batch = batch_of(row, 4, 0)
    program = graphir.capture(model, batch.inputs, targets=batch.targets, loss=row.loss)
    program = passes.replicate(program, [0, 1])
    with runtime.Session(passes.emit(program), program.state) as session:
        alone = session.step(*batch.inputs, *batch.targets)
    expected = row.loss(model(*batch.inputs), *batch.targets)
    first = alone[0] if isinstance(alone, tuple) else alone
    assert furthest(torch.as_tensor(first).detach(), expected.detach()) > 1e-3
