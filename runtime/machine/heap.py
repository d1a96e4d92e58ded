"""Keep the memory that steps free in the process, as the caching allocator of CUDA does.

glibc gives the free top of a heap, and every large block, back to the operating system. A step frees nearly all that
it made, so the next one has the same pages mapped again, one page fault each. In a session with ``keep_heap=True``
glibc is told to keep them (``mallopt(3)``), in the heaps of all threads; the process stays at the size that it has at a
step's peak. The setting is the whole process's, which is why nobody gets it unasked. Where an environment variable sets
glibc's, or the C library is another one, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from graphir.process import Setting, held

__all__ = ["kept_heap"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3

_KEEP: Final[Mapping[int, int]] = {
    _TRIM_THRESHOLD: 2**31 - 1,  # the most that an int says
    _TOP_PAD: 64 * 2**20,  # the size of the heaps that threads have: an empty one stays
    _MMAP_THRESHOLD: 2**30,
}
"""Bytes: how much free memory stays at a heap's top, by how much a heap grows, and from where on a block has a mapping
of its own, which goes back at once."""

_LEAVE: Final[Mapping[int, int]] = {_TRIM_THRESHOLD: 64 * 2**20, _TOP_PAD: 128 * 2**10, _MMAP_THRESHOLD: 32 * 2**20}
"""What glibc itself comes to in a process that frees large blocks. What was there before, it tells nobody."""

_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_keeps = [False]


def _keep(keep: bool) -> None:
    if (libc := _glibc()) is None:
        return
    for parameter, value in (_KEEP if keep else _LEAVE).items():
        libc.mallopt(parameter, value)
    if not keep:
        libc.malloc_trim(0)
    _keeps[0] = keep


_HEAP: Final = Setting("glibc's heap", lambda: _keeps[0], _keep)


def kept_heap() -> AbstractContextManager[None]:
    """Keep freed memory in the process. At the end of the last such context heaps may shrink, and do."""
    return held({_HEAP: True}, lasting=True)


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc and the environment leaves these settings to the process."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
    except (AttributeError, ValueError):  # not a Unix, or a C library without this name
        return None
    return None if any(name in os.environ for name in _VARIABLES) else ctypes.CDLL(None)
