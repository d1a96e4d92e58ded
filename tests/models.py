"""Small models for every test: each function returns ``(model, inputs, targets, loss)``.

``inputs`` and ``targets`` are tuples of tensors, ``loss(output, *targets)`` is a scalar. Weights and tensors are drawn
from a seed, and the global random state is left as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "MLP", "Bottleneck", "Example", "ResNet", "ResNet50", "gpt", "mlp", "resnet", "resnet50"]


class Example(NamedTuple):
    """A model with a batch to train it on."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.function(*tensors)


class MLP(nn.Module):
    """Two linear layers with a relu between them."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class BasicBlock(nn.Module):
    """A residual block as torchvision writes it: in-place relus, ``out += identity``."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
            if stride != 1 or channels_in != channels
            else None
        )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.dropout(self.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A small residual net for small images."""

    def __init__(self, blocks: int, channels: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, channels, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        widths = [channels * 2 ** (i // 2) for i in range(blocks)]
        self.blocks = nn.Sequential(
            *(
                BasicBlock(before, width, 1 if before == width else 2, dropout)
                for before, width in zip([channels, *widths], widths, strict=False)
            )
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.blocks(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Attention(nn.Module):
    """Causal self-attention by ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.proj(y.transpose(1, 2).reshape(batch, length, width)))


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small decoder-only transformer whose head shares the token embedding's weight."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    """torchvision's ResNet bottleneck, with its names."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int = 1, downsample: nn.Module | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet50(nn.Module):
    """torchvision's ResNet-50, with its names."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.channels = 64
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = self._layer(64, 3, 1)
        self.layer2 = self._layer(128, 4, 2)
        self.layer3 = self._layer(256, 6, 2)
        self.layer4 = self._layer(512, 3, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * Bottleneck.expansion, classes)

    def _layer(self, channels: int, blocks: int, stride: int) -> nn.Sequential:
        width = channels * Bottleneck.expansion
        downsample = nn.Sequential(nn.Conv2d(self.channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        first = Bottleneck(self.channels, channels, stride, downsample)
        self.channels = width
        return nn.Sequential(first, *(Bottleneck(width, channels) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def mlp(batch: int = 6, features: int = 10, hidden: int = 16, classes: int = 5, seed: int = 0) -> Example:
    """Two linear layers, cross entropy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP(features, hidden, classes)
        return Example(model, (torch.randn(batch, features),), (torch.randint(classes, (batch,)),), F.cross_entropy)


def resnet(
    batch: int = 4,
    blocks: int = 2,
    channels: int = 4,
    image: int = 8,
    classes: int = 5,
    dropout: float = 0.0,
    seed: int = 0,
) -> Example:
    """A small residual net with batch norm; *blocks* from the third on are twice as wide, and so on by twos."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet(blocks, channels, classes, dropout)
        x = torch.randn(batch, 3, image, image)
        return Example(model, (x,), (torch.randint(classes, (batch,)),), F.cross_entropy)


def _next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


def gpt(
    batch: int = 3,
    length: int = 8,
    width: int = 16,
    heads: int = 2,
    layers: int = 2,
    vocabulary: int = 32,
    dropout: float = 0.0,
    seed: int = 0,
) -> Example:
    """A small GPT with a tied head, next-token cross entropy."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(vocabulary, length, width, heads, layers, dropout)
        text = torch.randint(vocabulary, (batch, length + 1))
        return Example(model, (text[:, :-1].contiguous(),), (text[:, 1:].contiguous(),), _next_token_loss)


def resnet50(batch: int = 2, image: int = 224, classes: int = 1000, seed: int = 0) -> Example:
    """ResNet-50 with torchvision's names."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet50(classes)
        x = torch.randn(batch, 3, image, image)
        return Example(model, (x,), (torch.randint(classes, (batch,)),), F.cross_entropy)
