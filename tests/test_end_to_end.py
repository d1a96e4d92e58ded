"""From a module to a plan that trains, held against eager PyTorch bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from eager import MakeOptimizer, ShareByShare, assert_same_bits, furthest, optimizer_tensors
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program

STEPS = 20


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)


MODELS: dict[str, Callable[[int], models.Example]] = {
    "mlp": lambda batch: models.mlp(batch),
    "resnet": lambda batch: models.resnet(batch),
    "resnet with dropout": lambda batch: models.resnet(batch, dropout=0.3),
    "gpt": lambda batch: models.gpt(batch),
    "gpt with dropout": lambda batch: models.gpt(batch, dropout=0.2),
}


def captured(example: models.Example, optimizer: torch.optim.Optimizer) -> Program:
    return graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )


def shifted(program: Program, shifts: dict[int, int]) -> Program:
    chosen = passes.find_activations(program)
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts=shifts)
    return passes.share_storage(passes.inject_copies(program))


def batches(make: Callable[[int], models.Example], sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """One batch of each size, all different."""
    found = []
    for i, size in enumerate(sizes):
        example = make(size)
        generator = torch.Generator().manual_seed(i)
        x, y = example.inputs[0], example.targets[0]
        x = torch.randn(x.shape, generator=generator) if x.is_floating_point() else x.flip(-1).roll(i, -1)
        found.append((x, y.roll(i, -1)))
    return found


def compare_with_eager(
    make: Callable[[int], models.Example], optimizer: MakeOptimizer, replicas: int, sizes: list[int], **options: str
) -> None:
    """Run the unshifted and the shifted plan and eager PyTorch side by side; everything must have the same bits."""
    example = make(max(sizes[0] // replicas, 1))
    program = captured(example, optimizer(example.model))
    replicated = passes.replicate(program, devices=list(range(replicas)))
    moved = shifted(replicated, {r: replicas + r for r in range(replicas)})
    assert graphir.certify(replicated, moved).holds
    reference = ShareByShare(example.model, example.loss, optimizer, replicas)
    with (
        runtime.Session(passes.emit(replicated), program.state, **options) as plain,
        runtime.Session(passes.emit(moved), program.state, **options) as other,
    ):
        for step, (x, y) in enumerate(batches(make, sizes)):
            expected = reference.step(x, y)
            for session in (plain, other):
                assert_same_bits({"loss": session.step(x, y)}, {"loss": expected}, f"step {step}")
        for replica, (model, held) in enumerate(zip(reference.models, reference.optimizers, strict=True)):
            theirs = optimizer_tensors(held.state_dict())
            for session in (plain, other):
                assert_same_bits(session.state_dict(replica), model.state_dict(), f"replica {replica}")
                assert_same_bits(optimizer_tensors(session.optimizer_state_dict()), theirs, "optimizer")


@pytest.mark.parametrize(("optimizer", "replicas"), [(sgd, 3), (fused_adamw, 2)], ids=["sgd-3", "fused adamw-2"])
@pytest.mark.parametrize("name", ["mlp", "resnet with dropout", "gpt with dropout"])
def test_twenty_steps_equal_eager_share_by_share(name: str, optimizer: MakeOptimizer, replicas: int) -> None:
    compare_with_eager(MODELS[name], optimizer, replicas, [4 * replicas] * STEPS)


@pytest.mark.parametrize("optimizer", [nesterov, adam], ids=["nesterov", "adam"])
def test_other_optimizers_equal_eager(optimizer: MakeOptimizer) -> None:
    compare_with_eager(MODELS["mlp"], optimizer, 2, [8] * STEPS)


@pytest.mark.parametrize("name", ["mlp", "resnet with dropout"])
def test_uneven_and_changing_batches_equal_eager(name: str) -> None:
    compare_with_eager(MODELS[name], sgd, 2, [8, 7, 9, 5, 8, 11])
    compare_with_eager(MODELS[name], sgd, 3, [9, 8, 7, 11])


def test_the_reference_executor_agrees() -> None:
    compare_with_eager(MODELS["resnet with dropout"], sgd, 2, [8, 8, 7], executor="reference")


def test_one_device_equals_plain_training() -> None:
    example = models.resnet(6, dropout=0.2)
    optimizer = sgd(example.model)
    program = passes.share_storage(captured(example, optimizer))
    with runtime.Session(passes.emit(program), program.state) as session:
        for step in range(5):
            optimizer.zero_grad()
            with graphir.seeded(step):
                loss = example.loss(example.model(*example.inputs), *example.targets)
                loss.backward()
            optimizer.step()
            assert torch.equal(session.step(*example.inputs, *example.targets), loss.detach())
        assert_same_bits(session.state_dict(), example.model.state_dict(), "state")


@pytest.mark.parametrize(("name", "replicas", "size"), [("mlp", 2, 12), ("mlp", 3, 7), ("gpt", 2, 7), ("gpt", 3, 11)])
def test_replicas_come_close_to_the_whole_batch_in_one_process(name: str, replicas: int, size: int) -> None:
    """Without batch norm and dropout, sharing the batch changes only the order of sums."""
    make = MODELS[name]
    example = make(4)
    plain = torch.optim.SGD(example.model.parameters(), lr=0.05)
    program = captured(example, plain)
    with runtime.Session(passes.emit(passes.replicate(program, range(replicas))), program.state) as session:
        for x, y in batches(make, [size] * STEPS):
            session.step(x, y)
            plain.zero_grad()
            example.loss(example.model(x), y).backward()
            plain.step()
        ours, theirs = session.state_dict(), example.model.state_dict()
    assert max(furthest(ours[key], theirs[key]) for key in theirs) <= 1e-5


def test_a_saved_plan_trains_the_same(tmp_path: Path) -> None:
    example = models.resnet(4)
    program = captured(example, sgd(example.model))
    moved = shifted(passes.replicate(program, [0, 1]), {0: 2, 1: 3})
    plan = passes.emit(moved)
    plan.save(tmp_path / "step.plan.json")
    program.save(tmp_path / "program.json", state=True)
    loaded, state = graphir.load(tmp_path / "step.plan.json"), graphir.load(tmp_path / "program.json").state
    assert loaded == plan
    x, y = batches(MODELS["resnet"], [8])[0]
    with runtime.Session(plan, program.state) as a, runtime.Session(loaded, state) as b:
        for _ in range(3):
            assert torch.equal(a.step(x, y), b.step(x, y))
        assert_same_bits(a.state_dict(), b.state_dict(), "state")


def test_training_goes_on_in_eager_as_if_it_had_never_left() -> None:
    example = models.mlp(8)
    optimizer = fused_adamw(example.model)
    program = captured(example, optimizer)
    with runtime.Session(passes.emit(program), program.state) as session:
        for _ in range(3):
            session.step(*example.inputs, *example.targets)
        example.model.load_state_dict(session.state_dict())
        optimizer.load_state_dict(session.optimizer_state_dict())
        expected = session.step(*example.inputs, *example.targets)
        loss = example.loss(example.model(*example.inputs), *example.targets)
        assert torch.equal(loss.detach(), expected)
        loss.backward()
        optimizer.step()
        assert_same_bits(session.state_dict(), example.model.state_dict(), "state")


class Odd(nn.Module):
    """Rows of five floats: shares and slices begin at addresses that are no multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(torch.tanh(self.b(x)) + torch.relu(self.b(h)) + self.b(h[1:]).sum(0))


