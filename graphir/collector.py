"""Python's garbage collector, which rests during a capture and during a pass.

Both make up to millions of small objects that stay. The collector would look through all of them again and again, which
takes longer than the work itself, and finds nothing.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Final

from .process import Setting, held

__all__ = ["collector_paused"]

_COLLECTOR: Final = Setting("the collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable())


def collector_paused() -> AbstractContextManager[None]:
    """Switch the collector off; at the end of the last such context in any thread on again, if it was on."""
    return held({_COLLECTOR: False})
