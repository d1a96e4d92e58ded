"""The order in which a plan issues operators and frees: any that respects the hazards, chosen so that lanes overlap.

Operators keep their program order, except that

* a transfer (a copy or a collective) is issued as soon as its operands are there. A copy takes memory at its
  destination, so it is issued no earlier than some operators of the destination before its first reader (*ahead*), or,
  where it stands further ahead than that in the program, at its place. A small copy counts as standing directly before
  its first reader, and is gathered with others until the destination comes near the first of these. A copy whose
  ``issue`` is ``placed`` counts as large: all that is parked would come back at once otherwise. One whose ``issue`` is
  ``due`` is issued at its place, however far *ahead* others are, and what such copies brought is freed before if it has
  left again: state that is parked comes and goes, and this is how little of it is there at a time;
* in a program that reduces gradients, what follows from a reduction is issued as soon as it can be: an update once its
  gradient is reduced and every reader of the parameter is issued, not after the whole backward. Reductions of small
  gradients are gathered until they come to :data:`BUCKET` bytes;
* a storage is freed after its last use.

Updates and frees that depend on a just-issued transfer are delayed: until the transfer's lane has been given another
one at a later point of the program, or until their own device waits for a transfer anyway; what a ``placed`` copy takes
away is freed so many operators later as copies are ahead::

    gpu:0.compute:  run w2_grad            run w1_grad             run update w2   free w2_grad
    gpu:0.copy_in:              reduce w2_grad         reduce w1_grad

Small transfers from the same devices to the same lanes that are ready at the same point, or gathered, make one group:
one wait before them, one record after them. All takes time linear in the operands of all operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, TypeAlias

from graphir.analysis.hazards import Hazards, outliving
from graphir.analysis.instructions import Issue
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.plan import issued_as, issued_on, parts_of
from graphir.ir.size import Dims

__all__ = ["AHEAD", "BUCKET", "SMALL", "Tasks", "issue_order"]

_Task: TypeAlias = "int | str"
"""An operator by position, or the free of a storage."""

AHEAD: Final = 8
"""Operators of its destination before its first reader at which a copy is issued, unless somebody says otherwise."""

SMALL: Final = 1 << 16
"""Bytes: a transfer of less takes no longer than the waits around it."""

BUCKET: Final = 4 << 20
"""Bytes of gradients that are gathered before replicas wait for each other.

