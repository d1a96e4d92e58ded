"""Whether a step draws from Python's or numpy's random numbers, told apart from other threads that do.

All threads have one random state. That it has changed says that somebody drew. So the step is run once more and looked
at after each instruction of users' code. Where another thread drew, this one has waited for it: at an operator of
torch's, for a lock or the clock, or because Python changed threads. What changes then is not counted, nor what changes
in one run alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from ..isolate.python_random import changed_from, random_states
from .scopes import Scopes
from .source_lines import SourceLines, traced_by

__all__ = ["RUNS", "Draw", "Draws"]

RUNS: Final = 3
"""How often the step is run; an instruction draws that did in two of them."""
_WAITED_SECONDS: Final = 2e-4
_GENERATED: Final = ("graphir.", "namedtuple_")
"""How the names of modules begin whose code is in no file but graphir's own: Python makes it for types."""


class Draw(NamedTuple):
    """Where a step draws.

    Attributes:
        module: whose random state it changes.
        line: of the source, as in ``Operator.source``.
        scope: path of the module that runs.
        code: that the line is of.
    """

    module: str
    line: str
    scope: str
    code: CodeType | None


class Draws:
    """Looks for instructions that change a random state.

    Attributes:
        found: by the code and the instruction in it, in the order in which they ran.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[CodeType, int], Draw] = {}

    @contextlib.contextmanager
    def follow(self, lines: SourceLines, scopes: Scopes, operators: Callable[[], int | None]) -> Iterator[None]:
        """Look after each instruction of users' code that runs.

        Args:
            lines: say which code is users'.
            scopes: which module runs.
            operators: how many operators have run; None while one does.
        """
        states = random_states()
        before_it: int | None = None
        waited = 0.0
        last: tuple[tuple[CodeType, int], str] | None = None

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal states, before_it, waited, last
            made_for = str(frame.f_globals.get("__name__", ""))
            if operators() is None or made_for.startswith(_GENERATED) or not lines.is_users(frame):
                return None
            frame.f_trace_opcodes = True
            changed = changed_from(states)
            alone = operators() == before_it and _waited() - waited < _WAITED_SECONDS
            if changed is not None and last is not None and alone:
                self.found.setdefault(last[0], Draw(changed, last[1], scopes.current, lines.code_of(last[1])))
            if event == "opcode":
                last = (frame.f_code, frame.f_lasti), lines.of_frame(frame)
            before_it, waited = operators(), _waited()
            states = random_states()  # last, so that little else comes between this and the instruction
            return trace

        with traced_by(trace):
            yield


def _waited() -> float:
    """Seconds since some point in time in which this thread did not run."""
    return time.perf_counter() - time.thread_time()
