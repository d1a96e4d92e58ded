"""Why no plan can stand for a call, and how many captures a module's calls pay for."""

from __future__ import annotations

from typing import Final

__all__ = ["Captures", "Unfit"]

_CAPTURES: Final = 8
"""How many captures are made before plans have run any call."""

_CALLS: Final = 64
"""How many calls plans run for each capture after these: it takes about as long as they save."""


class Unfit(Exception):
    """Why no plan can stand for a call."""


class Captures:
    """How many captures were made, and how many calls plans have run: those pay for these.

    A capture takes as long as many calls. Where most calls need another one, eager PyTorch is faster.
    """

    def __init__(self) -> None:
        self.made = self.calls = 0

    def require(self, why: str) -> None:
        """Raise Unfit, which says *why* a capture is needed, where it is not paid for."""
        if self.made >= _CAPTURES + self.calls // _CALLS:
            raise Unfit(why)
