"""Kernels in one thread: short ones, for which torch would wake other threads however little there is to do, and those
that add in one order only in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..machine.openmp import openmp_setter

__all__ = ["in_one_thread"]

T = TypeVar("T")


def in_one_thread(kernel: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """What *kernel* returns, which computes in the calling thread, if this torch takes its threads from OpenMP."""
    threads = torch.get_num_threads()
    set_threads = openmp_setter() if threads > 1 else None
    if set_threads is None:
        return kernel(*args, **kwargs)
    set_threads(1)
    try:
        return kernel(*args, **kwargs)
    finally:
        set_threads(threads)
