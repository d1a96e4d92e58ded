"""The order in which a plan issues operators and frees: any that respects the hazards, chosen so that lanes overlap.

Operators keep their program order, except that

* a transfer (a copy or a collective) is issued as soon as its operands are there. A copy is issued no earlier than
  :data:`_AHEAD` operators of its destination before its place in the program, since it takes memory there;
* in a program that reduces gradients, what follows from a reduction is issued as soon as it can be: an update once its
  gradient is reduced and every reader of the parameter is issued, not after the whole backward. Reductions of small
  gradients are gathered until they come to :data:`_BUCKET` bytes;
* a storage is freed after its last use.

Of the last two, what would have to wait for a transfer that is only just issued gives it time: it is issued when the
transfer's lane has gone on to another point of the program, or when its own device waits for a transfer anyway::

    gpu:0.compute:  run w2_grad            run w1_grad             run update w2   free w2_grad
    gpu:0.copy_in:              reduce w2_grad         reduce w1_grad

Small transfers from the same devices to the same lanes that are ready at the same point, or gathered, make one group:
one wait before them, one record after them. All takes time linear in the operands of all operators.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.plan import issued_as, issued_on, parts_of
from graphir.ir.size import Dims

__all__ = ["Issue", "hazards", "issue_order"]

Issue: TypeAlias = "tuple[int, ...] | str"
"""An operator by position, several transfers that belong together, or a storage that is freed."""

_AHEAD: Final = 8
_SMALL: Final = 1 << 16
"""Bytes: a transfer of less takes no longer than the waits around it."""

_BUCKET: Final = 4 << 20
"""Bytes: for so many gradients replicas wait for each other once.

