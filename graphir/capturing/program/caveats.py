"""The caveats of a program that was recorded on the host for CUDA: the device's kernels, and how these round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...ir.net import Net
from ..intake.options import Options

__all__ = ["caveats_of"]

_DEVICE: Final = "recorded on the host for CUDA: bits are those of the device that runs the program"
_BATCH_NORM: Final = "eager PyTorch may take cuDNN's kernel, which adds in another order"
_OF_TYPES: Final[Mapping[str, str]] = {
    "graphir.attention": "the device chooses the kernel, flash, efficient or math, and each rounds differently",
    "aten.convolution.default": "cuDNN chooses an algorithm, with a workspace and an order of sums of its own",
    "aten.native_batch_norm.default": _BATCH_NORM,
    "aten._native_batch_norm_legit_functional.default": _BATCH_NORM,
}
"""By type of operator. A caveat begins with the type, by which :func:`graphir.memory` finds it."""
_OF_MODULES: Final[Mapping[type[torch.nn.Module], str]] = {
    torch.nn.RNNBase: "recurrent modules: recorded cell by cell, where eager PyTorch runs cuDNN's kernel, which rounds "
    "differently",
    torch.nn.RNNCellBase: "cells: recorded as products and activations, where eager PyTorch fuses the activations",
    torch.nn.RMSNorm: "RMSNorm: recorded operator by operator, where eager PyTorch may run one kernel",
}
_CLIPPED: Final = (
    "clip_grad_norm: the norm of each gradient is computed by itself, where eager PyTorch computes norms of lists"
)


def caveats_of(net: Net, model: torch.nn.Module, options: Options) -> tuple[str, ...]:
    """The caveats of a step for CUDA.

    Args:
        net: the step.
        model: the recorded model.
        options: of the capture.
    """
    types = {op.type for op in net.ops}
    found = [_DEVICE, *(f"{type}: {text}" for type, text in _OF_TYPES.items() if type in types)]
    modules = list(model.modules())
    found += [text for kind, text in _OF_MODULES.items() if any(isinstance(module, kind) for module in modules)]
    if options.clip_grad_norm is not None:
        found.append(_CLIPPED)
    return tuple(found)
