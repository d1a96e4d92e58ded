"""A small model with batch norms of several kinds, and what it trains on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphir
from graphir import passes
from graphir.ir.program import Program

__all__ = ["Normed", "batch", "captured", "replicated"]


class Normed(nn.Module):
    """Batch norms over pictures, with channels last if asked for; over rows, without weights; and without running
    statistics."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.last = last
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.fc = nn.Linear(4, 5)
        self.rows = nn.BatchNorm1d(5, affine=False, momentum=0.3)
        self.plain = nn.BatchNorm1d(5, track_running_stats=False, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        if self.last:
            x = x.contiguous(memory_format=torch.channels_last)
        pooled = F.relu(self.stem(x)).mean((2, 3))
        out: Tensor = self.plain(self.rows(self.fc(pooled)))
        return out


def batch(size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Pictures that are far from zero, of another brightness each time, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, 7, 6, generator=generator, dtype=torch.float64) + 3 + seed
    return x.to(dtype), torch.randint(5, (size,), generator=generator)


def captured(model: nn.Module, optimizer: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> Program:
    """A training step at six rows."""
    x, y = batch(6, dtype=dtype)
    return graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer, **options)


def replicated(replicas: int = 2, model: nn.Module | None = None, **options: Any) -> Program:
    """The model's step on so many replicas, with momentum SGD."""
    torch.manual_seed(0)
    model = Normed().double() if model is None else model
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return passes.replicate(program, list(range(replicas)), **options)
