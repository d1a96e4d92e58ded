"""Keep the memory that steps free in the process, as the caching allocator of CUDA does.

glibc gives the free top of a heap, and every large block, back to the operating system. A step frees nearly all that
it made, so the next one has the same pages mapped again, one page fault each. While an executor on the host is open,
glibc is told to keep them (``mallopt(3)``), in the heaps of all threads; the process stays at the size that it has at a
step's peak. The setting is the whole process's. Where an environment variable sets glibc's, or the C library is another
one, nothing is changed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

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
"""What glibc itself comes to in a process that frees large blocks."""

_VARIABLES: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

_lock = threading.RLock()  # the collector of garbage may end a context at any time
_contexts = 0


def _renew_lock() -> None:
    """In a forked process nobody releases what another thread held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep freed memory in the process. At the end of the last such context heaps may shrink, and do."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _contexts
    with _lock:
        before, _contexts = _contexts, _contexts + change
        if (before == 0) == (_contexts == 0) or (libc := _glibc()) is None:
            return
        for parameter, value in (_KEEP if _contexts else _LEAVE).items():
            libc.mallopt(parameter, value)
        if not _contexts:
            libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The C library, where it is glibc and the environment leaves these settings to the process."""
    try:
        if not (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc"):
            return None
    except (AttributeError, ValueError):  # not a Unix, or a C library without this name
        return None
    return None if any(name in os.environ for name in _VARIABLES) else ctypes.CDLL(None)
