"""Trains a model of timm on the handwritten digits, as people write it; one line is about devices: DataParallel's."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from timm.data import Mixup, create_transform
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import to_pil_image

from graphir.demo.digits import load_digits


class Digits(Dataset[Any]):
    def __init__(self, images: Tensor, labels: Tensor, transform: Any) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.transform(to_pil_image(self.images[i]).convert("RGB")), int(self.labels[i])


def main(epochs: int = 3, samples: int = 768, held: int = 256) -> tuple[float, nn.Module]:
    """The accuracy on digits that were not trained on, and the model."""
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    images, labels = load_digits()
    order = torch.randperm(len(images))
    train, test = order[:samples], order[samples : samples + held]
    augment = create_transform(
        32,
        is_training=True,
        scale=(0.7, 1.0),
        hflip=0.0,
        auto_augment="rand-m5-n1",
        re_prob=0.1,
        interpolation="bilinear",
    )
    plain = create_transform(32, interpolation="bilinear", crop_pct=1.0)
    loader = DataLoader(Digits(images[train], labels[train], augment), batch_size=64, shuffle=True, drop_last=True)
    mixup = Mixup(mixup_alpha=0.1, cutmix_alpha=0.0, label_smoothing=0.1, num_classes=10)

    model: nn.Module = create_model("test_resnet", num_classes=10, drop_rate=0.1, drop_path_rate=0.05)
    model = torch.nn.DataParallel(model, device_ids=[0, 1])
    optimizer = create_optimizer_v2(model, opt="adamw", lr=4e-3, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=0)
    loss_of = SoftTargetCrossEntropy()
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            x, target = mixup(x, y)
            loss = loss_of(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step(epoch + 1)

    model.eval()
    unseen = Digits(images[test], labels[test], plain)
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(unseen, batch_size=64))
    return right / len(unseen), model
