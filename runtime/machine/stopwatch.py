"""Seconds in which one looked: a process that was suspended does not count those as waited for."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["Stopwatch"]

_MOST_SECONDS: Final = 1.0


class Stopwatch:
    """Counts seconds from look to look.

    Whoever looks every few milliseconds and finds that minutes have passed was stopped (SIGSTOP, a machine asleep),
    with all that it looks at.

    Args:
        limit: the seconds at which whoever looks gives up: one look alone does not reach it.

    Attributes:
        seconds: counted so far.
    """

    def __init__(self, limit: float | None = None) -> None:
        self.most = _MOST_SECONDS if limit is None else min(_MOST_SECONDS, limit / 4)
        self.seconds, self.last = 0.0, time.monotonic()

    def look(self) -> float:
        """The seconds counted, this look's included."""
        before, self.last = self.last, time.monotonic()
        self.seconds += min(self.last - before, self.most)
        return self.seconds

    def restart(self) -> None:
        """Count from here."""
        self.seconds, self.last = 0.0, time.monotonic()
