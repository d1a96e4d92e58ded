"""The references of end-to-end tests: eager PyTorch share by share, and on the whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir
from graphir.ir.tensor import same_bits

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class ShareByShare:
    """One module copy a replica; each sees its share only; gradients are averaged in replica order.

    Where torch.chunk makes fewer shares than there are replicas, the last ones only take the update.

    The mean of unequal shares scales replica r's gradient by ``shares[r] * n / sum(shares)`` before the sum, and is
    the plain mean where the shares are equal: what ``AllReduce`` says it does, written independently of it.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], optimizer: MakeOptimizer, replicas: int) -> None:
        self.loss = loss
        self.models = [copy.deepcopy(model) for _ in range(replicas)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.steps_done = 0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        n = len(self.models)
        return self.step_on([((x,), (y,), {}) for x, y in zip(x.chunk(n), y.chunk(n), strict=True)])

    def step_on(self, shares: Sequence[tuple[tuple[Any, ...], tuple[Any, ...], Mapping[str, Any]]]) -> Tensor:
        """A step on each replica's inputs, targets and keyword arguments; the first tensor's length is its share."""
        losses, gradients = [], []
        for replica, (model, (inputs, targets, kwargs)) in enumerate(zip(self.models, shares, strict=False)):
            params = list(model.parameters())
            with graphir.seeded(self.steps_done, replica):
                loss = total_loss(self.loss(model(*inputs, **kwargs), *targets))
                model.zero_grad()
                loss.backward()
                gradients.append([param.grad for param in params])
            losses.append(loss.detach())
        sizes = [len(next(t for t in pytree.tree_leaves(share) if isinstance(t, Tensor))) for share in shares]
        for i, values in enumerate(zip(*gradients, strict=True)):
            for model in self.models:
                mean = None if values[0] is None else weighted_mean(values, sizes).clone()
                list(model.parameters())[i].grad = mean
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps_done += 1
        return weighted_mean(losses, sizes)


def rows_by(shares: Sequence[int], rows: int) -> list[int]:
    """The rows of the replicas that have some: of each the part that its share says, rounded up, as far as there are
    rows."""
    found: list[int] = []
    for share in shares:
        found.append(min(math.ceil(Fraction(rows * share, sum(shares))), rows - sum(found)))
    return [count for count in found if count]


def total_loss(loss: Tensor | dict[str, Tensor]) -> Tensor:
    """A loss, or the sum of several in their order."""
    if isinstance(loss, Tensor):
        return loss
    first, *rest = loss.values()
    return sum(rest, start=first)


def weighted_mean(values: Sequence[Tensor], shares: Sequence[int]) -> Tensor:
    """The mean over replicas, each weighted by its share, added in replica order."""
    n, equal = len(shares), len(set(shares)) == 1
    total = None
    for value, share in zip(values, shares, strict=True):
        scaled = value if equal else value * (share * n / sum(shares))
        total = scaled if total is None else total + scaled
    assert total is not None
    return total / n


def furthest(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    scale = theirs.abs().max().item()
    return (ours - theirs).abs().max().item() / scale if scale else (ours - theirs).abs().max().item()


def optimizer_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of what ``optimizer.state_dict()`` gives, by parameter and key."""
    return {
        f"{i}.{key}": value
        for i, held in state["state"].items()
        for key, value in held.items()
        if isinstance(value, Tensor)
    }


def assert_same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    """Equal names, and for each of them equal bits: zeros of either sign are told apart."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, f"{what}: {name}"
        assert same_bits(tensor, other), f"{what}: {name} differs by {furthest(tensor.double(), other.double()):.2e}"
