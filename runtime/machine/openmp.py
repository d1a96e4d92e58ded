"""In how many threads the kernels compute that the calling thread calls.

The number is set through OpenMP's and MKL's own functions, for the calling thread alone. ``torch.set_num_threads`` does
the same, and gives the number to every thread that calls torch for the first time from then on, for good.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

__all__ = ["in_threads", "openmp_setter", "set_threads"]


def set_threads(threads: int) -> None:
    """Let the kernels that this thread calls use so many threads; all other threads keep theirs.

    Where torch's libraries cannot be reached, ``torch.set_num_threads`` sets it.
    """
    torch.get_num_threads()  # a thread's first look would take over what was set for all
    openmp, mkl = openmp_setter(), _mkl_setter()
    if openmp is None or mkl is None:
        torch.set_num_threads(threads)
        return
    openmp(threads)
    mkl(threads)


@contextmanager
def in_threads(threads: int) -> Iterator[None]:
    """Let the kernels that this thread calls use so many threads in this context."""
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    try:
        set_threads(threads)
        yield
    finally:
        set_threads(before)


@cache
def openmp_setter() -> Callable[[int], object] | None:
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


@cache
def _mkl_setter() -> Callable[[int], object] | None:
    """What sets MKL's number for the calling thread, where torch has MKL; None where that cannot be found."""
    if not torch.backends.mkl.is_available():
        return lambda threads: None
    try:
        library = _torch_cpu()
        set_local, most, dynamic = (
            library.MKL_Set_Num_Threads_Local,
            library.MKL_Get_Max_Threads,
            library.MKL_Set_Dynamic,
        )
    except (AttributeError, OSError, StopIteration):
        return None

    def set_threads(threads: int) -> None:
        set_local(threads)
        if most() != threads:  # more than there are cores: MKL heeds that only so, as torch.set_num_threads has it
            dynamic(0)

    before = set_local(1)
    heard = most() == 1
    set_local(before)
    return set_threads if heard else None


def _torch_cpu() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(next(path for path in sorted(folder.glob("*torch_cpu.*")) if path.suffix != ".lib")))
