"""Patterns over module paths: one grammar for every pass that takes modules.

::

    layer4               the module layer4, and all inside it
    transformer.h[2:4]   transformer.h.2 and transformer.h.3; h[2:] and h[:4] are open at one end, h[2] is one
    *.attn               attn of each child of the model: a * stops at a dot
    **.norm              every norm, at whatever depth
    (nothing)            the model itself, and all inside it
    !h.2                 beside other patterns: what they name, but not h.2 and what is inside it

If several patterns name one module, the closest one holds. From the closest to the loosest: a plain path, ``[2:4]``,
``*``, ``**``, the model itself. Of two patterns of one kind, the one with more written-out names holds: ``h.2.attn``
before ``h.2``. Two equally close patterns that say different things are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from ..errors import PassError

__all__ = ["ModulePattern", "lineage"]

_TOKEN: Final = re.compile(r"(?P<any>\*\*\.?)|(?P<one>\*)|\[(?P<range>[^\]]*)\]|(?P<text>[^*\[\]]+)")
_RANGE: Final = re.compile(r"(?P<first>\d{0,9})(?P<colon>:?)(?P<end>\d{0,9})")
_INDEX: Final = re.compile(r"\.?(?P<index>\d+)(?=\.|$)")
_NO_END: Final = 10**9


@lru_cache(1 << 16)
def lineage(path: str) -> tuple[str, ...]:
    """The modules that contain a module, the outermost first, and the module itself; nothing for the model."""
    parts = path.split(".") if path else []
    return tuple([".".join(parts[: i + 1]) for i in range(len(parts))])


class ModulePattern:
    """A pattern, read once. Matching takes time in proportion to the pattern's length and the square of the path's.

    Args:
        text: see above.

    Raises:
        PassError: *text* is not a pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps: list[Callable[[str, int], Iterable[int]]] = []
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise self._error()
            self._steps.append(self._step(token))
            position = token.end()

    @property
    def closeness(self) -> tuple[int, int]:
        """The sort key of patterns that name one module: the pattern with the largest key holds."""
        parts = [part for part in self.text.replace("[", ".[").split(".") if part]
        literal = [part for part in parts if not set(part) & set("*[]")]
        loosest = next((i for i, mark in enumerate(("**", "*", "["), start=1) if mark in self.text), 4)
        return loosest if self.text else 0, len(literal)

    def _step(self, token: re.Match[str]) -> Callable[[str, int], Iterable[int]]:
        """A function from a position in a path to the positions at which this part of the pattern may end."""
        if token["any"] == "**.":
            return _any_parents
        if token["any"]:
            return lambda path, start: range(start + 1, len(path) + 1)
        if token["one"]:
            return _one_name
        if token["range"] is None:
            text = token["text"]
            return lambda path, start: (start + len(text),) if path.startswith(text, start) else ()
        within = self._range(token["range"])
        return lambda path, start: _index(path, start, within)

    def _range(self, text: str) -> range:
        bounds = _RANGE.fullmatch(text)
        if bounds is None or not (bounds["first"] or bounds["colon"]):
            raise self._error()
        first = int(bounds["first"] or 0)
        found = range(first, int(bounds["end"] or _NO_END) if bounds["colon"] else first + 1)
        if not found:
            raise PassError(f"[{text}] in pattern {self.text!r} is empty", fix="write h[2:4] for h.2 and h.3")
        return found

    def _error(self) -> PassError:
        return PassError(
            f"{self.text!r} is not a pattern of modules",
            fix="write a path such as layer4, h[2:4] for h.2 and h.3, * for one name, ** for any number of them",
        )

    def covers(self, path: str) -> bool:
        """Whether the pattern names the module *path*, or a module that contains it."""
        return any(map(self.matches, ("", *lineage(path))))

    def matches(self, path: str) -> bool:
        """Whether the pattern names the module *path* itself, not only a module that contains it."""
        reached = {0}
        for step in self._steps:
            reached = {end for start in reached for end in step(path, start)}
        return len(path) in reached


def _one_name(path: str, start: int) -> Iterable[int]:
    """``*``: some characters up to the next dot."""
    dot = path.find(".", start)
    return range(start + 1, (len(path) if dot < 0 else dot) + 1)


def _any_parents(path: str, start: int) -> Iterable[int]:
    """``**.``: nothing, or any number of names with the dots behind them."""
    return [start, *[i + 1 for i in range(start + 1, len(path)) if path[i] == "."]]


def _index(path: str, start: int, within: range) -> Iterable[int]:
    """``[2:4]``: a whole name that is an index *within*, and the dot before it unless the path begins with it."""
    found = _INDEX.match(path, start)
    whole = found is not None and (found[0][0] == ".") is (start > 0)
    return (found.end(),) if found is not None and whole and int(found["index"][:10]) in within else ()
