"""What the demo's plans must equal bit for bit: plain PyTorch, share by share.

Each replica is a copy of the module that sees its share of the batch only, batch norm included. Gradients are added in
replica order and divided by their number, and every replica's own optimizer applies them. The only thing taken from
graphir is :func:`graphir.seeded`, so that dropout draws the numbers that the captured step draws.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..capturing.seeded import seeded

__all__ = ["ShareByShare"]


class ShareByShare:
    """Data-parallel training in eager PyTorch, one replica after the other.

    Args:
        model: copied once a replica.
        loss: of a share's outputs and targets; a mean over the share.
        optimizer: makes a replica's optimizer from its module.
        replicas: how many.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        replicas: int,
    ) -> None:
        self.loss = loss
        self.models = [copy.deepcopy(model) for _ in range(replicas)]
        self.optimizers = [optimizer(replica) for replica in self.models]
        self.steps_done = 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Train on one batch, split evenly; the mean of the replicas' losses."""
        losses = []
        n = len(self.models)
        for replica, (model, xs, ys) in enumerate(zip(self.models, x.chunk(n), y.chunk(n), strict=True)):
            model.zero_grad()
            with seeded(self.steps_done, replica):
                loss = self.loss(model(xs), ys)
                loss.backward()
            losses.append(loss.detach())
        for params in zip(*(model.parameters() for model in self.models), strict=True):
            grads = [param.grad for param in params if param.grad is not None]
            mean = _mean(grads)
            for param in params:
                param.grad = mean.clone()
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps_done += 1
        return _mean(losses)


def _mean(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total / len(values)
