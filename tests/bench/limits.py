"""Figures that a table has limits for: what misses its limit is marked where it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["limited", "missed"]

_MARKED: Final = re.compile(r"\*\*\S+ (?:over|under)\*\*")


def limited(figure: str, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """A figure as its table shows it, in bold with "over" or "under" where it misses its limit.

    Args:
        figure: a number, as it is printed: what counts is what a reader sees.
        at_most: the largest that it may be, if any.
        at_least: the smallest.
    """
    value = float(figure.replace(",", ""))
    if at_most is not None and not value <= at_most:
        return f"**{figure} over**"
    if at_least is not None and not value >= at_least:
        return f"**{figure} under**"
    return figure


def missed(lines: Iterable[str]) -> list[str]:
    """The rows of a table in which a figure misses its limit."""
    return [line for line in lines if _MARKED.search(line)]
