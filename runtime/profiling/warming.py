"""Operands as a step leaves them in caches.

What a step has touched shortly before is in its core's own cache; what it has touched before that is in the one that
cores share, and the rest in memory. A call's operands are brought to where they would be just before it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from ..machine.caches import caches

__all__ = ["bring"]

_local: Final = threading.local()


def bring(operands: Iterable[tuple[int, Tensor]]) -> None:
    """Touch operands so that they are in the caches that hold them in a step.

    Args:
        operands: each with the bytes that a step has touched since it touched it.
    """
    own, shared = caches()
    near = [tensor for far, tensor in operands if far <= own]
    further = [tensor for far, tensor in operands if own < far <= shared]
    for tensor in further:
        _touch(tensor)
    if further:
        _touch(_sweep(own))
    for tensor in near:
        _touch(tensor)


def _touch(tensor: Tensor) -> None:
    """Read and write a tensor's memory, and change nothing. Copying it to itself would do nothing at all."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).bitwise_or_(0)


def _sweep(nbytes: int) -> Tensor:
    """Memory of the calling thread's that pushes everything else out of its core's own cache."""
    found: Tensor | None = getattr(_local, "sweep", None)
    if found is None:
        found = _local.sweep = torch.zeros(nbytes, dtype=torch.uint8)
    return found
