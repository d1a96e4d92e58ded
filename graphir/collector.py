"""Python's garbage collector, which rests during a capture and during a pass.

Both make up to millions of small objects that stay. The collector would look through all of them again and again, which
takes longer than the work itself, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Switch the collector off, and afterwards on again if it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
