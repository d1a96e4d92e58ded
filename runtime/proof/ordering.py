"""Whether the events of a plan order every two uses of a storage that have to be ordered.

One sweep in issue order. A lane's *clock* says, for every lane, up to which instruction the lane comes after it; a
record carries the clock of its lane, and a wait merges it::

    gpu:0.compute   0 run x     1 record x                          clock of gpu:1.copy_in after 2: {gpu:0.compute: 1}
    gpu:1.copy_in                            2 wait x    3 copy y <- x

A use is ordered behind another one if it is on the same lane, or if its lane's clock has reached the other's position.
Of each storage it is enough to know the last write and every lane's last read since. Most storages are used by one lane
only: there is no clock to look at, since the lane itself orders their uses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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


class _Use:
    """The last uses of one storage.

    Attributes:
        storage: its name.
        only: the lane of all uses since the last write, that write included; of what is there before the step, of all
            uses. -1 where there are several, or where there is nothing to use.
        lane: which lane wrote it last, as a number; of what is there before the step, which one read it first.
        position: the last write: -1 for what is there before the step, or :data:`_NEVER`, or :data:`_GONE`.
        last: the last use, while there is an *only* lane.
        readers: the last read of each lane since the last write, if there were several.
        writer: the operator that wrote it last.
        latest: the operator furthest down the program that has read it.
        freed: position of its free, else -1.
        refilled: position of the copy that filled its receive buffer again, else -1.
    """

    __slots__ = ("freed", "lane", "last", "latest", "only", "position", "readers", "refilled", "storage", "writer")

    def __init__(self, storage: str, nobody: int) -> None:
        self.storage, self.lane, self.position = storage, nobody, _NEVER
        self.readers: dict[int, int] = {}
        self.only = self.last = self.writer = self.latest = self.freed = self.refilled = -1

    def reads(self) -> dict[int, int]:
        """Each lane's last read since the last write."""
        return {self.only: self.last} if self.only >= 0 and self.last > self.position else self.readers

    def read(self, lane: int, position: int) -> None:
        """It is read, not only by the lane that has used it so far."""
        self.readers = self.reads()
        self.readers[lane] = position
        self.only = -1

    def uses(self) -> dict[int, int]:
        """Each lane's last use; of one that is gone, before it went."""
        uses = dict(self.readers)
        uses[self.lane] = max(self.last, uses.get(self.lane, -1))
        return uses


