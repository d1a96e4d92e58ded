"""Whether the events of a plan order every two uses of a storage that have to be ordered.

One sweep in issue order. A lane's *clock* says, for every lane, up to which instruction the lane comes after it; a
record carries the clock of its lane, and a wait merges it::

    gpu:0.compute   0 run x     1 record x                          clock of gpu:1.copy_in after 2: {gpu:0.compute: 1}
    gpu:1.copy_in                            2 wait x    3 copy y <- x

A use is ordered behind another one if it is on the same lane, or if its lane's clock has reached the other's position.
Of each storage it is enough to know the last write and every lane's last read since. Most storages are used by one lane
only: there is no clock to look at, since the lane itself orders their uses. Lanes and storages are numbers here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Final

from graphir.errors import PlanError, nearest
from graphir.ir.blob import STATE_ROLES
from graphir.plan import Event, Plan

from .findings import Finding, FindingKind

__all__ = ["Ordering"]

_NEVER: Final = sys.maxsize
"""The position of the write of a storage that nothing has written yet."""
_GONE: Final = sys.maxsize - 1
"""The same of one that was freed, or whose receive buffer was filled again."""


class _Numbers(dict[str, int]):
    """The number of the storage of each blob."""

    def __init__(self, plan: Plan, storages: Mapping[str, int]) -> None:
        super().__init__({name: storages[blob.storage] for name, blob in plan.step.blobs.items()})
        self.plan = plan

    def __missing__(self, name: str) -> int:
        raise PlanError(
            f"the plan names a blob {name!r}, which is not declared{nearest(name, self)}",
            where=f"plan {self.plan.name!r}",
            fix="graphir.verify(plan) lists what else is wrong",
        )


class _Uses:
    """The last uses of the storages, by their numbers.

    Attributes:
        only: the lane of all uses since the last write, that write included; of what is there before the step, of all
            uses. -1 where there are several, or where there is nothing to use.
        lane: which lane wrote it last; of what is there before the step, which one read it first.
        position: the last write: -1 for what is there before the step, or :data:`_NEVER`, or :data:`_GONE`.
        last: the last use, while there is an *only* lane.
        readers: the last read of each lane since the last write, where there were several lanes.
        writer: the operator that wrote it last.
        latest: the operator furthest down the program that has read it.
        freed: position of its free.
        refilled: position of the copy that filled its receive buffer again.
    """

    __slots__ = ("freed", "lane", "last", "latest", "only", "position", "readers", "refilled", "writer")

    def __init__(self, count: int, nobody: int) -> None:
        self.only, self.lane, self.position = [-1] * count, [nobody] * count, [_NEVER] * count
        self.last, self.writer, self.latest = [-1] * count, [-1] * count, [-1] * count
        self.readers: dict[int, dict[int, int]] = {}
        self.freed: dict[int, int] = {}
        self.refilled: dict[int, int] = {}

    def reads(self, storage: int) -> dict[int, int]:
        """Each lane's last read since the last write; from now on there may be several."""
        reads, only = self.readers.setdefault(storage, {}), self.only[storage]
        if only >= 0:
            self.only[storage] = -1
            if self.last[storage] > self.position[storage]:
                reads[only] = self.last[storage]
        return reads

    def all(self, storage: int) -> dict[int, int]:
        """Each lane's last use; of one that is gone, before it went."""
        uses, lane = dict(self.readers.get(storage, {})), self.lane[storage]
        uses[lane] = max(self.last[storage], uses.get(lane, -1))
        return uses

    def fill(self, storage: int, position: int, nobody: int) -> None:
        """Its receive buffer is filled again."""
        self.reads(storage)
        self.lane[storage], self.last[storage] = nobody, -1
        self.position[storage], self.refilled[storage] = _GONE, position


