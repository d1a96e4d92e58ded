"""How executors execute lanes: who has which, and what it costs to call, to issue, and to wake one another.

One CUDA stream has a lane of its own, and one host thread issues them all. On the host a thread has all lanes of a
device, merged in issue order, copies and collectives in line; several threads call operators under Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..ir.operator import Operator
from ..ir.plan import lane_device

__all__ = ["INTERPRETER_SECONDS", "ONE_THREAD", "STREAMS", "THREADS", "Execution"]


class Execution(NamedTuple):
    """How an executor executes the lanes of a plan.

    Attributes:
        executor: its name.
        worker: who executes a lane: a stream of its own, or a thread that has others too.
        wake: seconds that pass until a worker that sleeps goes on, after the event that it waits for.
        patience: seconds for which a worker that waits looks before it sleeps.
        issue: seconds that one host thread takes to issue an instruction to its worker; 0 where workers are threads.
        lock: seconds that an operator takes longer at least where another thread calls operators too.
    """

    executor: str
    worker: Callable[[str], str]
    wake: float = 0.0
    patience: float = 0.0
    issue: float = 0.0
    lock: Callable[[Operator], float] | None = None


def _one(lane: str) -> str:
    return ""


def _locked(op: Operator) -> float:
    return INTERPRETER_SECONDS


INTERPRETER_SECONDS: Final = 5e-6
"""What an operator takes longer where another thread calls operators too. ``python tests/bench lock`` measures 2 to
6 µs, and 20 µs where both threads want the lock at the same moments."""

_WAKE_SECONDS: Final = 30e-6
"""What it takes to wake a thread that waits for an event."""

_PATIENCE: Final = 30e-6
"""How long such a thread looks first."""

_ISSUE_SECONDS: Final = 5e-6
"""What generated Python takes to issue a kernel to a stream."""

ONE_THREAD: Final = Execution("serial", _one)
"""All lanes in the calling thread."""

THREADS: Final = Execution("threads", lane_device, _WAKE_SECONDS, _PATIENCE, lock=_locked)
"""A thread for each device."""

STREAMS: Final = Execution("cuda", str, issue=_ISSUE_SECONDS)
"""A CUDA stream for each lane."""
