"""How far plans are from each other and from eager PyTorch after 20 steps: no bit, or how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import models
import torch
from eager import ShareByShare, furthest
from limits import limited
from torch import Tensor, nn

import graphir
from graphir import passes, runtime

__all__ = ["bit_rows", "different", "everything", "whole_batch_rows"]

STEPS = 20


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def everything(module: dict[str, Tensor], optimizer: dict[str, dict[int, dict[str, Tensor]]]) -> list[Tensor]:
    """Parameters, buffers and optimizer state, in the order of their names."""
    held = [tensor for _, tensors in sorted(optimizer["state"].items()) for _, tensor in sorted(tensors.items())]
    return [*(tensor for _, tensor in sorted(module.items())), *held]


def different(ours: list[Tensor], theirs: list[Tensor]) -> int:
    """How many of the tensors differ in any bit."""
    return sum(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def bit_rows() -> Iterator[str]:
    """Tensors that differ in any bit: losses of every step, and all of each replica's state after the last."""
    yield "| model | optimizer | replicas | tensors | shifted ≠ unshifted | shifted ≠ eager, share by share |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    cases = (("MLP", models.mlp, {}), ("residual net", models.resnet, {"dropout": 0.2}), ("GPT", models.gpt, {}))
    for name, make, options in cases:
        for label, optimizer in (("SGD momentum", _sgd), ("AdamW, fused", _adamw)):
            for replicas in (2, 3):
                yield _bits(name, make(4, **options), make(4 * replicas, **options), label, optimizer, replicas)


def _bits(
    name: str,
    share: models.Example,
    batch: models.Example,
    label: str,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    replicas: int,
) -> str:
    model = share.model
    program = graphir.capture(
        model, inputs=share.inputs, targets=share.targets, loss=share.loss, optimizer=optimizer(model)
    )
    plain = passes.replicate(program, range(replicas))
    chosen = passes.find_activations(plain)
    shifts = {r: replicas + r for r in range(replicas)}
    moved = passes.share_storage(
        passes.inject_copies(passes.shift_activations(plain, chosen[len(chosen) // 2 :], shifts))
    )
    reference = ShareByShare(model, share.loss, optimizer, replicas)
    x, y = batch.inputs[0], batch.targets[0]
    with (
        runtime.Session(passes.emit(plain), program.state, binding="cpu") as one,
        runtime.Session(passes.emit(moved), program.state, binding="cpu") as other,
    ):
        steps = [(one.step(x, y), other.step(x, y), reference.step(x, y)) for _ in range(STEPS)]
        a, b, c = (list(losses) for losses in zip(*steps, strict=True))
        for replica in range(replicas):
            a += everything(one.state_dict(replica), one.optimizer_state_dict(replica))
            b += everything(other.state_dict(replica), other.optimizer_state_dict(replica))
            eager = reference.models[replica], reference.optimizers[replica]
            c += everything(eager[0].state_dict(), eager[1].state_dict())
    return f"| {name} | {label} | {replicas} | {len(b)} | {_none(different(a, b))} | {_none(different(b, c))} |"


def _none(different: int) -> str:
    """None may be."""
    return limited(str(different), at_most=0)


def whole_batch_rows() -> Iterator[str]:
    """The largest difference over the largest magnitude of any parameter, against one process on the whole batch."""
    yield "| model | replicas | batch | largest relative difference | at most |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, make in (("MLP", models.mlp), ("GPT", models.gpt)):
        for replicas in (2, 3):
            for size in (12, 11):
                share, batch = make(4), make(size)
                optimizer = torch.optim.SGD(share.model.parameters(), lr=0.05)
                program = graphir.capture(
                    share.model, inputs=share.inputs, targets=share.targets, loss=share.loss, optimizer=optimizer
                )
                plan = passes.emit(passes.replicate(program, range(replicas)))
                with runtime.Session(plan, program.state, binding="cpu") as session:
                    for _ in range(STEPS):
                        session.step(*batch.inputs, *batch.targets)
                        optimizer.zero_grad()
                        share.loss(share.model(*batch.inputs), *batch.targets).backward()
                        optimizer.step()
                    ours, theirs = session.state_dict(), share.model.state_dict()
                worst = max(furthest(ours[key], theirs[key]) for key in theirs)
                yield f"| {name} | {replicas} | {size} | {limited(f'{worst:.1e}', at_most=1e-5)} | 1e-5 |"
