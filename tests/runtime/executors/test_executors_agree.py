"""Every executor gives the bits of the reference executor, and both those of eager PyTorch."""

import copy
from contextlib import ExitStack

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from runnable import captured, eager_step, sgd, spread

import graphir
from graphir import passes


def assert_same_state(a, b, replicas):
    for replica in range(replicas):
        ours, theirs = a.state(replica), b.state(replica)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)


@pytest.mark.parametrize(
    ("place", "executors"),
    [(lambda p: p, ("serial",)), (spread, ("serial", "threads"))],
    ids=["one", "spread"],
)
@pytest.mark.parametrize("seed", range(10))
def test_random_programs(seed, place, executors):
    program = nets.random_program(seed)
    placed = place(program)
    plan = passes.emit(placed)
    with ExitStack() as opened:
        reference, *others = [
            opened.enter_context(Session(plan, program.state, executor=name)) for name in ("reference", *executors)
        ]
        for step, batch in enumerate((12, 7, 12)):
            inputs = nets.example_inputs(program, seed=step, batch=batch)
            expected = reference.step(*inputs).nan_to_num()
            assert [torch.equal(other.step(*inputs).nan_to_num(), expected) for other in others] == [True] * len(others)
        for other in others:
            assert_same_state(reference, other, len(placed.replicas))


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_random_programs(seed):
    program = nets.random_program(seed, mutate=False)
    plan = passes.emit(spread(program))
    inputs = nets.example_inputs(program, batch=11)
    with (
        Session(plan, program.state, executor="reference") as a,
        Session(plan, program.state, executor="threads") as b,
    ):
        a.step(*inputs)
        b.step(*inputs)
        for replica in (0, 1):
            ours, theirs = a.gradients(replica), b.gradients(replica)
            assert ours.keys() == theirs.keys()
            assert ours
            assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)


MODELS = {
    "mlp": (models.mlp, sgd),
    "resnet": (lambda: models.resnet(dropout=0.3), lambda p: sgd(p, nesterov=True, weight_decay=1e-3)),
    "gpt": (models.gpt, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    "gpt_fused": (lambda: models.gpt(dropout=0.1), lambda p: torch.optim.Adam(p, lr=1e-3, fused=True)),
}


@pytest.mark.parametrize("executor", ["reference", "serial"])
@pytest.mark.parametrize("name", MODELS)
def test_captured_models_train_as_in_eager(name, executor):
    make, optim = MODELS[name]
    example = make()
    optimizer = optim(example.model.parameters())
    program = captured(example, optimizer)
    with Session(passes.emit(program), program.state, executor=executor) as session:
        for step in range(4):
            loss = session.step(*example.inputs, *example.targets)
            assert torch.equal(loss, eager_step(example, optimizer, step))
        state, kept = session.state_dict(), session.optimizer_state_dict()["state"]
    assert all(torch.equal(state[n], tensor) for n, tensor in example.model.state_dict().items())
    for index, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(kept[index][n], value) for n, value in entries.items())


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_shifted_replicas_train_as_eager_share_by_share(executor):
    example = models.resnet(batch=4, dropout=0.3)
    program = captured(example, sgd(example.model.parameters()))
    replicas = [copy.deepcopy(example.model) for _ in range(2)]
    optimizers = [sgd(model.parameters()) for model in replicas]
    x, y = torch.cat([example.inputs[0]] * 2)[:7], torch.cat([example.targets[0]] * 2)[:7]
    weights = (4 * 2 / 7, 3 * 2 / 7)
    with Session(passes.emit(spread(program)), program.state, executor=executor) as session:
        for step in range(3):
            losses = []
            for r, (model, rows, labels) in enumerate(zip(replicas, x.chunk(2), y.chunk(2), strict=True)):
                model.zero_grad()
                with graphir.seeded(step, r):
                    losses.append(example.loss(model(rows), labels))
                losses[-1].backward()
            for a, b in zip(*(model.parameters() for model in replicas), strict=True):
                a.grad = a.grad.mul(weights[0]).add(b.grad.mul(weights[1])).div(2)
                b.grad = a.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
            loss = losses[0].mul(weights[0]).add(losses[1].mul(weights[1])).div(2)
            assert torch.equal(session.step(x, y), loss.detach())
        for r, model in enumerate(replicas):
            state = session.state_dict(r)
            assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["mlp", "gpt_fused"])
def test_replicated_models_train_alike(name):
    make, optim = MODELS[name]
    example = make()
    program = captured(example, optim(example.model.parameters()))
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    batch = [torch.cat([tensor, tensor]) for tensor in (*example.inputs, *example.targets)]
    found = []
    for executor in ("reference", "threads"):
        with Session(plan, program.state, executor=executor) as session:
            losses = {f"loss {i}": session.step(*batch) for i in range(3)}
            found.append({**losses, **session.state()})
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())
