"""Copies of parameters and buffers for a program."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .state import StateTensor, has_data, reach_of

__all__ = ["snapshot", "snapshots"]


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own on the host, with the same strides."""
    span = torch.empty(reach_of(tensor), dtype=tensor.dtype, device="cpu")
    # All memory from the first element to the last as one row, gaps included.
    span.copy_(tensor.detach().as_strided(span.shape, (1,)))
    return span.as_strided(tensor.shape, tensor.stride())


def snapshots(state: Iterable[StateTensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors that have data, by the names of their blobs."""
    return {name: snapshot(tensor) for name, _, tensor in state if has_data(tensor)}
