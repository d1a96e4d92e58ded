"""DLRM in its public structure: a bottom MLP, embedding tables, an interaction, a top MLP; and clicks to train on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["KAGGLE", "Clicks", "Config", "Dlrm", "batch_dims", "clicks", "loss"]

Interaction = Literal["dot", "cat"]


class Config(NamedTuple):
    """Widths of a model.

    Attributes:
        dense: continuous features.
        bottom: widths of the bottom MLP; the last is that of the tables.
        tables: rows of each.
        top: widths of the top MLP, the last 1.
        interaction: dot products of all pairs, or all side by side.
        lookups: of a row in a table, at most.
        sparse: whether gradients of tables are sparse.
    """

    dense: int = 5
    bottom: tuple[int, ...] = (8, 4)
    tables: tuple[int, ...] = (7, 11, 5)
    top: tuple[int, ...] = (6, 1)
    interaction: Interaction = "dot"
    lookups: int = 3
    sparse: bool = False


KAGGLE = Config(13, (64, 32, 16), (1460, 583, 1013, 2202, 305, 24, 1251, 633, 3, 931, 568, 835, 319, 27, 1484, 546, 10,
                                   565, 217, 4, 704, 18, 15, 2861, 105, 1425), (64, 32, 1), "dot", 1)  # fmt: skip
"""That of the Criteo Kaggle data: 26 tables and 13 continuous features, its widths and rows scaled down."""


def _mlp(widths: Sequence[int], last: nn.Module) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(widths)):
        layers += [nn.Linear(a, b), nn.ReLU() if i < len(widths) - 2 else last]
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """The model of a configuration; module names are those of the public script."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.bottom[-1]
        self.interaction = config.interaction
        self.bot_l = _mlp((config.dense, *config.bottom), nn.ReLU())
        self.emb_l = nn.ModuleList(
            [nn.EmbeddingBag(rows, width, mode="sum", sparse=config.sparse) for rows in config.tables]
        )
        count = len(config.tables) + 1
        pairs = [(i, j) for i in range(count) for j in range(i)]
        self.register_buffer("rows", torch.tensor([i for i, _ in pairs]), persistent=False)
        self.register_buffer("columns", torch.tensor([j for _, j in pairs]), persistent=False)
        interacted = width + len(pairs) if config.interaction == "dot" else width * count
        self.top_l = _mlp((interacted, *config.top), nn.Sigmoid())

    def forward(self, dense: Tensor, indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
        x = self.bot_l(dense)
        looked_up = [table(i, o) for table, i, o in zip(self.emb_l, indices, offsets, strict=True)]
        if self.interaction == "cat":
            return self.top_l(torch.cat([x, *looked_up], dim=1))  # type: ignore[no-any-return]
        together = torch.stack([x, *looked_up], dim=1)
        products = torch.bmm(together, together.transpose(1, 2))
        flat = products[:, self.rows, self.columns]  # type: ignore[index]
        return self.top_l(torch.cat([x, flat], dim=1))  # type: ignore[no-any-return]


class Clicks(NamedTuple):
    """A batch: dense features, indices and offsets of each table, and whether there was a click."""

    dense: Tensor
    indices: list[Tensor]
    offsets: list[Tensor]
    target: Tensor

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.dense, self.indices, self.offsets


def clicks(config: Config, rows: int, seed: int, dtype: torch.dtype = torch.float32) -> Clicks:
    """A random batch whose indices are Zipf-distributed; some bags are empty. Whether there is a click follows, by
    chance, from what is looked up and from the dense features."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.Generator().manual_seed(0)
    dense = torch.randn(rows, config.dense, generator=generator, dtype=dtype)
    logits = dense @ torch.randn(config.dense, 1, generator=rule, dtype=dtype)
    indices, offsets = [], []
    for size in config.tables:
        least = 1 if config.lookups == 1 else 0
        lengths = torch.randint(least, config.lookups + 1, (rows,), generator=generator)
        weights = 1 / torch.arange(1, size + 1, dtype=torch.float64) ** 1.1
        count = int(lengths.sum())
        drawn = torch.multinomial(weights, max(count, 1), replacement=True, generator=generator)[:count]
        liked = torch.randn(size, 1, generator=rule, dtype=dtype)
        bags = torch.arange(rows).repeat_interleave(lengths)
        logits = logits.index_add(0, bags, liked[drawn])
        indices.append(drawn)
        offsets.append(lengths.cumsum(0) - lengths)
    target = torch.bernoulli(logits.sigmoid(), generator=generator)
    return Clicks(dense, indices, offsets, target)


def batch_dims(config: Config) -> Any:
    """Lookups of each table are a dimension of their own."""
    tables = range(len(config.tables))
    return ({0: "batch"}, [{0: f"lookups_{k}"} for k in tables], [{0: "batch"} for _ in tables]), {}, ({0: "batch"},)


loss = nn.functional.binary_cross_entropy
