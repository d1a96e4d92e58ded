"""Keep the memory of a step from going back to the operating system between steps.

glibc gives the free top of its heap back. A step frees nearly all that it made, in about the reverse order, so the next
one has the same pages mapped again, one page fault each, which a small convolutional net feels. One block
that stays, above as much free memory as a step needs, keeps that memory in the process. The space below it is reserved
but not touched: it costs addresses, and bytes only once a step has used them.
"""

from __future__ import annotations

import os
from typing import Final

import torch
from torch import Tensor

__all__ = ["keep_heap"]

_BLOCK: Final = 120 * 1024
"""Bytes of a block: glibc takes blocks of 128 KiB and more from elsewhere until a program has freed such a one."""

_MOST: Final = 256 * 2**20
"""Beyond this, computing takes so long that page faults do not show."""


def keep_heap(nbytes: int) -> Tensor | None:
    """Keep about *nbytes* of free memory, at most 256 MiB, in the calling thread's heap.

    Returns:
        What keeps it there: hold it for as long. None where the C library is not glibc.
    """
    if not _is_glibc():
        return None
    blocks = [torch.empty(_BLOCK, dtype=torch.uint8) for _ in range(min(nbytes, _MOST) // _BLOCK + 1)]
    return blocks[-1]


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # not a Unix, or a C library without this name
        return False
