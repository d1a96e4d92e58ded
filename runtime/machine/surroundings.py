"""What of the thread and the process that a step is called in would change its bits, or hang it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

__all__ = ["FORKS", "is_neutral", "neutral"]

FORKS: Final = [0]
"""How many forks lie between the first process and this one. Comparing it is cheaper than asking for the process id."""


def _count_fork() -> None:
    FORKS[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def is_neutral(threads: int) -> bool:
    """Whether this thread runs kernels in *threads* threads, without autocast."""
    return torch.get_num_threads() == threads and not torch.is_autocast_enabled("cpu")


@contextmanager
def neutral(threads: int, kinds: Collection[str] = ("cpu",)) -> Iterator[None]:
    """Make it so, for these kinds of devices, and restore the thread's own settings afterwards."""
    before = torch.get_num_threads()
    if before != threads:
        torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            for kind in kinds:
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if "cuda" in kinds:
                stack.enter_context(_same_convolutions())
            yield
    finally:
        if before != threads:
            torch.set_num_threads(before)


@contextmanager
def _same_convolutions() -> Iterator[None]:
    """Let cuDNN take algorithms that give the same bits in each run, and not those that were fastest in this one."""
    before = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_deterministic(True)
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_deterministic(before[0])
        torch._C._set_cudnn_benchmark(before[1])
