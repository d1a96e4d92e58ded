"""The demo's model: a residual net for 8 x 8 images, written as one would write it in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DigitsNet"]


class _Block(nn.Module):
    """Two convolutions with batch norm, and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(channels, width, 1, stride, bias=False) if width != channels else None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)  # type: ignore[no-any-return]  # what a module returns is Any


class DigitsNet(nn.Module):
    """A stem, three residual blocks and a classifier with dropout: ``f32[n, 1, 8, 8] -> f32[n, 10]``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _Block(16, 16)
        self.layer2 = _Block(16, 32)
        self.layer3 = _Block(32, 64, stride=2)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        x = torch.flatten(x.mean((2, 3)), 1)
        out: Tensor = self.fc(self.dropout(x))
        return out
