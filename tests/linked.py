"""Models whose best placement depends on the machine: some are bound by links, some by arithmetic. All are on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir import Program

__all__ = ["MODELS", "captured", "limits"]

Made = tuple[nn.Module, Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.norm(self.a(x))))


class Attention(nn.Module):
    """A layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class UNet(nn.Module):
    """Halves, doubles, and joins what both sides have."""

    def __init__(self, depth: int, channels: int) -> None:
        super().__init__()
        sizes = [channels << i for i in range(depth)]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(c, 2 * c, 3, 2, padding=1) for c in sizes])
        self.up = nn.ModuleList([nn.ConvTranspose2d(2 * c, c, 2, 2) for c in reversed(sizes)])
        self.join = nn.ModuleList([nn.Conv2d(2 * c, c, 3, padding=1) for c in reversed(sizes)])
        self.last = nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = torch.relu(self.first(x)), []
        for down in self.down:
            kept.append(x)
            x = torch.relu(down(x))
        for up, join in zip(self.up, self.join, strict=True):
            x = torch.relu(join(torch.cat([up(x), kept.pop()], 1)))
        return self.last(x)


def _expert(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Mixture(nn.Module):
    """Layers, each a mixture of experts."""

    def __init__(self, layers: int, experts: int, width: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(width, experts) for _ in range(layers)])
        self.experts = nn.ModuleList([nn.ModuleList([_expert(width) for _ in range(experts)]) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(x).softmax(-1)
            x = x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
        return x


def _convolutions(size: int) -> Made:
    blocks = [Residual(64) for _ in range(size)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )
    return model, torch.empty(64, 3, 64, 64), torch.empty(64, dtype=torch.long)


def _transformer(size: int) -> Made:
    layers = [nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0) for _ in range(size)]
    model = nn.Sequential(*layers, nn.Flatten(1), nn.Linear(512 * 128, 10))
    return model, torch.empty(32, 128, 512), torch.empty(32, dtype=torch.long)


def _gpt(size: int) -> Made:
    layers = [Attention(768, 12) for _ in range(size)]
    model = nn.Sequential(nn.Embedding(50257, 768), *layers, nn.LayerNorm(768), nn.Linear(768, 50257), nn.Flatten(0, 1))
    return model, torch.empty(4, 512, dtype=torch.long), torch.empty(2048, dtype=torch.long)


def _resnet(size: int) -> Made:
    stages: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3), nn.MaxPool2d(3, 2, 1)]
    for channels in (64, 128, 256, 512):
        stages += [Residual(channels) for _ in range(-(-size // 4))]
        stages += [nn.Conv2d(channels, 2 * channels, 3, 2, padding=1)]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000))
    return model, torch.empty(64, 3, 224, 224), torch.empty(64, dtype=torch.long)


def _u_net(size: int) -> Made:
    return UNet(-(-size // 2), 32), torch.empty(16, 3, 256, 256), torch.empty(16, 256, 256, dtype=torch.long)


def _mixture(size: int) -> Made:
    model = nn.Sequential(Mixture(size, 4, 1024), nn.Linear(1024, 10))
    return model, torch.empty(8192, 1024), torch.empty(8192, dtype=torch.long)


MODELS: Mapping[str, Callable[[int], Made]] = {
    "convolutions": _convolutions,
    "transformer": _transformer,
    "GPT-2": _gpt,
    "ResNet": _resnet,
    "U-Net": _u_net,
    "mixture of MLPs": _mixture,
}
"""By name, what makes a model of so many layers, its batch and its targets."""


def captured(name: str, size: int) -> Program:
    """A step of a model with AdamW."""
    with torch.device("meta"):
        model, x, y = MODELS[name](size)
    optimizer = torch.optim.AdamW(model.parameters())
    return graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=optimizer)


def limits(program: Program, cards: int, share: float) -> dict[str, int]:
    """For each card a share of what one device needs for all of the step."""
    need = graphir.memory(program, threads=1, profile=None).peak["gpu:0"]
    return {f"gpu:{index}": int(share * need) for index in range(cards)}