Between DistributedDataParallel's first bucket and its others (1 and 25 MiB). On the host a lane that waits does nothing
else, so that overlap gains nothing and each wait costs what the replicas' times differ by.
"""


def issue_order(net: Net, dims: Dims, found: Hazards, ahead: int = AHEAD) -> list[Issue]:
    """The order in which to issue a net's operators, and the frees between them.

    Args:
        net: the step of a placed program.
        dims: the sizes that say which transfers are small.
        found: its hazards.
        ahead: how many operators of its destination before its first reader a copy is issued at the earliest.
    """
    return list(Tasks(net, dims, found).issued(range(len(net.ops)), ahead))


class Tasks:
    """The tasks of a step: its operators, and the frees of storages.

    Attributes:
        kinds: of the instructions that execute each operator.
        soon: whether an operator is a reduction or follows from one.
        plain: whether an operator is issued in program order: neither a transfer nor what follows from a reduction.
        earlier: for each operator, those that have to come before it, where program order does not ensure it.
        uses: of each storage, how many operators touch it, and one more if it outlives the step.
        small: the transfers that may be one of a group.
        due: the copies that are issued at their place in the program and no earlier.
        brought: the storages that these make.
        leaving: the storages that copies with an ``issue`` take away, with a value that no such copy brought.
    """

    def __init__(self, net: Net, dims: Dims, found: Hazards) -> None:
        self.net, self.dims, self.found = net, dims, found
        ops, blobs = net.ops, net.blobs
        self.kinds = [issued_as(op) for op in ops]
        self.soon = _follow_reductions(ops, found.earlier)
        self.plain = [kind == "run" and not soon for kind, soon in zip(self.kinds, self.soon, strict=True)]
        self.earlier = [
            [other for other in earlier if not self.plain[other]] if plain else earlier
            for plain, earlier in zip(self.plain, found.earlier, strict=True)
        ]
        self.uses = Counter(chain.from_iterable(found.touched))
        self.uses.update(outliving(net))
        self.small = {i for i, kind in enumerate(self.kinds) if kind != "run" and self.is_small(i)}
        self.due = {i for i, op in enumerate(ops) if op.issue == "due"}
        self.brought = {ops[i].outputs[0] for i in self.due}
        parking = [op for op in ops if op.issue]
        came = {make for op in parking for make in op.makes}
        self.leaving = {blobs[op.inputs[0]].storage for op in parking if came.isdisjoint(op.reads)} - self.brought

    def issued(self, order: Sequence[int], ahead: int) -> Iterator[Issue]:
        """The tasks in the order in which to issue them, where the program has its operators in another order, which
        respects the hazards, too.

        Args:
            order: the positions of the operators in the net.
            ahead: see :func:`issue_order`.
        """
        return _Order(self, order, ahead).run()

    def is_small(self, i: int) -> bool:
        """Whether a transfer may be one of a group."""
        return self.nbytes(i) < (BUCKET if self.gathers(i) else SMALL) and not self.net.ops[i].issue

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


class _Order:
    """Issues tasks.

    A *point* is one operator that is issued in program order, with all that becomes ready by it.

    Attributes:
        order: the operators in program order.
        followers: the operators that have to come after each operator, where program order does not ensure it.
        missing: for each operator, how many of those that have to come before it are not issued yet.
        uses: of each storage, the operators that touch it and are not issued yet, and one more if it outlives the step.
        transfers, ready, frees: what is issued next.
        ahead: copies that are ready too early, by destination and the number of its operators to wait for.
        gathered: small reductions that are ready, and their bytes, by route.
        together: small copies that are ready and not due, by route.
        places: for each copy, how many operators of its destination are issued before it at the least.
        late: delayed frees, by their device and the number of its operators after which they are delayed no longer.
        point: the number of the current point.
        moved: for each lane, the last point at which it was given a transfer.
        given: for each task, the lanes of the transfers that it depends on, and their points.
        held: for each delayed task, how many of these lanes have not been given another transfer since.
        held_by, held_on: the delayed tasks, by lane and by their own device.
    """

    def __init__(self, tasks: Tasks, order: Sequence[int], least: int) -> None:
        self.tasks, self.order, self.least = tasks, order, least
        self.net, self.kinds, self.touched = tasks.net, tasks.kinds, tasks.found.touched
        ops = self.net.ops
        self.followers: list[list[int]] = [[] for _ in ops]
        self.missing = [0] * len(ops)
        turns = self._turns()
        for i in order:
            earlier = [*tasks.earlier[i], *turns[i]] if i in turns else tasks.earlier[i]
            for other in earlier:
                self.followers[other].append(i)
            self.missing[i] = len(earlier)
        self.uses = dict(tasks.uses)
        self.places = self._places()
        self.late: dict[tuple[Device, int], list[_Task]] = {}
        self.passed: dict[Device, int] = defaultdict(int)
        self.ahead: dict[tuple[Device, int], list[int]] = {}
        self.together: dict[tuple[str, ...], list[int]] = {}
        self.gathered: dict[tuple[str, ...], tuple[list[int], int]] = {}
        self.out: list[Issue] = []
        self.issued = [False] * len(ops)
        self.transfers: list[int] = []
        self.ready: list[_Task] = []
        self.frees: list[str] = []
        self.point = 0
        self.moved: dict[str, int] = {}
        self.given: dict[_Task, list[tuple[str, int]]] = {}
        self.held: dict[_Task, int] = {}
        self.held_by: dict[str, list[_Task]] = {}
        self.held_on: dict[Device, list[_Task]] = {}

    def _turns(self) -> dict[int, list[int]]:
        """For each copy that is due at its place, the last such copy to its device before it, and the copies since then
        of what such copies brought: what has gone by then makes room."""
        found: dict[int, list[int]] = defaultdict(list)
        before: dict[Device, list[int]] = defaultdict(list)
        for i in self.order if self.tasks.due else ():
            op = self.net.ops[i]
            if self.kinds[i] != "copy":
                continue
            if i in self.tasks.due:
                found[i] = before[op.device]
                before[op.device] = [i]
            elif (came := self.net.blobs[op.inputs[0]].storage) in self.tasks.brought:
                before[self.net.blobs[came].device].append(i)
        return found

    def _places(self) -> dict[int, int]:
        """For each copy, how many operators of its destination are issued before it at the least.

        That is *least* less than stand in the program before its first reader, or as many as stand before the copy if
        these are fewer. For a small copy only its first reader counts.
        """
        before: dict[Device, int] = defaultdict(int)
        stands: dict[int, int] = {}
        found: dict[int, int] = {}
        unread: dict[str, int] = {}
        ops, plain = self.net.ops, self.tasks.plain
        for i in self.order:
            op = ops[i]
            for name in op.inputs if unread else ():
                if (copy := unread.pop(name, None)) is not None:
                    found[copy] = before[ops[copy].device] - self.least
            if plain[i]:
                before[op.device] += 1
            elif self.kinds[i] == "copy":
                stands[i] = before[op.device]
                unread[op.outputs[0]] = i
        for i, place in stands.items():
            read = found.get(i, place - self.least)
            if i in self.tasks.due:
                found[i] = place
            else:
                found[i] = read if i in self.tasks.small else min(place, read)
        return found

    def run(self) -> Iterator[Issue]:
        ops, soon, small = self.net.ops, self.tasks.soon, self.tasks.small
        for i in self.order:
            if not self.missing[i]:
                self.becomes_ready(i)
        self.settle()
        for i in self.order:
            op = ops[i]
            if soon[i] or (self.kinds[i] == "copy" and i in small):
                continue
            self.point += 1
            if self.missing[i]:
                self.bring(i)
            while self.missing[i] and (self.held or self.gathered or self.together):  # on delayed tasks
                self.release()
            if self.issued[i]:
                continue
            if i in self.given:
                self.let_go(self.held_on.pop(op.device, ()))
                self.settle()
            self.issue((i,))
            passed = self.passed[op.device] = self.passed[op.device] + 1
            here = op.device, passed
            for copy in self.ahead.pop(here, ()):
                self.due(copy)
            if here in self.late:
                self.let_go(self.late.pop(here))
            self.settle()
            yield from self.out
            self.out.clear()
        while self.held or self.gathered or self.together:
            self.release()
        yield from self.out

    def bring(self, i: int) -> None:
        """Issue the gathered copies that come before an operator."""
        for other in self.tasks.found.earlier[i]:
            if self.kinds[other] == "copy" and not self.missing[other]:
                self.due(other)
        self.settle()

    def release(self) -> None:
        """Issue all that is delayed or gathered."""
        for gathered in chain(self.together.values(), [reductions for reductions, _ in self.gathered.values()]):
            self.transfers += gathered
        self.together.clear()
        self.gathered.clear()
        self.let_go(list(self.held))
        self.settle()

    def settle(self) -> None:
        """Issue all that is ready: frees, then transfers, then what follows from those, by device."""
        while self.frees or self.transfers or self.ready:
            if self.frees:
                self.out += self.frees
                self.frees.clear()
            elif self.transfers:
                ready, self.transfers = self.transfers, []
                for group in self.grouped(ready):
                    self.issue(group)
            else:
                due, self.ready = sorted(self.ready, key=self.turn), []
                for task in due:
                    if isinstance(task, str):
                        self.out.append(task)
                    else:
                        self.issue((task,))

    def grouped(self, transfers: Sequence[int]) -> Iterator[tuple[int, ...]]:
        groups: dict[object, list[int]] = {}
        for i in transfers:
            groups.setdefault(self.tasks.route(i) if i in self.tasks.small else i, []).append(i)
        return map(tuple, groups.values())

    def issue(self, group: tuple[int, ...]) -> None:
        """Issue operators. Operators and frees that waited for nothing else become ready."""
        if group[0] in self.tasks.due:
            self.give_back(self.net.ops[group[0]].device)
        self.out.append(group)
        missing, uses = self.missing, self.uses
        for i in group:
            self.issued[i] = True
            if self.kinds[i] != "run":
                self.moves(i)
            for follower in self.followers[i]:
                missing[follower] -= 1
                if not missing[follower]:
                    self.becomes_ready(follower)
            for storage in self.touched[i]:
                uses[storage] = left = uses[storage] - 1
                if not left:
                    self.follow(storage)

    def give_back(self, device: Device) -> None:
        """Free what such copies brought to a device and what has gone, before the next one comes."""
        gone = [task for task in self.held if task in self.tasks.brought and self.device(task) == device]
        for task in gone:
            del self.held[task]
            self.out.append(str(task))

    def moves(self, i: int) -> None:
        """Note that the lanes of a transfer were given it: tasks that waited for this are no longer delayed, and tasks
        that depend on it may be."""
        lanes, outputs = self.tasks.lanes(i), self.net.ops[i].outputs
        for at in lanes:
            if self.moved.get(at) != self.point:
                self.moved[at] = self.point
                for task in self.held_by.pop(at, ()):
                    if task in self.held:
                        self.held[task] -= 1
                        if not self.held[task]:
                            self.let_go([task])
        later: list[_Task] = [storage for storage in self.touched[i] if storage not in outputs]
        for task in self.followers[i] + later:
            self.given.setdefault(task, []).extend([(at, self.point) for at in lanes])

    def becomes_ready(self, i: int) -> None:
        if self.kinds[i] != "run":
            self.transfer(i)
        elif self.tasks.soon[i]:
            self.follow(i)

    def follow(self, task: _Task) -> None:
        """Let a task be issued next, or delay it while it depends on a just-issued transfer."""
        lanes = {at for at, point in self.given.get(task, ()) if self.moved[at] == point}
        if not lanes:
            if isinstance(task, str):
                self.frees.append(task)
            else:
                self.ready.append(task)
            return
        self.held[task] = len(lanes)
        if isinstance(task, str):
            device = self.net.blobs[task].device
            self.late.setdefault((device, self.passed[device] + max(self.least, 1)), []).append(task)
            if task in self.tasks.leaving:  # they leave in a row: each would wait for the one before
                return
        for at in lanes:
            self.held_by.setdefault(at, []).append(task)
        self.held_on.setdefault(self.device(task), []).append(task)

    def transfer(self, i: int) -> None:
        """A transfer is ready."""
        tasks, wanted, device = self.tasks, self.places.get(i, 0), self.net.ops[i].device
        if tasks.gathers(i):
            gathered, nbytes = self.gathered.pop(route := tasks.route(i), ([], 0))
            gathered.append(i)
            nbytes += tasks.nbytes(i)
            if nbytes < BUCKET:
                self.gathered[route] = gathered, nbytes
            else:
                self.transfers += gathered
        elif tasks.soon[i] or self.kinds[i] != "copy":
            self.transfers.append(i)
        else:
            if i in tasks.small:
                self.together.setdefault(tasks.route(i), []).append(i)
            if wanted <= self.passed[device]:
                self.due(i)
            else:
                self.ahead.setdefault((device, wanted), []).append(i)

    def due(self, copy: int) -> None:
        """Issue a copy next, and those that are gathered with it."""
        if self.issued[copy]:
            return
        self.transfers += self.together.pop(self.tasks.route(copy), ()) if copy in self.tasks.small else (copy,)

    def turn(self, task: _Task) -> tuple[bool, Device]:
        """What tasks are sorted by: operators before frees, the tasks of one device side by side."""
        return isinstance(task, str), self.device(task)

    def device(self, task: _Task) -> Device:
        return self.net.blobs[task].device if isinstance(task, str) else self.net.ops[task].device

    def let_go(self, tasks: Sequence[_Task]) -> None:
        self.ready.extend([task for task in tasks if self.held.pop(task, None) is not None])


def _follow_reductions(ops: Sequence[Operator], earlier: Sequence[Sequence[int]]) -> list[bool]:
    """Whether each operator is a reduction or what follows from one."""
    found: list[bool] = []
    for op, before in zip(ops, earlier, strict=True):
        found.append(op.phase == "reduce" or (op.phase == "update" and any(found[i] for i in before)))
    return found
