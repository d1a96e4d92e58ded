"""How executors execute lanes: who has which, and what it costs to call, to issue, and to wake one another.

One CUDA stream has a lane of its own, and one host thread issues them all. On the host a thread has all lanes of a
device, merged in issue order, copies and collectives in line; several threads call operators under Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..ir.plan import lane_device
from .issuing import Calls
from .topology import Topology

__all__ = ["INTERPRETER_SECONDS", "ONE_THREAD", "STREAMS", "THREADS", "Execution", "IssueSeconds", "streams_of"]


class IssueSeconds(NamedTuple):
    """What one host thread takes for each of the calls that issue a step, Python's own time in it; in the order of
    :class:`.Calls`.

    Attributes:
        kernel: to call an operator of torch's that launches a kernel.
        copy: to call an asynchronous copy; between two cards torch records and waits for events of its own.
        record: to put an event into a stream.
        wait: to let a stream wait for an event.
        switch: to make a stream current.
        view: to call an operator that makes a view.
        replay: to replay a CUDA graph.
    """

    kernel: float
    copy: float
    record: float
    wait: float
    switch: float
    view: float
    replay: float

    def of(self, calls: Calls) -> float:
        """The seconds of some calls."""
        return sum([seconds * count for seconds, count in zip(self, calls, strict=True)])


class Execution(NamedTuple):
    """How an executor executes the lanes of a plan.

    Attributes:
        executor: its name.
        worker: who executes a lane: a stream of its own, or a thread that has others too.
        wake: seconds that pass until a worker that sleeps goes on, after the event that it waits for.
        patience: seconds for which a worker that waits looks before it sleeps.
        issue: what one host thread takes to issue instructions to workers; None where workers are threads.
        graph: whether that thread replays what it can as one CUDA graph, and issues the updates behind it.
        lock: seconds that an operator takes longer at least where another thread calls operators too.
    """

    executor: str
    worker: Callable[[str], str]
    wake: float = 0.0
    patience: float = 0.0
    issue: IssueSeconds | None = None
    graph: bool = False
    lock: float = 0.0


def _one(lane: str) -> str:
    return ""


INTERPRETER_SECONDS: Final = 5e-6
"""What an operator takes longer where another thread calls operators too. ``python tests/bench lock`` measures 2 to
6 µs, and 20 µs where both threads want the lock at the same moments."""

_WAKE_SECONDS: Final = 30e-6
"""What it takes to wake a thread that waits for an event."""

_PATIENCE: Final = 30e-6
"""How long such a thread looks first."""

_ISSUE_SECONDS: Final = IssueSeconds(
    kernel=5e-6, copy=8e-6, record=1.5e-6, wait=1.5e-6, switch=1e-6, view=0.5e-6, replay=20e-6
)
"""For a fast host and short kernels, where the topology does not say (:func:`streams_of`). A profile of a card has the
seconds of its operators, which go before these; slower hosts take several times as long."""

ONE_THREAD: Final = Execution("serial", _one)
"""All lanes in the calling thread."""

THREADS: Final = Execution("threads", lane_device, _WAKE_SECONDS, _PATIENCE, lock=INTERPRETER_SECONDS)
"""A thread for each device."""

STREAMS: Final = Execution("cuda", str, issue=_ISSUE_SECONDS)
"""A CUDA stream for each lane."""


def streams_of(topology: Topology) -> Execution:
    """A CUDA stream for each lane, issued to by this machine's host: where its seconds to issue a kernel are known, all
    calls take as many times longer, or shorter, as kernels do."""
    if topology.seconds_to_issue is None:
        return STREAMS
    factor = topology.seconds_to_issue / _ISSUE_SECONDS.kernel
    return STREAMS._replace(issue=IssueSeconds(*[factor * seconds for seconds in _ISSUE_SECONDS]))
