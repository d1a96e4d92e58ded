"""Whether the events of a plan order every two uses of a storage that have to be ordered.

One sweep in issue order. A lane's *clock* says up to which instruction of other lanes it comes after them; a record
carries the clock of its lane, and a wait merges it::

    gpu:0.compute   0 run x     1 record x                          clock of gpu:1.copy_in after 2: {gpu:0.compute: 1}
    gpu:1.copy_in                            2 wait x    3 copy y <- x

A use is ordered behind another one if it is on the same lane, or if its lane's clock has reached the other's position.
Of each storage it is enough to know the last write and every lane's last read since. Most storages have a *holder*, a
lane that comes after all of these: no other lane has used the storage since, or this lane has waited for the holder
before. A holder may use, write and free the storage without a look at a clock. Storages are numbers here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from graphir.errors import PlanError, nearest
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.plan import Event, Kind, Plan

from .findings import Finding, FindingKind

__all__ = ["Ordering"]

_NEVER: Final = -2
"""The position of the write of a storage that nothing has written yet; -1 is that of what is there before the step."""
_GONE: Final = -3
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
        holder: the lane that comes after all uses since the last write, that write included; ``""`` of what is there
            before the step and has not been used, None where there is no such lane.
        last: the holder's last use, or -1; where there is no holder, the last write.
        readers: where there is no holder, the last read of each lane since the last write.
        lane: which one wrote it last; of what is gone, its last holder, if there was one.
        written: the last write: -1 for what is there before the step, or :data:`_NEVER`, or :data:`_GONE`.
        writer: the operator that wrote it last.
        latest: the operator furthest down the program that has read it.
        freed: position of its free, or -1.
        refilled: position of the copy that filled its receive buffer again.
    """

    __slots__ = ("freed", "holder", "lane", "last", "latest", "readers", "refilled", "writer", "written")

    def __init__(self, count: int) -> None:
        self.holder: list[str | None] = [None] * count
        self.lane, self.written = [""] * count, [_NEVER] * count
        self.last, self.writer, self.latest, self.freed = ([-1] * count for _ in range(4))
        self.readers: dict[int, dict[str, int]] = {}
        self.refilled: dict[int, int] = {}

    def reads(self, storage: int) -> dict[str, int]:
        """Each lane's last read since the last write; from now on there is no holder."""
        reads, holder = self.readers.setdefault(storage, {}), self.holder[storage]
        if holder is not None:
            if self.last[storage] > self.written[storage]:
                reads[holder] = self.last[storage]
            self.holder[storage], self.last[storage] = None, self.written[storage]
        return reads

    def final(self, storage: int) -> dict[str, int]:
        """Lanes and their last uses, which come after all others; of what is gone, before it went."""
        holder, last = self.holder[storage], self.last[storage]
        if holder is not None:
            return {holder: last}
        return {self.lane[storage]: last, **self.readers.get(storage, {})}

    def refill(self, storage: int, position: int) -> None:
        """Its receive buffer is filled again."""
        self.reads(storage)
        self.lane[storage], self.last[storage] = "", -1
        self.written[storage], self.refilled[storage] = _GONE, position


