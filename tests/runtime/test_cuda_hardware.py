"""The CUDA executor on real devices."""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
from eager import assert_same_bits
from graphir.runtime import Session
from graphir.runtime.cuda.executor import Cuda
from runnable import captured, sgd, spread

from graphir import passes
from graphir.ir.program import Program
from graphir.plan import Plan

pytestmark = pytest.mark.cuda

ONE = {f"gpu:{i}": "cuda:0" for i in range(4)}
TWO = {f"gpu:{i}": f"cuda:{i % 2}" for i in range(4)}
EXAMPLES = {
    "mlp": models.mlp,
    "resnet": lambda: models.resnet(batch=4, blocks=2, dropout=0.3),
    "gpt": lambda: models.gpt(layers=1, dropout=0.1),
}
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def doubled(example: models.Example) -> list[torch.Tensor]:
    return [torch.cat([tensor] * 2).cuda() for tensor in (*example.inputs, *example.targets)]


def both(example: models.Example, fused: bool = False) -> tuple[Program, Plan, Plan]:
    """A program, and the plans of its replicas unshifted and shifted."""
    program = captured(example, torch.optim.AdamW(example.model.parameters(), lr=1e-3, fused=fused))
    return program, passes.emit(passes.replicate(program, [0, 1])), passes.emit(spread(program))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("binding", [ONE, pytest.param(TWO, marks=needs_two)], ids=["one", "two"])
def test_twenty_steps_shifted_and_unshifted(name: str, fused: bool, binding: dict[str, str]) -> None:
    example = EXAMPLES[name]()
    program, plain, shifted = both(example, fused)
    batch = doubled(example)
    here = {device: place for device, place in binding.items() if device in ("gpu:0", "gpu:1")}
    with (
        Session(plain, program.state, binding=here) as one,
        Session(shifted, program.state, binding=binding) as other,
        Session(plain, program.state, binding=here, executor="reference") as reference,
    ):
        assert one.executor == other.executor == "cuda"
        for _ in range(20):
            loss = one.step(*batch)
            assert loss.is_cuda and torch.equal(loss, other.step(*batch)) and torch.equal(loss, reference.step(*batch))
        for replica in (0, 1):
            assert_same_bits(one.state_dict(replica), other.state_dict(replica), "shifted")
            assert_same_bits(one.state_dict(replica), reference.state_dict(replica), "reference")


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_one_device_trains_as_eager(name: str) -> None:
    example = models.mlp() if name == "mlp" else models.resnet(batch=4, blocks=2)
    program = captured(example, sgd(example.model.parameters(), foreach=False))
    model = copy.deepcopy(example.model).cuda()
    optimizer = sgd(model.parameters(), foreach=False)
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        for _ in range(5):
            optimizer.zero_grad()
            loss = example.loss(model(*batch[:-1]), batch[-1])
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(session.step(*batch), loss.detach())
        state = session.state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_replayed_graph_has_the_bits_of_the_step(name: str) -> None:
    example = EXAMPLES[name]()
    program, _, shifted = both(example)
    batch = doubled(example)
    with (
        Session(shifted, program.state, binding=ONE) as stepped,
        Session(shifted, program.state, binding=ONE, cuda_graph=True) as replayed,
    ):
        for step in range(6):
            for session in (stepped, replayed):
                session.param_groups[0]["lr"] = 1e-3 / (step + 1)
            assert torch.equal(stepped.step(*batch), replayed.step(*batch))
        assert_same_bits(stepped.state_dict(), replayed.state_dict(), "replayed")


def test_a_step_does_not_wait_for_the_device() -> None:
    example = models.resnet(batch=4, blocks=2)
    program = captured(example, torch.optim.AdamW(example.model.parameters(), fused=True))
    plan = passes.emit(spread(program))
    batch = doubled(example)
    with Session(plan, program.state, binding=ONE) as session:
        session.step(*batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_ledger_beside_the_allocator() -> None:
    """The allocator rounds up, and kernels take memory of their own; the plan's bytes are a part of its."""
    example = models.resnet(batch=8, blocks=2)
    program = captured(example, sgd(example.model.parameters()))
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        for _ in range(3):
            session.step(*batch)
        executor = session._executor
        assert isinstance(executor, Cuda)
        (held,) = [held for held in executor.ledger().values() if held.place.type == "cuda"]
    peak = held.allocator["allocated_bytes.all.peak"] - before
    assert held.state < held.predicted <= peak + sum(tensor.nbytes for tensor in batch)
    assert held.allocator["num_ooms"] == 0


@needs_two
def test_nccl_reduces_among_two_gpus() -> None:
    example = models.mlp()
    program, plain, _ = both(example)
    batch, here = doubled(example), {"gpu:0": "cuda:0", "gpu:1": "cuda:1"}
    with (
        Session(plain, program.state, binding=here, collectives="native") as native,
        Session(plain, program.state, binding=here) as ordered,
    ):
        assert native.caveats and not ordered.caveats
        for _ in range(3):
            torch.testing.assert_close(native.step(*batch), ordered.step(*batch))
