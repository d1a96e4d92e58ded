"""Short lists of names, and names that fit a line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["shortened", "some", "without_indices"]

_INDEX: Final = re.compile(r"(?<![^. ])\d+(?![^. ,])")
"""The index of a module among its siblings, as in ``layers.3.fc``."""


def some(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c and 4 more``, each name once."""
    every = list(dict.fromkeys(names))
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def shortened(name: str, most: int) -> str:
    """A name of at most so many characters: a longer one without its middle."""
    if len(name) <= most:
        return name
    most = max(most, 5)
    kept = (most - 1) // 2
    return f"{name[: most - 1 - kept]}…{name[len(name) - kept :]}"


def without_indices(name: str) -> str:
    """``layers.#.fc`` for ``layers.3.fc``: equal for what differs in the index of a layer alone."""
    return _INDEX.sub("#", name)