Between DistributedDataParallel's first bucket and its others (1 and 25 MiB). On the host a lane that waits does nothing
else, so that overlap gains nothing and each wait costs what the replicas' times differ by.
"""


def issue_order(net: Net, dims: Dims) -> list[Issue]:
    """The order in which to issue a net's operators, and the frees between them.

    Args:
        net: the step of a placed program.
        dims: the sizes that say which transfers are small.
    """
    return _Order(net, dims).run()


def hazards(net: Net) -> list[list[int]]:
    """For each operator, the earlier ones that it has to come after.

    They are the last writer of each storage that it reads or writes, the maker of each view that it reads, and, for
    each storage that it writes, everyone who read it since its last write.
    """
    storage = {name: blob.storage for name, blob in net.blobs.items()}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    views: dict[tuple[str, int], int] = {}
    found = []
    for i, op in enumerate(net.ops):
        earlier: dict[int, None] = {}
        for name, version in op.reads:
            if (at := storage[name]) in writer:
                earlier[writer[at]] = None
            if (name, version) in views:
                earlier[views[name, version]] = None
            readers.setdefault(at, []).append(i)
        viewing = op.effects.viewing
        for position, made in enumerate(op.makes):
            at = storage[made[0]]
            if position in viewing:
                views[made] = i
                continue
            if at in writer:
                earlier[writer[at]] = None
            earlier.update(dict.fromkeys(readers.get(at, ())))
            writer[at], readers[at] = i, []
        earlier.pop(i, None)
        found.append(list(earlier))
    return found


class _Order:
    """Issues the tasks of a step: its operators, numbered as in the net, and then the frees of storages.

    A *point* is one operator that is issued in program order, with all that becomes ready by it.

    Attributes:
        followers: the tasks that come after each task.
        missing: how many that come before it are not issued yet.
        transfers, ready, frees: what is issued next.
        ahead: copies that are ready too early, by destination and the number of its operators to wait for.
        gathered: small reductions that are ready, and their bytes, by route.
        point: the number of the current point.
        moved: for each lane, the last point at which it was given a transfer.
        given: for each task, the lanes of the transfers that it follows, and their points.
        held: for each task that gives transfers time, how many lanes have still to go on.
        held_by, held_on: those tasks, by lane and by their own device.
    """

    def __init__(self, net: Net, dims: Dims) -> None:
        self.net, self.dims, ops = net, dims, net.ops
        earlier = hazards(net)
        self.freed = _freed(net)
        self.followers: list[list[int]] = [[] for _ in ops]
        self.missing = [len(found) for found in earlier] + [0] * len(self.freed)
        for i, found in enumerate(earlier):
            for other in found:
                self.followers[other].append(i)
        number = {storage: len(ops) + k for k, storage in enumerate(self.freed)}
        for i, op in enumerate(ops):
            for task in dict.fromkeys([number.get(net.blobs[name].storage) for name in (*op.inputs, *op.outputs)]):
                if task is not None:
                    self.followers[i].append(task)
                    self.missing[task] += 1
        self.kinds = [issued_as(op) for op in ops]
        self.soon = _follow_reductions(ops, earlier)
        self.places = self._places()
        self.passed: dict[Device, int] = defaultdict(int)
        self.ahead: dict[tuple[Device, int], list[int]] = {}
        self.gathered: dict[tuple[str, ...], tuple[list[int], int]] = {}
        self.out: list[Issue] = []
        self.issued = [False] * len(self.missing)
        self.transfers: list[int] = []
        self.ready: list[int] = []
        self.frees: deque[int] = deque()
        self.point = 0
        self.moved: dict[str, int] = {}
        self.given: dict[int, list[tuple[str, int]]] = {}
        self.held: dict[int, int] = {}
        self.held_by: dict[str, list[int]] = {}
        self.held_on: dict[Device, list[int]] = {}

    def _places(self) -> dict[int, int]:
        """For each copy, how many operators of its destination stand before it in the program."""
        before: dict[Device, int] = defaultdict(int)
        found = {}
        for i, op in enumerate(self.net.ops):
            if self.kinds[i] == "copy":
                found[i] = before[op.device]
            elif self.kinds[i] == "run" and not self.soon[i]:
                before[op.device] += 1
        return found

    def run(self) -> list[Issue]:
        for task, missing in enumerate(self.missing):
            if not missing:
                self.becomes_ready(task)
        self.settle()
        for i, op in enumerate(self.net.ops):
            if self.soon[i]:
                continue
            self.point += 1
            if self.missing[i]:  # on what is still held
                self.release()
            if self.issued[i]:
                continue
            if i in self.given:
                self.let_go(self.held_on.pop(op.device, ()))
                self.settle()
            self.issue((i,))
            self.passed[op.device] += 1
            self.transfers += self.ahead.pop((op.device, self.passed[op.device]), ())
            self.settle()
        while self.held or self.gathered:
            self.release()
        return self.out

    def release(self) -> None:
        """Issue all that is held or gathered."""
        for gathered, _ in self.gathered.values():
            self.transfers += gathered
        self.gathered.clear()
        self.let_go(list(self.held))
        self.settle()

    def settle(self) -> None:
        """Issue all that is ready: frees, then transfers, then what follows from those, by device."""
        while self.frees or self.transfers or self.ready:
            if self.frees:
                self.issue((self.frees.popleft(),))
            elif self.transfers:
                ready, self.transfers = self.transfers, []
                for group in self.grouped(ready):
                    self.issue(group)
            else:
                ready, self.ready = sorted(self.ready, key=self.turn), []
                for i in ready:
                    self.issue((i,))

    def grouped(self, transfers: Sequence[int]) -> Iterator[tuple[int, ...]]:
        groups: dict[object, list[int]] = {}
        for i in transfers:
            together = self.nbytes(i) < (_BUCKET if self.gathers(i) else _SMALL)
            groups.setdefault(self.route(i) if together else i, []).append(i)
        return map(tuple, groups.values())

    def gathers(self, i: int) -> bool:
        """Whether a transfer is a reduction of gradients."""
        return self.soon[i] and self.kinds[i] == "collective"

    def nbytes(self, i: int) -> int:
        """How much a transfer brings to each destination from each source."""
        return self.net.blobs[self.net.ops[i].inputs[0]].nbytes(self.dims)

    def route(self, i: int) -> tuple[str, ...]:
        """From which devices to which lanes a transfer goes."""
        return (*[self.net.blobs[name].device for name in self.net.ops[i].inputs], *self.lanes(i))

    def lanes(self, i: int) -> list[str]:
        """The lanes that execute a transfer."""
        op, blobs = self.net.ops[i], self.net.blobs
        return list(dict.fromkeys([issued_on(op, blobs, part) for part in range(parts_of(op))]))

    def issue(self, tasks: tuple[int, ...]) -> None:
        count = len(self.kinds)
        self.out.append(tasks if tasks[0] < count else self.freed[tasks[0] - count])
        for task in tasks:
            self.issued[task] = True
            if task >= count:
                continue
            if self.kinds[task] != "run":
                self.moves(task)
            for follower in self.followers[task]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self.becomes_ready(follower)

    def moves(self, i: int) -> None:
        """A transfer's lanes have gone on; what follows it may have to give it time."""
        lanes, outputs = self.lanes(i), self.net.ops[i].outputs
        for at in lanes:
            if self.moved.get(at) != self.point:
                self.moved[at] = self.point
                for task in self.held_by.pop(at, ()):
                    if task in self.held:
                        self.held[task] -= 1
                        if not self.held[task]:
                            self.let_go([task])
        for task in self.followers[i]:
            if task < len(self.kinds) or self.freed[task - len(self.kinds)] not in outputs:
                self.given.setdefault(task, []).extend([(at, self.point) for at in lanes])

    def becomes_ready(self, task: int) -> None:
        if task < len(self.kinds):
            if self.kinds[task] != "run":
                self.transfer(task)
                return
            if not self.soon[task]:
                return
        lanes = {at for at, point in self.given.get(task, ()) if self.moved[at] == point}
        if not lanes:
            (self.ready if task < len(self.kinds) else self.frees).append(task)
            return
        self.held[task] = len(lanes)
        for at in lanes:
            self.held_by.setdefault(at, []).append(task)
        self.held_on.setdefault(self.device(task), []).append(task)

    def transfer(self, i: int) -> None:
        """A transfer is ready."""
        wanted, device = self.places.get(i, 0) - _AHEAD, self.net.ops[i].device
        if self.gathers(i):
            gathered, nbytes = self.gathered.pop(route := self.route(i), ([], 0))
            gathered.append(i)
            nbytes += self.nbytes(i)
            if nbytes < _BUCKET:
                self.gathered[route] = gathered, nbytes
            else:
                self.transfers += gathered
        elif self.soon[i] or wanted <= self.passed[device]:
            self.transfers.append(i)
        else:
            self.ahead.setdefault((device, wanted), []).append(i)

    def turn(self, task: int) -> tuple[bool, Device]:
        """Operators before frees, those of a device side by side."""
        return task >= len(self.kinds), self.device(task)

    def device(self, task: int) -> Device:
        count = len(self.kinds)
        return self.net.ops[task].device if task < count else self.net.blobs[self.freed[task - count]].device

    def let_go(self, tasks: Sequence[int]) -> None:
        self.ready.extend([task for task in tasks if self.held.pop(task, None) is not None])


def _follow_reductions(ops: Sequence[Operator], earlier: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each operator is a reduction or what follows from one."""
    found: list[bool] = []
    for op, before in zip(ops, earlier, strict=True):
        found.append(op.phase == "reduce" or (op.phase == "update" and any(found[i] for i in before)))
    return found


def _freed(net: Net) -> list[str]:
    """The storages that nobody needs after the step. State and outputs are needed; the host keeps what it feeds."""
    blobs = net.blobs
    kept = {blobs[name].storage for name in net.external_outputs}
    kept.update(name for name, blob in blobs.items() if blob.role in STATE_ROLES)
    kept.update(name for name in net.external_inputs if blobs[name].device.kind == "cpu")
    used = dict.fromkeys([blobs[name].storage for op in net.ops for name in (*op.inputs, *op.outputs)])
    return [storage for storage in used if storage not in kept]
