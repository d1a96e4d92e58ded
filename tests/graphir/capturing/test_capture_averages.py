"""Batch norms with ``momentum=None``: running statistics are the averages over all batches, bit for bit as in eager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from eager_only import EagerOnly
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.parallel import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [
    (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    (nn.BatchNorm3d, SynchronizedBatchNorm3d),
]
DIMS = pytest.mark.parametrize("dims", [0, 1, 2], ids=["1d", "2d", "3d"])


class Averaging(nn.Module):
    """A norm that is called twice in a step, so that it counts two batches, and one without weights."""

    def __init__(self, dims: int, synchronised: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        kind = KINDS[dims][synchronised]
        self.twice, self.plain = kind(4, momentum=None), kind(4, momentum=None, affine=False)
        self.fc = nn.Linear(4, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        out = self.plain(self.twice(self.twice(x).tanh()))
        return self.fc(out.flatten(2).mean(2) if x.dim() > 2 else out)


def batch(dims: int, rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, *[3] * (dims and dims + 1), generator=generator, dtype=torch.float64) + seed
    return x.to(dtype), torch.randint(3, (rows,), generator=generator)


def trained(session: runtime.Session, model: nn.Module, dims: int) -> None:
    """Four steps of a session and of the model in eager PyTorch, to the same bits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, rows in enumerate((6, 6, 5, 9)):
        x, y = batch(dims, rows, step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        assert_same_bits({"loss": session.step(x, y)}, {"loss": loss.detach()}, f"step {step}")
        assert_same_bits(session.state_dict(), dict(model.state_dict()), f"state after step {step}")


@pytest.mark.parametrize("executor", ["reference", "threads"])
@DIMS
def test_training_has_the_bits_of_eager(dims: int, executor: Any) -> None:
    model = Averaging(dims)
    x, y = batch(dims, 6, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer)
    assert not program.covers.fixed and graphir.parse(str(program)) == program
    assert [op.type for op in program.step.ops].count("graphir.cumulative_batch_norm") == 3
    with runtime.Session(passes.emit(program), program.state, executor=executor) as session:
        trained(session, model, dims)


def test_a_program_goes_on_from_the_number_of_batches_that_it_was_captured_with() -> None:
    model = Averaging(0)
    for seed in range(3):
        model(batch(0, 6, seed)[0])
    x, y = batch(0, 6, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer)
    assert int(program.state["twice.num_batches_tracked"]) == 6
    with runtime.Session(passes.emit(passes.share_storage(program)), program.state) as session:
        trained(session, model, 0)


@DIMS
def test_data_parallel_s_plans_have_the_bits_of_eager_replicas(dims: int) -> None:
    found = []
    for kind in (graphir.DataParallel, EagerOnly):
        module = Averaging(dims)
        model = kind(module, device_ids=[0, 1], binding="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphir.EagerWarning)
            for step, rows in enumerate((6, 6, 5)):
                x, y = batch(dims, rows, step)
                module.zero_grad()
                F.cross_entropy(model(x), y).backward()
        found.append({**module.state_dict(), **{f"{n} grad": p.grad for n, p in module.named_parameters()}})
    assert_same_bits(*found, "after three steps")


@DIMS
def test_synchronised_they_average_over_whole_batches(dims: int) -> None:
    """On the fast path of replicas, in eager ones, and in a session by the pass."""
    double = torch.float64
    whole = Averaging(dims, dtype=double)
    module, eager, plain = (Averaging(dims, synchronised, double) for synchronised in (True, True, False))
    example, target = batch(dims, 6, 0, double)
    program = graphir.capture(plain, (example,), targets=(target,), loss=F.cross_entropy)
    program = passes.sync_batch_norm(passes.replicate(program, [0, 1]))
    fast = graphir.DataParallel(module, device_ids=[0, 1], binding="cpu")
    slow = EagerOnly(eager, device_ids=[0, 1], binding="cpu")
    with warnings.catch_warnings(), runtime.Session(passes.emit(program), program.state) as session:
        warnings.simplefilter("error", graphir.EagerWarning)
        for step, rows in enumerate((6, 6, 5, 2)):
            x, y = batch(dims, rows, step, double)
            expected = whole(x)
            for output in (fast(x), slow(x)):
                torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(session.step(x, y), F.cross_entropy(expected, y), rtol=1e-6, atol=0)
        for state in (module.state_dict(), eager.state_dict(), session.state_dict(0), session.state_dict(1)):
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9, msg=name)
