"""What a row of the zoo says: how a model and its data are made, and what capture is expected to find in them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import unittest
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Batch", "Row", "images", "library"]


class Batch(NamedTuple):
    """What one step is given: ``loss(model(*inputs, **kwargs), *targets)``."""

    inputs: tuple[Any, ...]
    targets: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class Row(NamedTuple):
    """A model of the zoo. Its functions draw from the global random state, which the tests seed.

    Attributes:
        model: makes the model, with random weights.
        data: makes a batch of so many samples.
        loss: takes the model's output and the targets; returns a scalar, or a dict of them.
        size: the batch that is captured; one more than it is run, too.
        fixed: part of the reason that the program gives for fixed sizes, where they can't follow the batch.
        batch_dims: as :func:`graphir.capture` takes it.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    loss: Callable[..., Tensor | dict[str, Tensor]]
    size: int = 2
    fixed: str = ""
    batch_dims: Any = None


def library(name: str) -> ModuleType:
    """A public library of models.

    PyPI's torchvision is built for CUDA's torch. Beside a CPU build its C extension can't be loaded, and the import
    ends where torchvision registers shapes for two operators of the extension that nobody has defined then. No model
    uses them in training, so their schemas are enough. timm and transformers import torchvision.

    Raises:
        unittest.SkipTest: the library is not installed; a test that asks for one is skipped then.
    """
    if name not in sys.modules and importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as e:
            if "torchvision::" not in str(e):
                raise
            for module in [m for m in sys.modules if m.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
            for operator in ("nms", "qnms"):
                _DECLARED.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            importlib.import_module("torchvision")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        raise unittest.SkipTest(f"{name} is not installed") from e


_DECLARED = torch.library.Library("torchvision", "FRAGMENT")


def images(pixels: int, channels: int = 3, classes: int = 10) -> Callable[[int], Batch]:
    """Batches of square images with a class each."""
    return lambda n: Batch((torch.randn(n, channels, pixels, pixels),), (torch.randint(classes, (n,)),))
