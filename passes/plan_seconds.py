"""The seconds that the plans of one step take, for one order of its operators after the other.

Workers execute what is issued to them in that order, each instruction as early as it can. That is what
:func:`graphir.overlap` predicts of a plan, without the instructions: whoever needs what another worker makes goes on
when that is done, and what earlier waits imply changes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphir.ir.operator import Operator
from graphir.ir.plan import issued_as, issued_on, lane, lane_device, parts_of

from .list_schedule import ROUNDING
from .micro_work import Work

__all__ = ["Clock", "PlanSeconds"]


class PlanSeconds:
    """What the operators of a step wait for, whatever their order.

    A *part* is one instruction of an operator; only a collective has several. Parts are numbers.

    Args:
        work: of the step.
        by_lane: whether each lane has a worker, as CUDA streams are; a device has one for all of its lanes otherwise.

    Attributes:
        seconds: of each operator.
        parts: of each operator, (part, worker).
        after: of each operator, the parts of other workers that it comes after.
        owner: of each storage that several lanes touch, the worker that frees it; ``users``: the parts that touch it.
        loads: by worker, the seconds of its operators.
        count: of parts.
    """

    def __init__(self, work: Work, *, by_lane: bool) -> None:
        net, found = work.program.step, work.hazards
        ops, blobs, numbers = net.ops, net.blobs, dict[str, int]()
        workers: dict[int, int] = {}  # of lanes

        def worker(name: str) -> int:
            return numbers.setdefault(name if by_lane else lane_device(name), len(numbers))

        self.seconds = work.seconds
        self.parts: list[list[tuple[int, int]]] = []
        self.count = 0
        for op, at in zip(ops, work.lane, strict=True):
            if issued_as(op) == "collective":
                on = [worker(issued_on(op, blobs, n)) for n in range(parts_of(op))]
            else:
                if at not in workers:
                    workers[at] = worker(issued_on(op, blobs))
                on = [workers[at]]
            self.parts.append([(self.count + n, each) for n, each in enumerate(on)])
            self.count += len(on)
        self.after = [self._before(i, earlier, ops) for i, earlier in enumerate(found.earlier)]
        self.owner = {name: worker(lane(blobs[name].device, "compute")) for name in found.shared}
        self.users: dict[str, list[int]] = {name: [] for name in found.shared}
        for touched, parts in zip(found.touched, self.parts, strict=True):
            for name in touched:
                if name in self.users:
                    self.users[name] += [part for part, _ in parts]
        self.loads = [0.0] * len(numbers)
        for spent, parts in zip(self.seconds, self.parts, strict=True):
            for _, each in parts:
                self.loads[each] += spent

    def _before(self, i: int, earlier: Sequence[int], ops: Sequence[Operator]) -> list[int]:
        """The parts that an operator comes after, but for those of its own worker."""
        mine, read, found = {worker for _, worker in self.parts[i]}, ops[i].inputs, []
        only = mine.pop() if len(mine) == 1 else -1
        for other in earlier:
            parts = self.parts[other]
            if len(parts) > 1 and (made := [n for n, name in enumerate(ops[other].outputs) if name in read]):
                parts = [parts[n] for n in made]
            for part, worker in parts:
                if worker != only:
                    found.append(part)
        return found


class Clock:
    """When what is issued is executed, for one order.

    Attributes:
        free: by worker, when it is done with what was issued to it.
        ends: of each part, when whoever waits for it goes on.
        due: by worker, until when it has to begin what is issued to it next for the step to take no longer than *most*
            seconds: all else comes behind it.
        beaten: whether the step takes longer.
    """

    def __init__(self, of: PlanSeconds, most: float) -> None:
        self.of, self.free, self.ends = of, [0.0] * len(of.loads), [0.0] * of.count
        self.due, self.beaten = [ROUNDING * most - load for load in of.loads], False

    @property
    def seconds(self) -> float:
        """Of the step, when all is issued."""
        return max(self.free)

    def issue(self, group: Sequence[int], replaced: Sequence[str] = ()) -> None:
        """Operators are executed that belong together: their workers wait first for all that any of them needs, and
        whoever needs one of them waits for all.

        Args:
            group: their positions.
            replaced: the storages that were in the receive buffers before into which copies of the group go.
        """
        of, free, ends, due = self.of, self.free, self.ends, self.due
        for i in group:
            if after := of.after[i]:
                last = max([ends[part] for part in after])
                for _, worker in of.parts[i]:
                    if last > free[worker]:
                        free[worker] = last
        for storage in replaced:
            self.wait(of.parts[group[0]][0][1], storage)
        for i in group:
            spent = of.seconds[i]
            for part, worker in of.parts[i]:
                start = free[worker]
                if start > due[worker]:
                    self.beaten = True
                due[worker] += spent
                ends[part] = free[worker] = start + spent
        if len(group) > 1:
            for i in group:
                for part, worker in of.parts[i]:
                    ends[part] = free[worker]

    def drop(self, storage: str) -> None:
        """A storage is freed once every worker is done with it."""
        if storage in self.of.owner:
            self.wait(self.of.owner[storage], storage)

    def wait(self, worker: int, storage: str) -> None:
        """A worker waits until all others are done with a storage."""
        last = max([self.ends[part] for part in self.of.users.get(storage, ())], default=0.0)
        if last > self.free[worker]:
            self.free[worker] = last
