"""Short kernels in one thread, where torch would wake others for however little there is to do.

The number of threads is set through OpenMP's own function, for the calling thread alone: ``torch.set_num_threads``
would also give it to every thread that calls torch for the first time meanwhile, and for good.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["in_one_thread"]


def in_one_thread(kernel: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call *kernel*, which then computes in the calling thread, if this torch takes its threads from OpenMP."""
    threads = torch.get_num_threads()
    set_threads = _setter() if threads > 1 else None
    if set_threads is None:
        kernel(*args, **kwargs)
        return
    set_threads(1)
    try:
        kernel(*args, **kwargs)
    finally:
        set_threads(threads)


@cache
def _setter() -> Callable[[int], object] | None:
    """``omp_set_num_threads``, where it is that of torch's own OpenMP."""
    try:
        found = ctypes.CDLL(None).omp_set_num_threads
    except (AttributeError, OSError, TypeError):  # no such function, or a system that doesn't look through the process
        return None
    before = torch.get_num_threads()
    found(before + 1)
    heard = torch.get_num_threads() == before + 1
    found(before)
    return found if heard else None
