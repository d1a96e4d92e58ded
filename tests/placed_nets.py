"""Nets to place, a loop that trains one, and what is compared of two that were trained."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphir

__all__ = ["MAP", "Net", "deep", "placed", "same", "tight", "trained"]


class Net(nn.Module):
    """Batch norm, dropout, a layer that runs twice, and outputs of several kinds."""

    def __init__(self, dropout: float = 0.0, norm: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second, self.last = nn.Linear(32, 32), nn.Linear(32, 8)
        self.again = self.first

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Any:
        h = self.drop(F.gelu(self.second(F.relu(self.norm(self.first(x))))))
        out = self.last(h)
        return {"out": out, "mean": h.mean(), "none": None, "again": self.again(out)} if scale is None else out * scale


MAP: Mapping[str, int] = {"first": 0, "norm": 0, "second": 1, "last": 1}
"""Two devices of such a net, as Accelerate writes them."""


def deep(width: int = 32, layers: int = 6, ends: tuple[int, int] = (8, 5)) -> nn.Sequential:
    """A net of equal layers."""
    inner = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(nn.Linear(ends[0], width), nn.GELU(), *inner, nn.Linear(width, ends[1]))


def tight(model: nn.Module, inputs: Sequence[Any] = (), *, share: float = 0.6, **options: Any) -> dict[str, int]:
    """So much on each of two devices as a share of what the model takes on one."""
    alone = copy.deepcopy(model)
    graphir.place(alone, inputs, **options)
    peak = max(alone.placement.memory().peak.values())
    return {f"gpu:{device}": int(share * peak) for device in range(2)}


def placed(model: nn.Module, inputs: Sequence[Any] = (), **options: Any) -> nn.Module:
    """The model on two devices, within 0.6 of what it takes on one, each."""
    graphir.place(model, inputs, limits=tight(model, inputs, **options), topology="cpu", reserve=0, **options)
    held = model.placement.memory()
    assert all(held.peak.get(device, 0) <= most for device, most in held.limits.items())
    return model


def trained(model: nn.Module, steps: int = 4, rows: int = 16) -> list[float]:
    """The losses of some steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        x, y = torch.randn(rows, 8, generator=draw), torch.randint(5, (rows,), generator=draw)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have equal bits in their state, and in gradients."""
    pairs = zip(one.state_dict(keep_vars=True).items(), other.state_dict(keep_vars=True).items(), strict=True)
    return all(
        name == its_name
        and torch.equal(tensor, its)
        and (tensor.grad is None) == (its.grad is None)
        and (tensor.grad is None or torch.equal(tensor.grad, its.grad))
        for (name, tensor), (its_name, its) in pairs
    )
