"""Models that ``bench gpu`` trains, each with a tiny one of its kind; and how their eager steps are made.

All are written out here or in ``models.py``: a machine with a card may have no library of models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import models
import torch
import torch.nn.functional as F
from gpu_card import Card, Step
from stepping import DispatchBound
from torch import Tensor, nn

__all__ = ["CASES", "WAYS", "Case", "Eager", "Way", "eager", "under"]


class Case(NamedTuple):
    """A model on the host, its batch, and its loss.

    Attributes:
        blocks: the layers that may be repeated, or have what they save on the host.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    blocks: tuple[nn.Module, ...] = ()

    @property
    def example(self) -> models.Example:
        return models.Example(*self[:4])


class Bert(nn.Module):
    """BERT's layers, with attention that sees all words and dropout after each part, and a word for each place."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LlamaLayer(nn.Module):
    """Rotary attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, hidden), (width, hidden), (hidden, width))
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            part(y).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(_turned(q, cos, sin), _turned(k, cos, sin), v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Llama(nn.Module):
    """A LLaMA-like decoder."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(length).float(), 10000 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def _words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _text(model: nn.Module, vocabulary: int, batch: int, length: int) -> Case:
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return Case(model, (drawn[:, :-1].contiguous(),), (drawn[:, 1:].contiguous(),), _words)


def _mlp(tiny: bool) -> Case:
    torch.manual_seed(0)
    width = 4 if tiny else 64
    batch = torch.randn(8, width), torch.randn(8, width)
    return Case(DispatchBound(width), batch[:1], batch[1:], F.mse_loss)


def _resnet50(tiny: bool) -> Case:
    example = models.resnet(batch=2) if tiny else models.resnet50(batch=32)
    names = ("blocks",) if tiny else ("layer1", "layer2", "layer3", "layer4")
    return Case(*example, tuple([block for name in names for block in example.model.get_submodule(name).children()]))


def _gpt2(tiny: bool) -> Case:
    torch.manual_seed(0)
    sizes = (32, 8, 16, 2, 2) if tiny else (50257, 512, 768, 12, 12)
    model = models.GPT(*sizes, dropout=0.0)
    return _text(model, sizes[0], 8, sizes[1])._replace(blocks=tuple(model.layers))


def _bert(tiny: bool) -> Case:
    torch.manual_seed(0)
    sizes = (32, 8, 16, 2, 1) if tiny else (30522, 256, 768, 12, 12)
    return _text(Bert(*sizes), sizes[0], 16, sizes[1])


def _llama(tiny: bool) -> Case:
    torch.manual_seed(0)
    sizes = (32, 8, 16, 2, 24, 1) if tiny else (32000, 512, 1024, 16, 2816, 8)
    return _text(Llama(*sizes), sizes[0], 4, sizes[1])


CASES: Final[dict[str, Callable[[bool], Case]]] = {
    "ResNet-50, batch 32": _resnet50,
    "GPT of GPT-2's sizes, 8 of 512": _gpt2,
    "MLP of 8 narrow layers, batch 8": _mlp,
    "BERT with dropout, 16 of 256": _bert,
    "LLaMA-like, 4 of 512": _llama,
}
"""By name, what makes the case; given True, a tiny one."""


class Way(NamedTuple):
    """How a step is made: in which arithmetic, with which form of AdamW."""

    bf16: bool
    fused: bool

    def __str__(self) -> str:
        return f"{'bf16 autocast' if self.bf16 else 'f32'}, {'fused' if self.fused else 'default'}"

    def optimizer(self, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.fused or None, capturable=capturable)

    def around(self, place: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(place.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()


WAYS: Final = (Way(False, True), Way(True, True), Way(False, False), Way(True, False))


class _Autocast(nn.Module):
    """A model whose forward is under autocast."""

    def __init__(self, model: nn.Module, place: torch.device) -> None:
        super().__init__()
        self.model, self.kind = model, place.type

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast(self.kind, dtype=torch.bfloat16):
            return self.model(*inputs)


def under(card: Card, case: Case, way: Way) -> Case:
    """The case with its arithmetic in the model, where a capture finds it."""
    return case._replace(model=_Autocast(case.model, card.place)) if way.bf16 else case


class Eager(NamedTuple):
    """An eager step on a card, with the model and the optimizer that it changes."""

    step: Step
    model: nn.Module
    optimizer: torch.optim.Optimizer


def eager(
    card: Card,
    case: Case,
    way: Way,
    *,
    mode: str = "",
    capturable: bool = False,
    shared: bool = False,
    prepare: Callable[[tuple[nn.Module, ...]], object] = id,
) -> Eager:
    """An eager step.

    Args:
        card: where.
        case: which.
        way: in which arithmetic, with which optimizer.
        mode: of ``torch.compile``, for model and loss, and for the update; none where empty.
        capturable: whether a graph may take the update.
        shared: whether the model itself is trained, and no copy.
        prepare: changes the blocks first.
    """
    case = case if shared else copy.deepcopy(case)
    prepare(case.blocks)
    model = case.model.to(card.place)
    optimizer = way.optimizer(model, capturable)
    inputs, targets = ([tensor.to(card.place) for tensor in given] for given in (case.inputs, case.targets))

    def loss() -> Tensor:
        with way.around(card.place):
            return case.loss(model(*inputs), *targets)

    def update() -> None:
        optimizer.step()

    found, updated = (card.compiled(loss, mode), card.compiled(update, mode)) if mode else (loss, update)

    def step() -> Tensor:
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        value = found()
        value.backward()
        updated()
        return value

    return Eager(step, model, optimizer)
