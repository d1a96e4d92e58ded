"""Settings of the thread and of the process that call a step, which would change its bits or make it hang."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Final

import torch

from graphir.process import Setting, held

from .openmp import in_threads

__all__ = ["FORKS", "follow_forks", "is_neutral", "neutral"]

FORKS: Final = [0]
"""How many forks lie between the first session's process and this one. Comparing it is cheaper than asking for the
process id."""


def _count_fork() -> None:
    FORKS[0] += 1


@cache
def follow_forks() -> None:
    """Count them from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_count_fork)


_SAME_CONVOLUTIONS: Final = {
    Setting("cudnn.deterministic", torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic): True,
    Setting("cudnn.benchmark", torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark): False,
}
"""cuDNN takes algorithms that give the same bits in each run, not those that were fastest in this one. A convolution's
forward could be told so by arguments, its backward can't."""


def is_neutral(threads: int) -> bool:
    """Whether this thread runs kernels in *threads* threads, without autocast."""
    return torch.get_num_threads() == threads and not torch.is_autocast_enabled("cpu")


@contextmanager
def neutral(threads: int, kinds: Collection[str] = ("cpu",)) -> Iterator[None]:
    """Let this thread run kernels in *threads* threads and without autocast, for these kinds of devices, and restore
    its own settings afterwards.

    Only CUDA takes settings of the whole process: steps there overlap, since all hold the same.
    """
    same = held(_SAME_CONVOLUTIONS) if "cuda" in kinds else nullcontext()
    with in_threads(threads), _without_autocast(kinds), same:
        yield


@contextmanager
def _without_autocast(kinds: Collection[str]) -> Iterator[None]:
    """As ``torch.autocast(…, enabled=False)``, except that that one, at its end, drops what all threads have cast."""
    cast = [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]
    try:
        for kind in cast:
            torch.set_autocast_enabled(kind, False)
        yield
    finally:
        for kind in cast:
            torch.set_autocast_enabled(kind, True)
