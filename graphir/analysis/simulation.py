"""When tasks are executed that share workers and links.

A task is anything that takes time: an operator, a copy, a part of a collective. Tasks stand in issue order, and each
worker (a stream, a thread) executes its own in that order, each as early as it can: after its worker's task before,
after the tasks that it waits for, and, if it is a copy, after the copies that were issued before it on the same
directed link, which queue. That is a longest-path sweep, one visit a task, and what a search evaluates plans with::

    times = simulate(Tasks(workers=[0, 1, 1], seconds=[2e-3, 1e-3, 4e-3], after=[(), (0,), ()], links=[(), (0,), ()]))
    times.seconds                                    # of the step

Workers and links are numbers from 0, tasks their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ISSUED", "NOTHING", "WORKER", "Sharing", "Tasks", "Times", "shared", "simulate"]

NOTHING: Final = -1
"""The cause of a task that starts with the step."""

WORKER: Final = -2
"""The cause of a task that starts when its worker is free."""

ISSUED: Final = -3
"""The cause of a task that starts when the host has issued it."""


class Tasks(NamedTuple):
    """What is executed, in issue order.

    Attributes:
        workers: who executes each task.
        seconds: what each takes.
        after: the earlier tasks that each waits for.
        links: the directed links that each has to itself while it runs; empty for all but what moves bytes.
    """

    workers: Sequence[int]
    seconds: Sequence[float]
    after: Sequence[Sequence[int]]
    links: Sequence[Sequence[int]]


class Times(NamedTuple):
    """Seconds since a step began, by task.

    Attributes:
        free: when the task's worker was done with the task before.
        starts: when the task began.
        ends: when it was done.
        causes: what it began after: an earlier task that it waited for or that had its link, or :data:`NOTHING`,
            :data:`WORKER` or :data:`ISSUED`.
    """

    free: Sequence[float]
    starts: Sequence[float]
    ends: Sequence[float]
    causes: Sequence[int]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return max(self.ends, default=0.0)


def simulate(tasks: Tasks, wake: float = 0.0, patience: float = 0.0, issue: Sequence[float] = ()) -> Times:
    """When each task is executed.

    Args:
        tasks: in issue order.
        wake: seconds that pass until a worker that sleeps for another one's task goes on.
        patience: seconds for which a worker waits without going to sleep.
        issue: seconds that one host thread needs to issue each task, one after the other; none where nobody issues
            tasks. A worker cannot start a task before it is issued.
    """
    workers = tasks.workers
    worker_free = [0.0] * (max(workers, default=-1) + 1)
    link_free: dict[int, tuple[float, int]] = {}
    free, starts, ends = ([0.0] * len(workers) for _ in range(3))
    causes = [NOTHING] * len(workers)
    issued = 0.0
    for position, (worker, seconds, others, crossed) in enumerate(zip(*tasks, strict=True)):
        begun = start = worker_free[worker]
        cause = WORKER if start else NOTHING
        for other in others:
            end = ends[other]
            if end - begun > patience and workers[other] != worker:
                end += wake
            if end > start:
                start, cause = end, other
        for link in crossed:
            if link in link_free and link_free[link][0] > start:
                start, cause = link_free[link]
        if issue:
            issued += issue[position]
            if seconds and issued > start:
                start, cause = issued, ISSUED
        end = start + seconds
        for link in crossed:
            link_free[link] = end, position
        worker_free[worker] = end
        free[position] = begun
        starts[position] = start
        ends[position] = end
        causes[position] = cause
    return Times(free, starts, ends, causes)


class Sharing(NamedTuple):
    """What workers that are threads of one host take from each other while they compute at the same time.

    Attributes:
        cores: how many can compute at once; each of more has its share of them.
        slowdown: how many times as long each task takes beside another: caches and memory are shared.
        lock: seconds that each task takes longer beside others at least, as for the interpreter's lock: what was
            measured beside another has it in it.
    """

    cores: int
    slowdown: Sequence[float]
    lock: Sequence[float]


def shared(tasks: Tasks, times: Times, sharing: Sharing) -> list[float]:
    """What tasks take where they share a host, from *times* of tasks that do not.

    What overlaps without sharing is taken to overlap with it too, for the same part of each task; so one more sweep
    with these seconds is the prediction.
    """
    seconds = np.asarray(tasks.seconds, np.float64)
    starts, ends = np.asarray(times.starts, np.float64), np.asarray(times.ends, np.float64)
    workers = np.asarray(tasks.workers, np.int64)
    beside = np.zeros(len(seconds))
    busy = seconds > 0
    for worker in range(int(workers.max(initial=-1)) + 1):
        own = busy & (workers == worker)
        others = busy & (workers != worker)
        if own.any():
            beside[others] += _overlap(starts[own], ends[own], starts[others], ends[others])
    beside[busy] /= seconds[busy]
    part = np.minimum(beside, 1.0)
    crowded = np.maximum((1.0 + beside) / sharing.cores, 1.0)
    spent = seconds * crowded
    longer = spent + part * np.maximum(spent * (np.asarray(sharing.slowdown) - 1.0), np.asarray(sharing.lock))
    found: list[float] = np.where(busy, longer, 0.0).tolist()
    return found


def _overlap(
    starts: NDArray[np.float64], ends: NDArray[np.float64], begins: NDArray[np.float64], until: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How long one worker's tasks, which follow each other, run between each *begins* and *until*."""
    done = np.concatenate([[0.0], (ends - starts).cumsum()])

    def busy(at: NDArray[np.float64]) -> NDArray[np.float64]:
        last = starts.searchsorted(at, "right")
        since: NDArray[np.float64] = done[last] - np.maximum(ends[np.maximum(last - 1, 0)] - at, 0.0) * (last > 0)
        return since

    return busy(until) - busy(begins)
