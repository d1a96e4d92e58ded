"""Models with whatever is hard to prove beside what they compute themselves: views of every kind, conjugates, operators
that alias only sometimes, reads beyond a view, updates in place, random numbers, and state handed down a chain."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["LOADS", "Laden", "laden_loss"]

_WIDTH = 8

LOADS = ("viewed", "conjugated", "aliased", "beyond", "overwritten", "drawn", "typed", "gathered")
"""The methods of a :class:`Laden` that each make a number of its rows."""


class Laden(nn.Module):
    """A model that returns a second result: the sum of what some of its methods make of its first argument.

    Attributes:
        loads: of :data:`LOADS`.
        scale: spreads the first column of the argument to the columns of *h*, which all of it starts from.
        square: a parameter that is used transposed, contiguous or not.
        late: what the loss is multiplied by; it is handed down from ``late2``, and that from ``late3``.
        mean: of the rows seen so far.
        count: of the steps.
    """

    late: Tensor
    late2: Tensor
    late3: Tensor
    mean: Tensor
    count: Tensor
    table: Tensor

    def __init__(self, model: nn.Module, loads: tuple[str, ...] = LOADS) -> None:
        super().__init__()
        self.model, self.loads = model, loads
        self.scale = nn.Parameter(torch.randn(1, _WIDTH) * 0.5)
        self.square = nn.Parameter(torch.randn(_WIDTH, _WIDTH) * 0.3)
        for name, value in {"late": 1.0, "late2": 1.25, "late3": 1.5}.items():
            self.register_buffer(name, torch.tensor(value))
        self.register_buffer("mean", torch.zeros(_WIDTH))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.linspace(-1, 1, _WIDTH))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        result = self.model(*args, **kwargs)
        given = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        h = torch.tanh(given.reshape(given.shape[0], -1)[:, :1].float() * self.scale)
        with torch.no_grad():
            fixed = self.burden(h.detach())
            self.remember(h)
        return result, (fixed + (h @ self.square.t()).square().mean()) * self.late

    def burden(self, h: Tensor) -> Tensor:
        """A number that depends on everything here."""
        loads = [getattr(self, name)(h) for name in self.loads]
        return functools.reduce(torch.add, loads)

    def viewed(self, h: Tensor) -> Tensor:
        rows = h[-1] * h[0]
        middle = h[:, 1:7].t() @ h[:, 2:4]
        steps = h[:, ::2] - h[:, 1::2]
        faces = h.view(-1, 2, 2, 2).permute(0, 3, 1, 2) * h.view(-1, 2, 2, 2).select(2, 1).unsqueeze(1)
        corner = self.square[1:5, 2:6] * self.square.diagonal()[:4].unsqueeze(0).expand(4, 4)
        parts = [part.mean() for part in h.split(4, dim=1)]
        total = rows.sum() + middle.sum() + steps.sum() / h.shape[0]
        return total + faces.sum() + corner.sum() / 8 + parts[0] - parts[1]

    def conjugated(self, h: Tensor) -> Tensor:
        wave = torch.complex(h, h.flip(1))
        other = wave.conj()
        product = other * wave.t().conj().t()
        return (other * wave).real.sum() + other.imag.square().mean() - other.imag[:, 1].sum() + product.imag.sum()

    def aliased(self, h: Tensor) -> Tensor:
        """``contiguous`` and the like, of what is contiguous and of what is not."""
        turned = self.square.t().contiguous()
        flat = h.t().reshape(-1) * h.flatten()
        ravelled = h[:, 2:5].ravel() + h[:, 2:5].t().contiguous().t().reshape(-1)
        kept = h.contiguous() + h.clone() * h.to(torch.float32)
        return turned[0].sum() + flat.mean() + ravelled.sum() + kept.square().mean()

    def beyond(self, h: Tensor) -> Tensor:
        """Reads of memory that lies between the elements of a view, or behind them."""
        v = (h @ self.square)[:, ::2]
        first = torch.as_strided(v, (2, 4), (4, 1), 1)
        copied = torch.as_strided_copy(v, (5,), (3,), 2)
        scattered = torch.slice_scatter(v, v[:, 1:3] * 2, 1, 0, 2)
        reached = v[0].as_strided((3,), (2,), 1)
        return first.sum() + copied.square().sum() + scattered.sum() + reached.sum()

    def overwritten(self, h: Tensor) -> Tensor:
        y = h.clone()
        before = y[:, 1] * 2
        y[0].mul_(3)
        y[:, 2:4].add_(before.unsqueeze(1))
        middle = y.sum(1)
        y.clamp_(-0.75, 0.5)
        y[:, 5].zero_()
        new = torch.empty_like(y)
        new.copy_(y.flip(0))
        new += middle.unsqueeze(1)
        return new.relu_().sum() + y.square().sum()

    def drawn(self, h: Tensor) -> Tensor:
        kept = nn.functional.dropout(h, 0.4)
        noise = torch.randn_like(h) + torch.rand_like(h)
        return (kept * noise).sum() + nn.functional.dropout(h, 0.4).mean()

    def typed(self, h: Tensor) -> Tensor:
        places = torch.arange(h.shape[0])
        fine = (h.double() + places.unsqueeze(1).double()).sum(1).float()
        coarse = (h * 100).round().int() // 3
        marked = torch.full((h.shape[0], 1), 0.25) * (h > 0).float()
        return fine.sum() + coarse.float().mean() + torch.where(h > 0.1, h, marked).sum() * -0.5

    def gathered(self, h: Tensor) -> Tensor:
        index = (h.abs() * 5).long()
        near = self.table[index] + self.table.flip(0)[index]
        ordered, places = h.sort(1)
        best, _ = h.topk(3, 1)
        joined = torch.cat([ordered[:, :2], best, near[:, 3:]], 1)
        stacked = torch.stack([h[:, 0], h[:, 1], best[:, 0]], 1)
        return joined.cumsum(1)[:, -1].sum() + (stacked @ stacked.t()).sum() + h.gather(1, places.flip(1)).sum()

    def remember(self, h: Tensor) -> None:
        """The chain ends in a constant: what the first step hands down shows in the third."""
        self.mean.lerp_(h.mean(0), 0.1)
        self.count.add_(1)
        self.late.copy_(self.late2)
        self.late2.copy_(self.late3)
        self.late3.fill_(1.75)


def laden_loss(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of a :class:`Laden` model from that of the model in it."""

    def total(output: tuple[Any, Tensor], *targets: Any) -> Any:
        result, burden = output
        found = loss(result, *targets)
        return {**found, "burden": burden} if isinstance(found, dict) else found + 0.01 * burden

    return total