@pytest.mark.parametrize("executor", ["threads", "reference"])
@pytest.mark.parametrize("chosen", [["b", "tanh"], ["relu"], ["b_1", "b_2", "loss"]])
def test_addresses_do_not_change_bits(chosen: list[str], executor: str) -> None:
    """Kernels may round differently where operands begin at odd addresses; copies keep the address modulo 64."""
    torch.manual_seed(0)
    model = Odd()
    x, y = torch.randn(6, 5), torch.randint(4, (6,))
    example = models.Example(model, (x[:3],), (y[:3],), nn.functional.cross_entropy)
    program = captured(example, sgd(model))
    replicated = passes.replicate(program, [0, 1])
    moved = passes.inject_copies(passes.shift_activations(replicated, chosen, {0: 2, 1: 3}))
    assert any(op.type == "Copy" for op in moved.step.ops)
    reference = ShareByShare(model, example.loss, sgd, 2)
    with (
        runtime.Session(passes.emit(replicated), program.state, executor=executor) as plain,
        runtime.Session(passes.emit(moved), program.state, executor=executor) as other,
    ):
        for _ in range(5):
            losses = {session.step(x, y) for session in (plain, other)}
            assert {reference.step(x, y).item()} == {loss.item() for loss in losses}
        for session in (plain, other):
            assert_same_bits(session.state_dict(), reference.models[0].state_dict(), "state")


class Laid(nn.Module):
    """A backward whose kernels lay their results out otherwise than torch's rules for fake tensors say."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.a, self.act, self.r, self.c = nn.Linear(5, 6), activation, nn.GRU(6, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.r(self.act(self.a(x)))[0][:, -1])


@pytest.mark.parametrize(
    ("activation", "executor"),
    [
        *[(made, "threads") for made in (nn.ELU(), nn.Softplus(), nn.Hardswish(), nn.ReLU6(), nn.LayerNorm(6))],
        (nn.ELU(), "reference"),
    ],
    ids=str,
)
def test_layouts_that_only_kernels_know(activation: nn.Module, executor: str) -> None:
    torch.manual_seed(0)
    model = Laid(activation)
    x, y = torch.randn(6, 3, 5), torch.randint(4, (6,))
    example = models.Example(model, (x[:3],), (y[:3],), nn.functional.cross_entropy)
    program = captured(example, sgd(model))
    moved = shifted(passes.replicate(program, [0, 1]), {0: 2, 1: 3})
    reference = ShareByShare(model, example.loss, sgd, 2)
    with runtime.Session(passes.emit(moved), program.state, executor=executor) as session:
        for _ in range(3):
            assert_same_bits({"loss": session.step(x, y)}, {"loss": reference.step(x, y)}, "loss")
        assert_same_bits(session.state_dict(1), reference.models[1].state_dict(), "state")
