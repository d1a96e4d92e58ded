"""Python's garbage collector, which rests during a capture and during a pass.

Both make up to millions of small objects that stay. The collector would look through all of them again and again, which
takes longer than the work itself, and finds nothing. So would the first look after that, had what was made meanwhile
not been declared old.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from typing import Final

from .process import Setting, held

__all__ = ["collector_paused"]

_MANY: Final = 10_000
"""New objects from which on the collector's next look is saved. Fewer take the look under 1 ms."""


def _switch(on: bool) -> None:
    if not on:
        gc.disable()
        return
    # unfreeze lets go of what somebody else froze, too. To count the frozen objects is to walk all of them.
    if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
    gc.enable()


_COLLECTOR: Final = Setting("the collector", gc.isenabled, _switch)


def collector_paused() -> AbstractContextManager[None]:
    """Switch the collector off; at the end of the last such context in any thread on again, if it was on."""
    return held({_COLLECTOR: False})