class _Uses(dict[str, _Use]):
    """The uses of the storage of each blob."""

    def __init__(self, plan: Plan, nobody: int) -> None:
        super().__init__()
        self.plan = plan
        storages: dict[str, _Use] = {}
        for name, blob in plan.step.blobs.items():
            use = storages.get(blob.storage)
            if use is None:
                use = storages[blob.storage] = _Use(blob.storage, nobody)
            self[name] = use
        for name in plan.step.external_inputs:
            self[name].position = -1
        self.storages: Mapping[str, _Use] = storages

    def __missing__(self, name: str) -> _Use:
        raise PlanError(
            f"the plan names a blob {name!r}, which is not declared{nearest(name, self)}",
            where=f"plan {self.plan.name!r}",
            fix="graphir.verify(plan) lists what else is wrong",
        )


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
        self._uses = _Uses(plan, self._nobody)
        self._views: dict[str, int] = {}
        step = plan.step
        self._ops, self._buffers = step.ops, plan.buffers
        self._kept = {self._uses[name].storage for name in step.external_outputs}
        self._kept.update([blob.storage for blob in step.blobs.values() if blob.role in STATE_ROLES])
        self._filled: dict[tuple[str, int], _Use] = {}
        self._first: dict[tuple[str, int], tuple[str, int]] = {}

    def run(self) -> None:
        """Go through the instructions.

        Raises:
            PlanError: an instruction names an operator, a part or a blob that is not there, or has no event.
        """
        numbers, recorded, clocks, execute = self._numbers, self._recorded, self._clocks, self._execute
        for position, (kind, lane, op, part, event, storage) in enumerate(self.plan.instructions):
            at = numbers[lane]
            if event is not None:
                if kind == "wait":
                    self._wait(position, at, event)
                elif event.lane == lane:
                    recorded[event] = position, at, clocks[at]
                else:
                    what = f"{lane} records an event of {event.lane}, which tells nothing of what that lane has done"
                    self._find("foreign record", what, event.blob, -1, position, f"a record on {event.lane}")
            elif kind == "free":
                self._free(position, at, storage)
            elif kind == "record" or kind == "wait":
                raise self._broken(f"instruction {position} is a {kind} without an event")
            else:
                execute(position, at, op, part if kind == "collective" else -1)
        self._finish()

    def last_write(self, name: str) -> int:
        """Position of the last write of a blob's storage, -1 where there is none."""
        position = self._uses[name].position
        return -1 if position >= _GONE else position

    # Instructions

    def _execute(self, position: int, at: int, number: int, part: int) -> None:
        ops, uses = self._ops, self._uses
        if not 0 <= number < len(ops):
            raise self._broken(f"instruction {position} executes operator {number}, which is not there")
        op = ops[number]
        for name in op.inputs:
            use = uses[name]
            if use.only == at:
                use.last = position
            else:
                self._read(use, name, position, at)
            if number > use.latest:
                use.latest = number
            if number < use.writer:
                self._disordered(use, position, use.position, "read", "written")
        outputs, views = op.outputs, op.effects.views
        if part >= 0:
            if part >= len(outputs):
                raise self._broken(f"instruction {position} executes part {part} of an operator with {len(outputs)}")
            outputs = outputs[part : part + 1]
        viewed = dict(views) if views else ()
        for output, name in enumerate(outputs):
            if output in viewed:
                self._views[name] = position
                continue
            use = uses[name]
            if use.position != _NEVER:
                self._overwrite(use, position, at, number)
            if use.position >= _GONE and name in self._buffers and op.type == "Copy":
                self._fill(use, position, at)
            use.only = use.lane = at
            use.position = use.last = position
            use.writer = number
            if use.readers:
                use.readers = {}

    def _read(self, use: _Use, name: str, position: int, at: int) -> None:
        """A storage is read that not only this lane has used since it was written."""
        if use.last == use.position == -1:
            use.only = use.lane = at
            use.last = position
            return
        clock = self._clocks[at]
        if use.position == _NEVER:
            what = f"{use.storage!r} is read by {self.lanes[at]}, but nothing has written it"
            self._find("never written", what, use.storage, -1, position, f"an earlier write of {use.storage!r}")
        elif use.position == _GONE:
            self._gone(use, position, at, "read")
        elif use.lane != at and use.position > clock[use.lane]:
            clock = self._unordered("race", use, (use.lane, use.position), (at, position), "written", "read")
        if name in self._views:
            made = self._views[name]
            maker = self._numbers[self.plan.instructions[made].lane]
            if maker != at and made > clock[maker]:
                self._unordered("race", use, (maker, made), (at, position), "made as a view", "read")
        use.read(at, position)

    def _overwrite(self, use: _Use, position: int, at: int, number: int) -> None:
        """A storage that has a value is written."""
        if use.position == _GONE:
            self._gone(use, position, at, "written")
            return
        if use.only != at:
            self._order(use, position, at)
        if number < use.latest:
            self._disordered(use, position, self._executed(use.latest), "written", "read")
        elif number < use.writer:
            self._disordered(use, position, use.position, "written", "written")
        elif number == use.writer:
            what = f"{use.storage!r} is written twice by one operator"
            self._find("wrong order", what, use.storage, use.position, position, "an operator that is issued only once")

    def _order(self, use: _Use, position: int, at: int) -> None:
        """A storage is written after uses by other lanes."""
        clock = self._clocks[at]
        for lane, read in use.reads().items():
            if lane != at and read > clock[lane]:
                clock = self._unordered("race", use, (lane, read), (at, position), "read", "written")
        if use.lane != at and use.position > clock[use.lane]:
            self._unordered("race", use, (use.lane, use.position), (at, position), "written", "written")

    def _free(self, position: int, at: int, storage: str) -> None:
        use = self._uses.storages.get(storage)
        why = ""
        if use is None:
            why = "it is not a storage"
        elif storage in self._kept:
            why = "it is needed after the step: by the caller, or by the next step"
        elif use.freed >= 0:
            why = "it was freed before"
        elif use.position == _NEVER:
            why = "nothing has made it"
        if use is not None and use.position == _NEVER and use.readers:
            return  # the reads are findings
        if use is None or why:
            first = -1 if use is None else use.freed
            self._find("wrong free", f"{storage!r} is freed, but {why}", storage, first, position, "no such free")
            return
        if use.only != at:
            clock = self._clocks[at]
            for lane, used in use.uses().items():
                if lane != at and used > clock[lane]:
                    clock = self._unordered("early free", use, (lane, used), (at, position), "used", "freed")
        use.only, use.position, use.freed = -1, _GONE, position

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

    def _fill(self, use: _Use, position: int, at: int) -> None:
        """A receive buffer gets the content of another storage."""
        key = self._buffer(use.storage)
        self._first.setdefault(key, (use.storage, position))
        before, self._filled[key] = self._filled.get(key), use
        if before is None or before is use:
            return
        clock = self._clocks[at]
        for lane, used in before.uses().items():
            if lane != at and used > clock[lane]:
                what = f"filled again, for {use.storage!r},"
                clock = self._unordered("buffer reuse", before, (lane, used), (at, position), "used", what)
        before.readers, before.only, before.lane, before.last = before.reads(), -1, self._nobody, -1
        before.position, before.refilled = _GONE, position

    def _buffer(self, storage: str) -> tuple[str, int]:
        return self.plan.step.blobs[storage].device, self._buffers[storage]

    def _finish(self) -> None:
        """What holds only of a whole step, and of what the next one finds."""
        step = self.plan.step
        for name in step.external_outputs:
            if self._uses[name].position == _NEVER:
                what = f"output {name!r} is handed back, but nothing writes it"
                self._find("never written", what, name, -1, -1, f"an instruction that writes {name!r}")
        for storage in self._buffers:
            if storage in self._kept and self._buffer(storage) in self._first:
                other, filled = self._first[self._buffer(storage)]
                what = (
                    f"{storage!r} is needed after the step, but the next step fills its receive buffer again, for"
                    f" {other!r}"
                )
                self._find("buffer reuse", what, storage, self.last_write(storage), filled, "memory of its own")
        stays = self._kept | {name for name in step.external_inputs if step.blobs[name].device.kind == "cpu"}
        for storage, use in self._uses.storages.items():
            if use.position == _NEVER or use.freed >= 0 or use.refilled >= 0 or storage in stays:
                continue
            used = max(use.uses().values())
            if used >= 0:
                what = f"{storage!r} is not needed after this, and never freed"
                self._find("never freed", what, storage, used, -1, f"free {storage} after #{used}")

    # Findings

    def _find(self, kind: FindingKind, what: str, storage: str, first: int, second: int, missing: str) -> None:
        self.findings.append(Finding(kind, what, storage, first, second, missing, self.plan))

    def _gone(self, use: _Use, position: int, at: int, how: str) -> None:
        if use.freed >= 0:
            what = f"{use.storage!r} is {how} by {self.lanes[at]} after it is freed"
            missing = f"a free of {use.storage!r} after #{position}"
            self._find("use after free", what, use.storage, position, use.freed, missing)
            return
        filled = self._ops[self.plan.instructions[use.refilled].op].outputs[0]
        what = f"{use.storage!r} is {how} by {self.lanes[at]} after its receive buffer is filled again, for {filled!r}"
        self._find("buffer reuse", what, use.storage, position, use.refilled, "another buffer for one of the two")

    def _unordered(
        self, kind: FindingKind, use: _Use, first: tuple[int, int], second: tuple[int, int], did: str, does: str
    ) -> list[int]:
        """Two uses, given as lane and position, that nothing orders; the clock with which to go on, as if something
        did."""
        (lane, before), (at, position) = first, second
        one, other = self.lanes[lane], self.lanes[at]
        what = f"{use.storage!r} is {does} by {other}, which does not wait until it is {did} by {one}"
        missing = f"a record by {one} after #{before}, and a wait for it by {other} before #{position}"
        self._find(kind, what, use.storage, before, position, missing)
        clock = list(self._clocks[at])
        clock[lane] = before
        self._clocks[at] = clock
        return clock

    def _executed(self, number: int) -> int:
        """Where an operator is executed first."""
        return next(i for i, (_, _, op, _, _, _) in enumerate(self.plan.instructions) if op == number)

    def _disordered(self, use: _Use, position: int, earlier: int, does: str, did: str) -> None:
        """Two uses are issued in another order than the program's."""
        what = f"{use.storage!r} is {does} after it is {did}, but the program has it the other way round"
        self._find("wrong order", what, use.storage, position, earlier, f"#{position} before #{earlier}")

    def _broken(self, what: str) -> PlanError:
        return PlanError(what, where=f"plan {self.plan.name!r}", fix="graphir.verify(plan) lists what else is wrong")
