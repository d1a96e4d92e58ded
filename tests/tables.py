"""Models of one table, whatever that is, and their batches: for tests of what splits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import graphir
from graphir import Program

__all__ = ["OPTIMIZERS", "Bags", "Batch", "Joined", "Last", "Sequences", "Weighted", "batch_of", "captured"]

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "sparse adam": lambda params: torch.optim.SparseAdam(params, lr=0.01),
    "row-wise adagrad": lambda params: graphir.optim.RowWiseAdagrad(params, lr=0.05, eps=1e-6),
}


class Batch(NamedTuple):
    """Rows of a batch: dense features, lookups, and a target."""

    dense: Tensor
    lookups: tuple[Tensor, ...]
    target: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.dense, *self.lookups


class _Model(nn.Module):
    """A table beside a small MLP."""

    table: nn.Module

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.bottom = nn.Linear(3, columns)
        self.top = nn.Linear(columns, 1)

    def forward(self, dense: Tensor, *lookups: Tensor) -> Tensor:
        return self.top(torch.tanh(self.bottom(dense)) * self.found(*lookups))  # type: ignore[no-any-return]

    def found(self, *lookups: Tensor) -> Tensor:
        return self.table(*lookups)  # type: ignore[no-any-return]


class Bags(_Model):
    """Bags of any length, some of them empty."""

    def __init__(self, rows: int = 23, columns: int = 8, **options: Any) -> None:
        super().__init__(columns)
        self.table = nn.EmbeddingBag(rows, columns, **options)


class _EndsLast(nn.EmbeddingBag):
    """Its last offset ends the last bag."""

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(indices, torch.cat([offsets, offsets.new_full((1,), indices.shape[0])]))


class Last(Bags):
    """Bags whose last offset is that of the end, which the table computes."""

    def __init__(self, rows: int = 23, columns: int = 8, **options: Any) -> None:
        super().__init__(rows, columns)
        self.table = _EndsLast(rows, columns, include_last_offset=True, **options)


class Weighted(_Model):
    """Bags of three lookups, which a layer weighs."""

    def __init__(self, rows: int = 23, columns: int = 8, **options: Any) -> None:
        super().__init__(columns)
        self.table = nn.EmbeddingBag(rows, columns, mode="sum", **options)
        self.weights = nn.Linear(3, 3)

    def forward(self, dense: Tensor, *lookups: Tensor) -> Tensor:
        found = self.table(lookups[0], per_sample_weights=self.weights(dense))
        return self.top(torch.tanh(self.bottom(dense)) * found)  # type: ignore[no-any-return]


class Sequences(_Model):
    """An embedding of two sequences of three lookups each, added up."""

    def __init__(self, rows: int = 23, columns: int = 8, **options: Any) -> None:
        super().__init__(columns)
        self.table = nn.Embedding(rows, columns, **options)

    def found(self, *lookups: Tensor) -> Tensor:
        return (self.table(lookups[0]) * self.table(lookups[0].flip(1)).sigmoid()).sum(1)


class Joined(Sequences):
    """The same, of one sequence, joined and added up: its gradients are views that lie apart, or are expanded."""

    def __init__(self, rows: int = 23, columns: int = 8, **options: Any) -> None:
        super().__init__(rows, columns, **options)
        self.top = nn.Linear(3 * columns, 1)

    def forward(self, dense: Tensor, *lookups: Tensor) -> Tensor:
        rows = torch.tanh(self.bottom(dense))
        found = self.table(lookups[0]).sum(1), self.table(lookups[0].select(1, 0))
        return self.top(torch.cat([rows, *found], 1))  # type: ignore[no-any-return]


def batch_of(model: nn.Module, rows: int, seed: int) -> Batch:
    """A batch whose lookups are Zipf-distributed."""
    generator = torch.Generator().manual_seed(seed)
    table: Any = model.table
    dtype = table.weight.dtype
    dense = torch.randn(rows, 3, generator=generator, dtype=dtype)
    target = torch.randn(rows, 1, generator=generator, dtype=dtype)
    chances = 1 / torch.arange(1, table.weight.shape[0] + 1, dtype=torch.float64) ** 1.1
    if not isinstance(model, Bags):
        drawn = torch.multinomial(chances, rows * 3, replacement=True, generator=generator)
        return Batch(dense, (drawn.view(rows, 3),), target)
    lengths = torch.randint(0, 4, (rows,), generator=generator)
    lengths[0] = 2
    count = int(lengths.sum())
    drawn = torch.multinomial(chances, count, replacement=True, generator=generator)
    return Batch(dense, (drawn, lengths.cumsum(0) - lengths), target)


def captured(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> Program:
    """The training step of a model, at four rows."""
    batch = batch_of(model, 4, 0)
    looked = [{0: "lookups"}, {0: "batch"}] if isinstance(model, Bags) else [{0: "batch"}]
    dims = ({0: "batch"}, *looked), {}, ({0: "batch"},)
    given = {"targets": (batch.target,), "loss": nn.functional.mse_loss, "optimizer": optimizer, **options}
    return graphir.capture(model, batch.inputs, batch_dims=dims, **given)
