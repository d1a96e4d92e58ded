"""The reference of capture's options: the loops that users of eager PyTorch write, share by share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from eager import MakeOptimizer, assert_same_bits, weighted_mean
from graphir.runtime.options import ExecutorName
from models import Example
from torch import Tensor

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program

__all__ = ["Idioms", "captured", "runs_as_eager"]


class Idioms:
    """One module copy a replica; each runs its share in micro-batches, scales its loss, clips the mean gradient.

    Args:
        example: its model is copied.
        optimizer: makes each replica's optimizer; None: gradients are the result.
        replicas: how many.
        options: as ``graphir.capture`` takes them; for a ``GradScaler`` its keyword arguments.
    """

    def __init__(self, example: Example, optimizer: MakeOptimizer | None, replicas: int, **options: Any) -> None:
        self.loss, self.options = example.loss, options
        self.models = [copy.deepcopy(example.model) for _ in range(replicas)]
        self.optimizers = [optimizer(model) for model in self.models] if optimizer is not None else []
        self.steps_done = 0
        self.norm: Tensor | None = None
        self.scale = options.get("loss_scale")
        self.scalers = [scaler_of(self.scale) for _ in self.models] if isinstance(self.scale, Mapping) else []

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step; the loss."""
        k = self.options.get("accumulate", 1)
        units = [len(part) for part in torch.arange(len(x) // k).chunk(len(self.models))]
        shares = [k * n for n in units]
        losses = [
            self.backward(replica, *share)
            for replica, share in enumerate(zip(x.split(shares), y.split(shares), strict=True))
        ]  # where there are fewer shares than replicas, the last ones only take the update
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            if len(params) > 1 and params[0].grad is not None:
                mean = weighted_mean([p.grad for p in params[: len(units)]], units)
                for p in params:
                    p.grad = mean.clone()
        for replica in range(len(self.models)):
            self.update(replica)
        self.steps_done += 1
        return weighted_mean(losses, units) if len(losses) > 1 else losses[0]

    def backward(self, replica: int, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward of a replica's micro-batches; the sum of their losses."""
        model, k = self.models[replica], self.options.get("accumulate", 1)
        model.zero_grad()
        total = None
        with graphir.seeded(self.steps_done, replica):
            for mine, targets in zip(x.chunk(k), y.chunk(k), strict=True):
                loss = self.loss(model(mine), targets)
                loss = loss / k if k > 1 else loss
                scaled = self.scalers[replica].scale(loss) if self.scalers else loss
                (scaled if self.scalers or self.scale is None else loss * self.scale).backward()
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return total

    def update(self, replica: int) -> None:
        """Unscale, clip, update."""
        params = list(self.models[replica].parameters())
        if self.scalers:
            self.scalers[replica].unscale_(self.optimizers[replica])
        elif self.scale is not None:
            for p in params:
                p.grad.mul_(1.0 / self.scale)
        if self.options.get("clip_grad_norm") is not None:
            self.norm = torch.nn.utils.clip_grad_norm_(params, self.options["clip_grad_norm"])
        if self.options.get("clip_grad_value") is not None:
            torch.nn.utils.clip_grad_value_(params, self.options["clip_grad_value"])
        if self.scalers:
            self.scalers[replica].step(self.optimizers[replica])
            self.scalers[replica].update()
        elif self.optimizers:
            self.optimizers[replica].step()


def loss_of(returned: Any) -> Tensor:
    """The loss, of what a step returns."""
    return returned[0] if isinstance(returned, tuple) else returned  # type: ignore[no-any-return]


def scaler_of(options: Mapping[str, Any]) -> torch.amp.GradScaler:
    """A scaler for the CPU."""
    return torch.amp.GradScaler("cpu", **options)


def captured(example: Example, optimizer: MakeOptimizer | None = None, **options: Any) -> Program:
    """The example's training step; a ``GradScaler`` is given by its keyword arguments."""
    if isinstance(options.get("loss_scale"), Mapping):
        options["loss_scale"] = scaler_of(options["loss_scale"])
    return graphir.capture(
        example.model,
        example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=None if optimizer is None else optimizer(example.model),
        **options,
    )


def runs_as_eager(
    program: Program, eager: Idioms, batches: list[tuple[Tensor, Tensor]], executor: ExecutorName = "threads"
) -> dict[str, Any]:
    """Assert that the placed program and the loops have the same bits, step by step; the loss scaler's last state."""
    with runtime.Session(passes.emit(program), program.state, executor=executor) as session:
        for x, y in batches:
            found, theirs = session.step(x, y), eager.step(x, y)
            ours, beside = found if isinstance(found, tuple) else (found, {})
            assert_same_bits(
                beside, {} if eager.norm is None else {"grad_norm": eager.norm}, f"step {eager.steps_done}"
            )
            assert_same_bits({"loss": ours}, {"loss": theirs}, f"step {eager.steps_done}")
            for replica, model in enumerate(eager.models):
                what = f"step {eager.steps_done}, replica {replica}"
                assert_same_bits(session.state_dict(replica), dict(model.state_dict()), what)
                if eager.optimizers:
                    same_optimizer_state(session.optimizer_state_dict(replica), eager.optimizers[replica], what)
                else:
                    gradients = [p.grad for p in model.parameters() if p.grad is not None]
                    mine = list(session.gradients(replica).values())
                    assert_same_bits(dict(enumerate(mine)), dict(enumerate(gradients)), what)
            if eager.scalers:
                assert session.loss_scaler_state_dict() == eager.scalers[0].state_dict()
        return session.loss_scaler_state_dict() if eager.scalers else {}


def same_optimizer_state(ours: dict[str, Any], optimizer: torch.optim.Optimizer, what: str) -> None:
    """Equal bits in what the optimizer holds; before its first update it holds nothing."""
    for index, theirs in optimizer.state_dict()["state"].items():
        held = {name: tensor for name, tensor in theirs.items() if isinstance(tensor, Tensor)}
        assert_same_bits({name: ours["state"][index][name] for name in held}, held, f"{what}, optimizer")