class Ordering:
    """The sweep.

    Attributes:
        findings: what is wrong, in issue order.
        unsatisfied: positions of waits for events that nothing records before them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.findings: list[Finding] = []
        self.unsatisfied: list[int] = []
        self.lanes = list(dict.fromkeys([instruction.lane for instruction in plan.instructions]))
        self._numbers = {name: number for number, name in enumerate(self.lanes)}
        self._nobody = len(self.lanes)
        self._clocks = [[-1] * (self._nobody + 1) for _ in self.lanes]
        self._recorded: dict[Event, tuple[int, int, list[int]]] = {}
        step = plan.step
        self._names = list(dict.fromkeys([blob.storage for blob in step.blobs.values()]))
        self._storages = {name: storage for storage, name in enumerate(self._names)}
        self._blobs = _Numbers(plan, self._storages)
        self._uses = _Uses(len(self._names), self._nobody)
        for name in step.external_inputs:
            self._uses.position[self._blobs[name]] = -1
        self._views: dict[str, int] = {}
        self._ops, self._buffers = step.ops, plan.buffers
        self._kept = {step.blobs[name].storage for name in step.external_outputs}
        self._kept.update([blob.storage for blob in step.blobs.values() if blob.role in STATE_ROLES])
        self._filled: dict[tuple[str, int], int] = {}
        self._first: dict[tuple[str, int], tuple[str, int]] = {}

    def run(self) -> None:
        """Go through the instructions.

        Raises:
            PlanError: an instruction names an operator, a part or a blob that is not there, or has no event.
        """
        numbers, execute = self._numbers, self._execute
        for position, instruction in enumerate(self.plan.instructions):
            kind, at = instruction.kind, numbers[instruction.lane]
            if kind == "run" or kind == "copy":
                execute(position, at, instruction.op, -1)
            elif kind == "collective":
                execute(position, at, instruction.op, instruction.part)
            elif kind == "free":
                self._free(position, at, instruction.storage)
            elif instruction.event is None:
                raise self._broken(f"instruction {position} is a {kind} without an event")
            elif kind == "wait":
                self._wait(position, at, instruction.event)
            else:
                self._record(position, at, instruction.event)
        self._finish()

    def last_write(self, name: str) -> int:
        """Position of the last write of a blob's storage, -1 where there is none."""
        position = self._uses.position[self._blobs[name]]
        return -1 if position >= _GONE else position

    # Instructions

    def _execute(self, position: int, at: int, number: int, part: int) -> None:
        ops, blobs, uses = self._ops, self._blobs, self._uses
        if not 0 <= number < len(ops):
            raise self._broken(f"instruction {position} executes operator {number}, which is not there")
        op = ops[number]
        only, last, writer, latest = uses.only, uses.last, uses.writer, uses.latest
        for name in op.inputs:
            storage = blobs[name]
            if only[storage] == at:
                last[storage] = position
            else:
                self._read(storage, name, position, at)
            if number > latest[storage]:
                latest[storage] = number
            if number < writer[storage]:
                self._disordered(storage, position, uses.position[storage], "read", "written")
        outputs, views = op.outputs, op.effects.views
        if part >= 0:
            if part >= len(outputs):
                raise self._broken(f"instruction {position} executes part {part} of an operator with {len(outputs)}")
            outputs = outputs[part : part + 1]
        if views:
            outputs = self._view(views, outputs, position)
        for name in outputs:
            storage = blobs[name]
            if uses.position[storage] != _NEVER:
                self._overwrite(storage, position, at, number)
            if op.type == "Copy" and name in self._buffers and uses.position[storage] >= _GONE:
                self._fill(storage, position, at)
            only[storage] = uses.lane[storage] = at
            uses.position[storage] = last[storage] = position
            writer[storage] = number
            if storage in uses.readers:
                del uses.readers[storage]

    def _view(self, views: Sequence[tuple[int, int]], outputs: tuple[str, ...], position: int) -> tuple[str, ...]:
        """Views are made, which writes nothing; the outputs that are none are left."""
        made, left = outputs, outputs[:0]
        if len(views) < len(outputs):
            viewed = dict(views)
            made = tuple([name for output, name in enumerate(outputs) if output in viewed])
            left = tuple([name for output, name in enumerate(outputs) if output not in viewed])
        for name in made:
            self._views[name] = position
        return left

    def _read(self, storage: int, name: str, position: int, at: int) -> None:
        """A storage is read that not only this lane has used since it was written."""
        uses, clock = self._uses, self._clocks[at]
        lane, written = uses.lane[storage], uses.position[storage]
        if written == uses.last[storage] == -1:
            uses.only[storage] = uses.lane[storage] = at
            uses.last[storage] = position
            return
        if written == _NEVER:
            what = f"{self._names[storage]!r} is read by {self.lanes[at]}, but nothing has written it"
            missing = f"an earlier write of {self._names[storage]!r}"
            self._find("never written", what, self._names[storage], -1, position, missing)
        elif written == _GONE:
            self._gone(storage, position, at, "read")
        elif lane != at and written > clock[lane]:
            clock = self._unordered("race", storage, (lane, written), (at, position), "written", "read")
        if name in self._views:
            made = self._views[name]
            maker = self._numbers[self.plan.instructions[made].lane]
            if maker != at and made > clock[maker]:
                self._unordered("race", storage, (maker, made), (at, position), "made as a view", "read")
        uses.reads(storage)[at] = position

    def _overwrite(self, storage: int, position: int, at: int, number: int) -> None:
        """A storage that has a value is written."""
        uses = self._uses
        written, writer, latest = uses.position[storage], uses.writer[storage], uses.latest[storage]
        if written == _GONE:
            self._gone(storage, position, at, "written")
            return
        if uses.only[storage] != at:
            self._order(storage, position, at)
        if number < latest:
            self._disordered(storage, position, self._executed(latest), "written", "read")
        elif number < writer:
            self._disordered(storage, position, written, "written", "written")
        elif number == writer:
            name = self._names[storage]
            what = f"{name!r} is written twice by one operator"
            self._find("wrong order", what, name, written, position, "an operator that is issued only once")

    def _order(self, storage: int, position: int, at: int) -> None:
        """A storage is written after uses by other lanes."""
        uses, clock = self._uses, self._clocks[at]
        for lane, read in uses.reads(storage).items():
            if lane != at and read > clock[lane]:
                clock = self._unordered("race", storage, (lane, read), (at, position), "read", "written")
        lane, written = uses.lane[storage], uses.position[storage]
        if lane != at and written > clock[lane]:
            self._unordered("race", storage, (lane, written), (at, position), "written", "written")

    def _free(self, position: int, at: int, name: str) -> None:
        uses, storage = self._uses, self._storages.get(name, -1)
        why = ""
        if storage < 0:
            why = "it is not a storage"
        elif name in self._kept:
            why = "it is needed after the step: by the caller, or by the next step"
        elif storage in uses.freed:
            why = "it was freed before"
        elif uses.position[storage] == _NEVER:
            if storage in uses.readers:
                return  # the reads are findings
            why = "nothing has made it"
        if why:
            first = uses.freed.get(storage, -1)
            self._find("wrong free", f"{name!r} is freed, but {why}", name, first, position, "no such free")
            return
        if uses.only[storage] != at:
            clock = self._clocks[at]
            for lane, used in uses.all(storage).items():
                if lane != at and used > clock[lane]:
                    clock = self._unordered("early free", storage, (lane, used), (at, position), "used", "freed")
        uses.only[storage], uses.position[storage], uses.freed[storage] = -1, _GONE, position

    def _record(self, position: int, at: int, event: Event) -> None:
        lane = self.lanes[at]
        if event.lane == lane:
            self._recorded[event] = position, at, self._clocks[at]
        else:
            what = f"{lane} records an event of {event.lane}, which tells nothing of what that lane has done"
            self._find("foreign record", what, event.blob, -1, position, f"a record on {event.lane}")

    def _wait(self, position: int, at: int, event: Event) -> None:
        source = self._recorded.get(event)
        if source is None:
            self.unsatisfied.append(position)
            return
        recorded, there, known = source
        clock = self._clocks[at]
        if there != at and clock[there] < recorded:
            merged = [ours if ours > theirs else theirs for ours, theirs in zip(clock, known, strict=True)]
            merged[there] = recorded
            self._clocks[at] = merged

    def _fill(self, storage: int, position: int, at: int) -> None:
        """A receive buffer gets the content of another storage."""
        name = self._names[storage]
        key = self._buffer(name)
        self._first.setdefault(key, (name, position))
        before, self._filled[key] = self._filled.get(key, storage), storage
        if before == storage:
            return
        clock = self._clocks[at]
        for lane, used in self._uses.all(before).items():
            if lane != at and used > clock[lane]:
                what = f"filled again, for {name!r},"
                clock = self._unordered("buffer reuse", before, (lane, used), (at, position), "used", what)
        self._uses.fill(before, position, self._nobody)

    def _buffer(self, storage: str) -> tuple[str, int]:
        return self.plan.step.blobs[storage].device, self._buffers[storage]

    def _finish(self) -> None:
        """What holds only of a whole step, and of what the next one finds."""
        step, uses = self.plan.step, self._uses
        for name in step.external_outputs:
            if uses.position[self._blobs[name]] == _NEVER:
                what = f"output {name!r} is handed back, but nothing writes it"
                self._find("never written", what, name, -1, -1, f"an instruction that writes {name!r}")
        for name in self._buffers:
            if name in self._kept and self._buffer(name) in self._first:
                other, filled = self._first[self._buffer(name)]
                what = (
                    f"{name!r} is needed after the step, but the next step fills its receive buffer again, for"
                    f" {other!r}"
                )
                self._find("buffer reuse", what, name, self.last_write(name), filled, "memory of its own")
        stays = self._kept | {name for name in step.external_inputs if step.blobs[name].device.kind == "cpu"}
        for name, storage in self._storages.items():
            gone = storage in uses.freed or storage in uses.refilled
            if gone or uses.position[storage] == _NEVER or name in stays:
                continue
            used = max(uses.all(storage).values())
            if used >= 0:
                what = f"{name!r} is not needed after this, and never freed"
                self._find("never freed", what, name, used, -1, f"free {name} after #{used}")

    # Findings

    def _find(self, kind: FindingKind, what: str, storage: str, first: int, second: int, missing: str) -> None:
        self.findings.append(Finding(kind, what, storage, first, second, missing, self.plan))

    def _gone(self, storage: int, position: int, at: int, how: str) -> None:
        name, uses = self._names[storage], self._uses
        if storage in uses.freed:
            what = f"{name!r} is {how} by {self.lanes[at]} after it is freed"
            missing = f"a free of {name!r} after #{position}"
            self._find("use after free", what, name, position, uses.freed[storage], missing)
            return
        refilled = uses.refilled[storage]
        filled = self._ops[self.plan.instructions[refilled].op].outputs[0]
        what = f"{name!r} is {how} by {self.lanes[at]} after its receive buffer is filled again, for {filled!r}"
        self._find("buffer reuse", what, name, position, refilled, "another buffer for one of the two")

    def _unordered(
        self, kind: FindingKind, storage: int, first: tuple[int, int], second: tuple[int, int], did: str, does: str
    ) -> list[int]:
        """Two uses, given as lane and position, that nothing orders; the clock with which to go on, as if something
        did."""
        (lane, before), (at, position) = first, second
        name, one, other = self._names[storage], self.lanes[lane], self.lanes[at]
        what = f"{name!r} is {does} by {other}, which does not wait until it is {did} by {one}"
        missing = f"a record by {one} after #{before}, and a wait for it by {other} before #{position}"
        self._find(kind, what, name, before, position, missing)
        clock = list(self._clocks[at])
        clock[lane] = before
        self._clocks[at] = clock
        return clock

    def _executed(self, number: int) -> int:
        """Where an operator is executed first."""
        return next(i for i, (_, _, op, _, _, _) in enumerate(self.plan.instructions) if op == number)

    def _disordered(self, storage: int, position: int, earlier: int, does: str, did: str) -> None:
        """Two uses are issued in another order than the program's."""
        name = self._names[storage]
        what = f"{name!r} is {does} after it is {did}, but the program has it the other way round"
        self._find("wrong order", what, name, position, earlier, f"#{position} before #{earlier}")

    def _broken(self, what: str) -> PlanError:
        return PlanError(what, where=f"plan {self.plan.name!r}", fix="graphir.verify(plan) lists what else is wrong")
