"""Watching the threads of a step, so that none is waited for in vain.

While it waits for the threads, the caller looks now and then where each of them is: the line of its generated function
says which instruction it executes. Three things end a step::

    a thread has died                     nobody will finish its lanes
    a cycle of waits                      gpu:0 waits for what gpu:1 has not recorded yet, and gpu:1 for gpu:0
    nobody has moved since the deadline   whatever the reason: an operator that hangs, an event that got lost

A cycle is certain as soon as it is seen: threads only go forward, so where two looks find every thread at the same
line, they were there at the same time; and a thread that waits for an event whose record another has yet to reach
goes on only after that one does. An operator that takes long is no cycle.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Final, NamedTuple

from graphir.errors import RunError
from graphir.ir.plan import Plan
from graphir.ir.text import instruction_text

from ..codegen.handoffs import Handoffs
from ..codegen.writer import ThreadCode
from ..machine.stopwatch import Stopwatch
from .faults import UNUSABLE, reason_of

__all__ = ["Watch"]

_SHOWN: Final = 6
"""How many threads an error shows, so that it stays short."""


class _Wait(NamedTuple):
    """What a thread waits for: the position of the record in the plan, the thread that makes it, and its line there."""

    record: int
    giver: int
    line: int


class Watch:
    """Looks at the threads of one step.

    Args:
        plan: what they execute.
        handoffs: what they wait for.
        thread: which thread each lane of the plan belongs to.
        codes: the function of each.
        threads: the threads.
        deadline: after how many seconds without any thread's moving the step is given up; None: never. Those in which
            the process was suspended don't count.
        step: how many steps were done before.
    """

    def __init__(
        self,
        plan: Plan,
        handoffs: Handoffs,
        thread: Mapping[str, int],
        codes: Sequence[ThreadCode],
        threads: Sequence[threading.Thread],
        deadline: float | None,
        step: int,
    ) -> None:
        self.plan, self.taken, self.thread, self.codes, self.threads = plan, handoffs.taken, thread, codes, threads
        self.records = {handoff: record for record, given in handoffs.given.items() for handoff in given}
        self.deadline, self.step = deadline, step
        self.seen: dict[int, int] = {}
        self.still = Stopwatch(deadline)

    def look(self, unfinished: Sequence[int]) -> None:
        """Look where the *unfinished* threads are.

        Raises:
            RunError: they cannot go on, or none has moved since the deadline.
        """
        lines = self.lines(unfinished)
        cycle = self.cycle(lines)
        if cycle and lines == self.lines(unfinished):
            raise self.error("a deadlock: lanes wait for each other", "emit the plan again", lines, cycle)
        if lines != self.seen:
            self.seen = lines
            self.still.restart()
        elif self.still.look() >= (self.deadline or math.inf):
            raise self.error(
                f"no lane has moved for {self.deadline:g} s",
                "give a larger deadline, or None, if an operator may take that long",
                lines,
                unfinished,
            )

    def died(self, index: int, cause: BaseException) -> RunError:
        """The error for a thread that is no more."""
        lanes = ", ".join([lane for lane, thread in self.thread.items() if thread == index])
        return RunError(f"the thread of {lanes} has died: {reason_of(cause)}", where=self.where(), fix=UNUSABLE)

    def lines(self, threads: Sequence[int]) -> dict[int, int]:
        """The line of its function that each of these threads is at; without those that are in no line."""
        found = {}
        for index in threads:
            # A variable that holds all frames would be in a reference cycle with this function's own frame, and keep
            # alive what the other frames hold.
            frame = _frame_of(self.codes[index].code, sys._current_frames().get(self.threads[index].ident or 0))
            if frame is not None and frame.f_lineno is not None:
                found[index] = frame.f_lineno
        return found

    def position(self, index: int, line: int) -> int:
        """The instruction of a line; -1 where it has none."""
        return self.codes[index].instructions[line]

    def wait(self, index: int, line: int) -> _Wait | None:
        """What a thread waits for at a line, if that is what it does there."""
        handoff = self.taken.get(self.position(index, line))
        if handoff is None:
            return None
        record = self.records[handoff]
        giver = self.thread[self.plan.instructions[record].lane]
        return _Wait(record, giver, self.codes[giver].instructions.index(record))

    def cycle(self, lines: Mapping[int, int]) -> list[int]:
        """The threads of which each waits for what another of them has yet to record."""
        waits = {index: self.wait(index, line) for index, line in lines.items()}
        stuck = {index: wait for index, wait in waits.items() if wait is not None}
        while released := [i for i, wait in stuck.items() if wait.giver not in stuck or lines[wait.giver] > wait.line]:
            for index in released:
                del stuck[index]
        return list(stuck)

    def error(self, what: str, fix: str, lines: Mapping[int, int], threads: Sequence[int]) -> RunError:
        shown = [self.entry(index, lines) for index in threads[:_SHOWN]]
        shown += [f"and {len(threads) - _SHOWN} more"] if len(threads) > _SHOWN else []
        return RunError(what, at="\n       ".join(shown), where=self.where(), fix=f"{fix}; {UNUSABLE}")

    def entry(self, index: int, lines: Mapping[int, int]) -> str:
        """What a thread does, and whom it waits for."""
        position = self.position(index, lines[index]) if index in lines else -1
        if position < 0:
            return f"{self.threads[index].name}: at no instruction"
        text = f"{position} {instruction_text(self.plan, self.plan.instructions[position])}"
        wait = self.wait(index, lines[index])
        if wait is None:
            return text + _innermost(self.codes[index].code, sys._current_frames().get(self.threads[index].ident or 0))
        passed = wait.giver not in lines or lines[wait.giver] > wait.line
        return f"{text}, whose record ({wait.record}) {'was made' if passed else 'is still to come'}"

    def where(self) -> str:
        return f"plan {self.plan.name!r}, step {self.step}"


def _frame_of(code: CodeType, frame: FrameType | None) -> FrameType | None:
    """The frame that executes *code*, among *frame* and its callers."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _innermost(code: CodeType, frame: FrameType | None) -> str:
    """The Python function that a thread is in below its generated one."""
    if frame is None or frame.f_code is code:
        return ""
    return f", in {frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
