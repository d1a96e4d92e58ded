"""How long a step takes whose micro-batches flow: each device takes the best task that is ready, as
:func:`..pipeline.pipeline` will order the operators.

What other devices wait for goes first, then forwards, then gradients of parameters; of these the earliest micro-batch.
Bytes are not counted here: where they hold micro-batches back, plans say so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Final, Protocol

from ..list_schedule import RANKS
from .problem import Problem

__all__ = ["Flow", "Transfer"]

_RANKS: Final = RANKS["zero_bubble"]


class Transfer(Protocol):
    """A copy: where to, its seconds, what it comes after (a task, or -1, or another copy), and when it has ended."""

    destination: int
    seconds: float
    end: float

    @property
    def after(self) -> Transfer | int: ...


class Flow:
    """The tasks of a problem as a list schedule sees them.

    Attributes:
        keys: by task, the least is taken first.
        later: by task, those that read what it makes.
        earlier: by task, how many tasks it reads from.
    """

    def __init__(self, problem: Problem) -> None:
        size, tasks = len(problem.tasks), problem.tasks
        self.problem = problem
        self.keys = [(_RANKS[task.kind] * (problem.parts + 1) + task.part) * size + i for i, task in enumerate(tasks)]
        found = [set[int]() for _ in tasks]
        for value in problem.values:
            if value.made >= 0:
                for read in value.reads:
                    if read > value.made:
                        found[read].add(value.made)
        self.later: list[list[int]] = [[] for _ in tasks]
        for read, makers in enumerate(found):
            for made in makers:
                self.later[made].append(read)
        self.earlier = list(map(len, found))

    def timed(
        self,
        at: Sequence[int],
        copies: Mapping[int, Sequence[Transfer]],
        needed: Mapping[int, Sequence[Transfer]],
        again: Mapping[int, float],
    ) -> tuple[float, tuple[float, ...]]:
        """The seconds of the step where issuing takes none, and by device those for which it computes.

        Args:
            at: by task, its device.
            copies: by the task before which they would stand in program order.
            needed: by task, the copies that it waits for.
            again: by task, the seconds that are computed again before it.
        """
        tasks, devices = self.problem.tasks, len(self.problem.devices)
        missing = [number + len(needed.get(i, ())) for i, number in enumerate(self.earlier)]
        behind: dict[int, list[Transfer]] = defaultdict(list)
        follow: dict[int, list[Transfer]] = defaultdict(list)
        readers: dict[int, list[int]] = defaultdict(list)
        for i, waited in needed.items():
            for copy in waited:
                readers[id(copy)].append(i)
        events: list[tuple[float, int, int]] = []
        sent: list[Transfer] = []
        arriving, busy, idle = [0.0] * devices, [0.0] * devices, [True] * devices
        ready: list[list[tuple[int, int]]] = [[] for _ in range(devices)]

        def send(copy: Transfer, now: float) -> None:
            copy.end = arriving[copy.destination] = max(arriving[copy.destination], now) + copy.seconds
            heappush(events, (copy.end, 1, len(sent)))
            sent.append(copy)

        for row in copies.values():
            for copy in row:
                if isinstance(copy.after, int):
                    behind[copy.after].append(copy)
                else:
                    follow[id(copy.after)].append(copy)
        for copy in behind.pop(-1, ()):
            send(copy, 0.0)
        for i, number in enumerate(missing):
            if not number:
                heappush(ready[at[i]], (self.keys[i], i))
        now = 0.0
        while True:
            for device in range(devices):
                if idle[device] and ready[device]:
                    _, i = heappop(ready[device])
                    spent = tasks[i].seconds[device] + again.get(i, 0.0)
                    busy[device] += spent
                    idle[device] = False
                    heappush(events, (now + spent, 0, i))
            if not events:
                return now, tuple(busy)
            now, is_copy, number = heappop(events)
            if is_copy:
                copy = sent[number]
                for other in follow.get(id(copy), ()):
                    send(other, now)
                done = readers.get(id(copy), ())
            else:
                idle[at[number]] = True
                for copy in behind.get(number, ()):
                    send(copy, now)
                done = self.later[number]
            for i in done:
                missing[i] -= 1
                if not missing[i]:
                    heappush(ready[at[i]], (self.keys[i], i))
