"""The reference of sharded steps in micro-batches: eager PyTorch, placed modules on all rows, replicas on theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from eager import MakeOptimizer, rows_by, weighted_mean
from torch import Tensor, nn

import graphir

__all__ = ["Hybrid", "Mixed", "Ranker", "Ranking", "mixed", "ranking"]


class Ranking(NamedTuple):
    """Rows of a batch: dense features, three lookups a row in each of some tables, and a target."""

    dense: Tensor
    lookups: Tensor
    target: Tensor


class Ranker(nn.Module):
    """Tables of several kinds, one of which normalises what it finds, beside a small MLP that does, and drops some.

    Args:
        width: of the embeddings.
    """

    rows_of_lookups = 0

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(23, width, mode="sum"),
                nn.Sequential(nn.EmbeddingBag(17, width, mode="mean"), nn.BatchNorm1d(width)),
                nn.Embedding(11, width),
            ]
        )
        self.bottom = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.3))
        self.top = nn.Sequential(nn.Linear(6 * width, 5), nn.Tanh(), nn.Linear(5, 1))

    def placed(self, lookups: Tensor) -> list[Tensor]:
        """What the tables find."""
        return [table(lookups[:, k]) for k, table in enumerate(self.tables)]

    def replicated(self, dense: Tensor, found: Sequence[Tensor]) -> Tensor:
        """What is made of it."""
        return self.top(torch.cat([self.bottom(dense), *[rows.flatten(1) for rows in found]], 1))  # type: ignore[no-any-return]

    def forward(self, dense: Tensor, lookups: Tensor) -> Tensor:
        return self.replicated(dense, self.placed(lookups))


class Mixed(nn.Module):
    """Tables of given kinds, what they find mixed into the stream of an MLP: rows are computed each for itself.

    Args:
        kinds: of each table: bags (``sum``, ``mean``, ``max``), ``weighted`` ones, whose weights a layer makes; and
            embeddings of a ``sequence``, or of one ``column`` of the lookups.
        width: of the embeddings.
    """

    rows_of_lookups = 1

    def __init__(self, kinds: Sequence[str], width: int = 8) -> None:
        super().__init__()
        self.kinds, self.width = tuple(kinds), width
        self.tables = nn.ModuleList(
            [
                nn.Embedding(13 + k, width)
                if kind in ("sequence", "column")
                else nn.EmbeddingBag(13 + k, width, mode="sum" if kind == "weighted" else kind)
                for k, kind in enumerate(kinds)
            ]
        )
        self.bottom, self.weights = nn.Sequential(nn.Linear(3, width), nn.Tanh()), nn.Linear(3, 3)
        self.middle = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
        self.top = nn.Linear(width, 1)

    def forward(self, dense: Tensor, lookups: Tensor) -> Tensor:
        hidden = self.bottom(dense)
        for k, (kind, table) in enumerate(zip(self.kinds, self.tables, strict=True)):
            own = lookups[k % 4]
            if kind == "weighted":
                hidden = hidden * table(own, per_sample_weights=self.weights(dense))
            elif kind == "sequence":
                hidden = hidden + (table(own) * table(own.flip(1)).sigmoid()).sum(1)
            else:
                hidden = hidden * table(own[:, 1] if kind == "column" else own)
            hidden = hidden + self.middle[k % 2](hidden)
        return self.top(hidden)  # type: ignore[no-any-return]


def ranking(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Ranking:
    """A batch."""
    generator = torch.Generator().manual_seed(seed)
    lookups = torch.stack([torch.randint(n, (rows, 3), generator=generator) for n in (23, 17, 11)], 1)
    dense, target = (torch.randn(rows, n, generator=generator, dtype=dtype) for n in (3, 1))
    return Ranking(dense, lookups, target)


def mixed(rows: int, seed: int) -> Ranking:
    """A batch in double precision, whose lookups have their rows second."""
    generator = torch.Generator().manual_seed(seed)
    lookups = torch.randint(13, (4, rows, 3), generator=generator)
    dense, target = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (3, 1))
    return Ranking(dense, lookups, target)


class Hybrid:
    """A model copy for each replica, of which the first has the placed modules.

    Replica r has its share of the batch in whole micro-batches; its micro-batch k is chunk k of that. Placed modules
    get the rows of all replicas' micro-batch k, in replica order.

    Args:
        model: with ``placed`` and ``replicated``.
        loss: of the results and targets of some rows.
        optimizer: makes that of a copy.
        replicas: how many.
        parts: how many micro-batches.
        mean: whether the loss is a mean over rows; else a sum.
        unlike: the ratio of the replicas' rows; equal by default.
    """

    def __init__(
        self,
        model: Ranker,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: MakeOptimizer,
        replicas: int,
        parts: int,
        *,
        mean: bool = True,
        unlike: Sequence[int] = (),
    ) -> None:
        self.loss, self.parts, self.mean, self.unlike = loss, parts, mean, unlike or [1] * replicas
        self.models = [copy.deepcopy(model) for _ in range(replicas)]
        self.optimizers = [optimizer(model) for model in self.models]
        self.steps_done = 0

    def shares(self, batch: Ranking) -> list[list[Ranking]]:
        """The micro-batches of each replica that has rows."""
        rows = [self.parts * count for count in rows_by(self.unlike, len(batch.dense) // self.parts)]
        shares = zip(*[tensor.split(rows) for tensor in batch], strict=True)
        return [
            [Ranking(*part) for part in zip(*[t.chunk(self.parts) for t in share], strict=True)] for share in shares
        ]

    def step(self, batch: Ranking) -> Tensor:
        """A step, and its loss."""
        shares, owner = self.shares(batch), self.models[0]
        rows = [len(parts[0].dense) for parts in shares]
        for model in self.models:
            model.zero_grad()
        found = [owner.placed(torch.cat([parts[k].lookups for parts in shares])) for k in range(self.parts)]
        back: list[list[list[Tensor]]] = [[[] for _ in tables] for tables in found]
        losses = []
        for r, parts in enumerate(shares):
            own = [
                [self.piece(table, rows, r, gradients) for table, gradients in zip(*pair, strict=True)]
                for pair in zip(found, back, strict=True)
            ]
            with graphir.seeded(self.steps_done, r):
                losses.append(sum(self.backward(self.models[r], parts, own)))
        for tables, gradients in zip(found, back, strict=True):
            torch.autograd.backward(tables, [own[0] if len(self.models) == 1 else torch.cat(own) for own in gradients])
        self.reduce(rows)
        for optimizer in self.optimizers:
            optimizer.step()
        self.steps_done += 1
        return self.reduced(losses, rows)

    def state_dict(self, replica: int) -> dict[str, Tensor]:
        """That of a replica, with placed modules."""
        own, placed = (self.models[r].state_dict() for r in (replica, 0))
        return {name: placed[name] if name.startswith("tables") else value for name, value in own.items()}

    def backward(self, model: Ranker, parts: Sequence[Ranking], found: Sequence[list[Tensor]]) -> Iterator[Tensor]:
        """The losses of a replica's micro-batches."""
        for part, tables in zip(parts, found, strict=True):
            loss = self.loss(model.replicated(part.dense, tables), part.target) / self.parts
            loss.backward()
            yield loss.detach()

    def piece(self, table: Tensor, rows: Sequence[int], replica: int, back: list[Tensor]) -> Tensor:
        """A replica's rows of what a table has found, whose gradient goes *back* as one of the mean over all rows."""
        weight = rows[replica] / sum(rows) if self.mean else 1.0
        piece = table.detach().split(list(rows))[replica].requires_grad_()
        piece.register_hook(lambda gradient: back.append(gradient if len(self.models) == 1 else gradient * weight))
        return piece

    def reduced(self, values: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
        return weighted_mean(values, rows) if self.mean else sum(values[1:], start=values[0])

    def reduce(self, rows: Sequence[int]) -> None:
        """Give every copy the gradients of all."""
        placed = {id(param) for param in self.models[0].tables.parameters()}
        for params in zip(*[model.parameters() for model in self.models], strict=True):
            gradients = [param.grad for param in params[: len(rows)] if param.grad is not None]
            own = id(params[0]) in placed
            for param in params:
                param.grad = gradients[0].clone() if own else self.reduced(gradients, rows).clone()
