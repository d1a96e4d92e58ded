"""What a step must not do behind the dispatcher"s back, and the line that does it.

Python tells nobody that an attribute was set or a random number drawn: such a change is found at the end, long after
the line that made it. The step is then run once more, and looked at after each line of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from ..words.places import Broken, Conditions
from .scopes import Scopes
from .source_lines import SourceLines, traced_by

__all__ = ["Watch"]


class Watch:
    """Looks for the line after which a condition does not hold any more.

    Attributes:
        line: that line, as in ``Operator.source``; empty until it is found.
        scope: path of the module that ran then.
        code: that the line is of.
    """

    def __init__(self, condition: str) -> None:
        self.line = self.scope = ""
        self.code: CodeType | None = None
        self._condition, self._found = condition, False

    @contextlib.contextmanager
    def follow(self, conditions: Conditions, lines: SourceLines, scopes: Scopes) -> Iterator[None]:
        """Look after each line of users' code that runs."""
        check = conditions[self._condition]
        last = ("", "")

        def look() -> None:
            if not self._found:
                try:
                    check()
                except Broken:
                    self._found = True
                    self.line, self.scope = last
                    self.code = lines.code_of(self.line)

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if not lines.is_users(frame):
                return None
            look()
            if event in ("line", "return"):
                last = lines.of_frame(frame if event == "line" else frame.f_back), scopes.current
            return trace

        with traced_by(trace):
            yield
