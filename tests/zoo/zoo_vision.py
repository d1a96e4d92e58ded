"""Models of images and videos, built from torchvision and timm, and small: little images, few classes."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn
from zoo_rows import Row, images, library

__all__ = ["VISION"]


def torchvision_row(name: str, pixels: int, size: int = 2, fixed: str = "", **options: Any) -> Row:
    """A classifier of torchvision."""

    def model() -> nn.Module:
        return library("torchvision").models.get_model(name, weights=None, num_classes=10, **options)  # type: ignore[no-any-return]

    return Row(model, images(pixels), F.cross_entropy, size, fixed)


VISION: dict[str, Row] = {
    "resnet18": torchvision_row("resnet18", 32),
}
