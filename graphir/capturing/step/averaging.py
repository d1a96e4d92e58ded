"""``AveragedModel.update_parameters`` in a step function.

Torch asks on the host whether this is the first average, and copies then. A program chooses by ``torch.where``, so that
each step is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

__all__ = ["averaging"]


def averaging(on_cuda: Callable[[], bool]) -> Callable[[AveragedModel, torch.nn.Module], None]:
    """The method that averages the parameters of a module as torch does, where *on_cuda* says."""

    def update_parameters(averaged: AveragedModel, model: torch.nn.Module) -> None:
        with torch.no_grad():
            ours: Iterable[Any] = averaged.module.parameters()
            theirs: Iterable[Any] = model.parameters()
            if averaged.use_buffers:
                ours, theirs = chain(ours, averaged.module.buffers()), chain(theirs, model.buffers())
            kept, now = list(ours), [tensor.detach() for tensor in theirs]
            first = averaged.n_averaged == 0
            for tensor, new, made in zip(kept, now, _averages(averaged, kept, now, on_cuda()), strict=False):
                tensor.detach().copy_(torch.where(first, new, made))
            if not averaged.use_buffers:
                for tensor, new in zip(averaged.module.buffers(), model.buffers(), strict=True):
                    tensor.detach().copy_(new.detach())
            averaged.n_averaged += 1

    return update_parameters


def _averages(
    averaged: Any, kept: Sequence[torch.Tensor], now: Sequence[torch.Tensor], on_cuda: bool
) -> list[torch.Tensor]:
    """The next averages, by the function of the averaged model; by default lists are averaged on CUDA alone."""
    count, one, every = averaged.n_averaged, averaged.avg_fn, averaged.multi_avg_fn
    if one is None and every is None:
        one, every = (None, get_swa_multi_avg_fn()) if on_cuda else (get_swa_avg_fn(), None)
    if every is None:
        return [one(tensor.detach(), new, count) for tensor, new in zip(kept, now, strict=False)]
    made = [tensor.detach().clone() for tensor in kept]
    by_type: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(made):
        by_type.setdefault(tensor.dtype, []).append(i)
    for places in by_type.values():
        every([made[i] for i in places], [now[i] for i in places], count)
    return made
