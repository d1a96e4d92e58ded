"""Columns of text, and seconds as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["cut", "seconds_text", "spoken_of", "table"]

_COLUMNS: Final = 80


def seconds_text(seconds: float) -> str:
    """``1.50 s``, ``2.00 ms``, ``3.4 µs``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.1f} µs"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of columns, the first *left* of them aligned to the left; none where there are no rows."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  " + "  ".join(cells)

    return [line(row) for row in (head, *rows)]


def cut(text: str, most: int) -> str:
    """A text of at most so many characters, its middle left out where it has more."""
    if len(text) <= most:
        return text
    kept = most - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def spoken_of(machine: str) -> str:
    """The first line of what is predicted: of which machine, as :attr:`.Topology.about` has it."""
    return cut(f"on {machine}:", _COLUMNS)