class Ordering:
    """The sweep.

    Attributes:
        findings: what is wrong, in issue order.
        unsatisfied: positions of waits for events that nothing records before them.
        collectives: positions of the parts of collectives.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.findings: list[Finding] = []
        self.unsatisfied: list[int] = []
        self.collectives: list[int] = []
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._recorded: dict[Event, dict[str, int]] = {}
        step = plan.step
        self._names = list(dict.fromkeys([blob.storage for blob in step.blobs.values()]))
        storages = {name: storage for storage, name in enumerate(self._names)}
        self._blobs = _Numbers(plan, storages)
        self._uses = uses = _Uses(len(self._names))
        for name in step.external_inputs:
            storage = self._blobs[name]
            uses.holder[storage], uses.written[storage] = "", -1
        self._views: dict[str, int] = {}
        self._ops, self._buffers = step.ops, plan.buffers
        self._kept = {step.blobs[name].storage for name in step.external_outputs}
        self._kept.update([blob.storage for blob in step.blobs.values() if blob.role in STATE_ROLES])
        self._filled: dict[tuple[Device, int], int] = {}
        self._first: dict[tuple[Device, int], tuple[str, int]] = {}

    def run(self) -> None:
        """Go through the instructions.

        Raises:
            PlanError: an instruction names an operator, a part or a blob that is not there, or has no event.
        """
        execute = self._execute
        for position, (kind, at, number, part, event, storage) in enumerate(self.plan.instructions):
            if kind == "run" or kind == "copy":
                execute(position, at, kind, number, part)
            elif kind == "collective":
                execute(position, at, kind, number, part)
                self.collectives.append(position)
            elif kind == "free":
                self._free(position, at, storage)
            elif event is None:
                raise self._broken(f"instruction {position} is a {kind} without an event")
            elif kind == "wait":
                self._wait(position, at, event)
            else:
                self._record(position, at, event)
        self._finish()

    def last_write(self, name: str) -> int:
        """Position of the last write of a blob's storage, -1 where there is none."""
        return max(self._uses.written[self._blobs[name]], -1)

    # Instructions

    def _execute(self, position: int, at: str, kind: Kind, number: int, part: int) -> None:
        ops, blobs, uses = self._ops, self._blobs, self._uses
        if not 0 <= number < len(ops):
            raise self._broken(f"instruction {position} executes operator {number}, which is not there")
        op = ops[number]
        holder, last, writer, latest = uses.holder, uses.last, uses.writer, uses.latest
        for name in op.inputs:
            storage = blobs[name]
            if holder[storage] == at:
                last[storage] = position
            else:
                self._read(storage, name, position, at)
            if number > latest[storage]:
                latest[storage] = number
            if number < writer[storage]:
                self._disordered(storage, position, uses.written[storage], "read", "written")
        outputs, views = op.outputs, op.effects.views
        if kind == "collective":
            if part >= len(outputs):
                raise self._broken(f"instruction {position} executes part {part} of an operator with {len(outputs)}")
            outputs = outputs[part : part + 1]
        if views:
            outputs = self._view(views, outputs, position)
        lane, written, readers = uses.lane, uses.written, uses.readers
        for name in outputs:
            storage = blobs[name]
            if written[storage] != _NEVER:
                self._overwrite(storage, position, at, number)
            if kind == "copy" and name in self._buffers and written[storage] <= _NEVER:
                self._fill(storage, position, at)
            holder[storage] = lane[storage] = at
            written[storage] = last[storage] = position
            writer[storage] = number
            if storage in readers:
                del readers[storage]

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

    def _read(self, storage: int, name: str, position: int, at: str) -> None:
        """A storage is read by a lane that does not hold it."""
        uses = self._uses
        holder = uses.holder[storage]
        if holder is not None and uses.last[storage] <= self._clocks[at].get(holder, -1):
            # After all uses, and so after views were made of it: their operators use it.
            uses.holder[storage], uses.last[storage] = at, position
            return
        lane, written = uses.lane[storage], uses.written[storage]
        if written == _NEVER:
            what = f"{self._names[storage]!r} is read by {at}, but nothing has written it"
            missing = f"an earlier write of {self._names[storage]!r}"
            self._find("never written", what, self._names[storage], -1, position, missing)
        elif written == _GONE:
            self._gone(storage, position, at, "read")
        else:
            self._require("race", storage, {lane: written}, "written", (at, position), "read")
        if name in self._views:
            made = self._views[name]
            maker = self.plan.instructions[made].lane
            self._require("race", storage, {maker: made}, "made as a view", (at, position), "read")
        uses.reads(storage)[at] = position

    def _overwrite(self, storage: int, position: int, at: str, number: int) -> None:
        """A storage that has a value is written."""
        uses = self._uses
        written, writer, latest = uses.written[storage], uses.writer[storage], uses.latest[storage]
        if written == _GONE:
            self._gone(storage, position, at, "written")
            return
        if uses.holder[storage] != at:
            self._require("race", storage, uses.reads(storage), "read", (at, position), "written")
            self._require("race", storage, {uses.lane[storage]: written}, "written", (at, position), "written")
        if number < latest:
            self._disordered(storage, position, self._executed(latest), "written", "read")
        elif number < writer:
            self._disordered(storage, position, written, "written", "written")
        elif number == writer:
            name = self._names[storage]
            what = f"{name!r} is written twice by one operator"
            self._find("wrong order", what, name, written, position, "an operator that is issued only once")

    def _free(self, position: int, at: str, name: str) -> None:
        uses, storage = self._uses, self._blobs.get(name, -1)
        if storage < 0 or self._names[storage] != name:
            self._wrong_free(position, name, "it is not a storage")
        elif name in self._kept:
            self._wrong_free(position, name, "it is needed after the step: by the caller, or by the next step")
        elif uses.freed[storage] >= 0:
            self._wrong_free(position, name, "it was freed before", uses.freed[storage])
        elif uses.written[storage] == _NEVER:
            if storage not in uses.readers:  # the reads are findings
                self._wrong_free(position, name, "nothing has made it")
        else:
            holder = uses.holder[storage]
            if holder != at:
                self._require("early free", storage, uses.final(storage), "used", (at, position), "freed")
            if holder is not None:
                uses.holder[storage], uses.lane[storage] = None, holder
            uses.written[storage], uses.freed[storage] = _GONE, position

    def _wrong_free(self, position: int, name: str, why: str, first: int = -1) -> None:
        self._find("wrong free", f"{name!r} is freed, but {why}", name, first, position, "no such free")

    def _record(self, position: int, at: str, event: Event) -> None:
        if event.lane == at:
            self._recorded[event] = {**self._clocks[at], at: position}
        else:
            what = f"{at} records an event of {event.lane}, which tells nothing of what that lane has done"
            self._find("foreign record", what, event.blob, -1, position, f"a record on {event.lane}")

    def _wait(self, position: int, at: str, event: Event) -> None:
        known = self._recorded.get(event)
        if known is None:
            self.unsatisfied.append(position)
            return
        clock = self._clocks[at]
        for lane, reached in known.items():
            if reached > clock.get(lane, -1):
                clock[lane] = reached

    def _fill(self, storage: int, position: int, at: str) -> None:
        """A receive buffer gets the content of another storage."""
        name = self._names[storage]
        key = self._buffer(name)
        self._first.setdefault(key, (name, position))
        before, self._filled[key] = self._filled.get(key, storage), storage
        if before == storage:
            return
        does = f"filled again, for {name!r},"
        self._require("buffer reuse", before, self._uses.final(before), "used", (at, position), does)
        self._uses.refill(before, position)

    def _buffer(self, storage: str) -> tuple[Device, int]:
        return self.plan.step.blobs[storage].device, self._buffers[storage]

    def _finish(self) -> None:
        """What holds only of a whole step, and of what the next one finds."""
        step, uses = self.plan.step, self._uses
        for name in step.external_outputs:
            if uses.written[self._blobs[name]] == _NEVER:
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
        for storage, name in enumerate(self._names):
            gone = uses.freed[storage] >= 0 or storage in uses.refilled
            if gone or uses.written[storage] == _NEVER or name in stays:
                continue
            used = max(uses.final(storage).values())
            if used >= 0:
                what = f"{name!r} is not needed after this, and never freed"
                self._find("never freed", what, name, used, -1, f"free {name} after #{used}")

    # Findings

    def _find(self, kind: FindingKind, what: str, storage: str, first: int, second: int, missing: str) -> None:
        self.findings.append(Finding(kind, what, storage, first, second, missing, self.plan))

    def _gone(self, storage: int, position: int, at: str, how: str) -> None:
        name, uses = self._names[storage], self._uses
        if uses.freed[storage] >= 0:
            what = f"{name!r} is {how} by {at} after it is freed"
            missing = f"a free of {name!r} after #{position}"
            self._find("use after free", what, name, position, uses.freed[storage], missing)
            return
        refilled = uses.refilled[storage]
        filled = self._ops[self.plan.instructions[refilled].op].outputs[0]
        what = f"{name!r} is {how} by {at} after its receive buffer is filled again, for {filled!r}"
        self._find("buffer reuse", what, name, position, refilled, "another buffer for one of the two")

    def _require(
        self, kind: FindingKind, storage: int, uses: Mapping[str, int], did: str, by: tuple[str, int], does: str
    ) -> None:
        """Require that these uses, each on its lane, come before what is done *by* a lane at a position. Where nothing
        orders them, that is a finding, and the sweep goes on as if something did."""
        at, position = by
        clock = self._clocks[at]
        for lane, used in uses.items():
            if lane != at and used > clock.get(lane, -1):
                name = self._names[storage]
                what = f"{name!r} is {does} by {at}, which does not wait until it is {did} by {lane}"
                missing = f"a record by {lane} after #{used}, and a wait for it by {at} before #{position}"
                self._find(kind, what, name, used, position, missing)
                clock[lane] = used

    def _executed(self, number: int) -> int:
        """Where an operator is executed first."""
        return next(i for i, instruction in enumerate(self.plan.instructions) if instruction.op == number)

    def _disordered(self, storage: int, position: int, earlier: int, does: str, did: str) -> None:
        """Two uses are issued in another order than the program's."""
        name = self._names[storage]
        what = f"{name!r} is {does} after it is {did}, but the program has it the other way round"
        self._find("wrong order", what, name, position, earlier, f"#{position} before #{earlier}")

    def _broken(self, what: str) -> PlanError:
        return PlanError(what, where=f"plan {self.plan.name!r}", fix="graphir.verify(plan) lists what else is wrong")
