"""From an issue order to a plan's instructions: the lanes that execute it, and the events that order them.

Within a lane, order is enough; between lanes a dependency needs a record after the earlier instruction and a wait
before the later one. Dependencies are

* read after write: an operand's storage was last written, or the operand's view of it was made, by another lane;
* write after read, write after write: a storage that is overwritten was last used by other lanes;
* free after use: a storage is dropped by its device's compute lane once every lane is done with it.

A copy that receives into a buffer is a write after the uses of the storage that the buffer held before.

A dependency that earlier waits imply gets no wait of its own. What each lane knows of the others is kept as a vector
clock, which a record carries and a wait merges. Transfers that are issued as a group are waited for as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from ..ir.net import Net
from ..ir.plan import Event, Instruction, issued_as, issued_on, lane
from .buffers import Buffers
from .hazards import Hazards

__all__ = ["Issue", "instructions"]

Issue: TypeAlias = "tuple[int, ...] | str"
"""An operator by position, several transfers that belong together, or a storage that is freed."""


def instructions(net: Net, order: Sequence[Issue], found: Hazards, buffers: Buffers) -> tuple[Instruction, ...]:
    """The instructions that issue a net's operators and frees in an order.

    Args:
        net: a placed step.
        order: every operator once, and in any order that respects the hazards.
        found: the net's hazards.
        buffers: of the net. Copies receive into those, of the storages that they know to be freed; the buffers' numbers
            are known afterwards.
    """
    return tuple(_Emission(net, found, buffers).run(order))


class _Use(NamedTuple):
    """The last instruction of a lane that touched a storage, and the value that it touched."""

    lane: str
    position: int
    blob: str
    version: int


class _Part(NamedTuple):
    """An instruction that executes an operator, or a part of one, and the values that it reads and makes."""

    instruction: Instruction
    reads: list[tuple[str, int]]
    written: list[tuple[str, int]]
    views: list[tuple[str, int]]


class _Emission:
    """One sweep in issue order.

    Attributes:
        out: the instructions without records; a position is an index into it.
        records: for each position that somebody waits for, the event recorded right after it.
        clock: for each lane, the last position of every other lane that it is known to come after.
        known_at: for each position that a record may follow, the clock of its lane just then. An instruction that
            touches only storages of its own lane is no such position, and is not in the attributes below: no lane waits
            for it.
        writer: for each storage, its last writer.
        users: for each storage, every lane's last use since then, the write included.
        views: for each view, the use that made it; it is later than its storage's last write.
        last_of_group: for each position in a group of transfers, the last use of its lane in the group.
        buffers: what copies receive into.
    """

    def __init__(self, net: Net, found: Hazards, buffers: Buffers) -> None:
        self.net, self.buffers, self.touched, self.shared = net, buffers, found.touched, found.shared
        self.out: list[Instruction] = []
        self.records: dict[int, Event] = {}
        self.clock: dict[str, dict[str, int]] = {}
        self.known_at: dict[int, dict[str, int]] = {}
        self.writer: dict[str, _Use] = {}
        self.users: dict[str, dict[str, _Use]] = {}
        self.views: dict[tuple[str, int], _Use] = {}
        self.last_of_group: dict[int, _Use] = {}

    def run(self, order: Sequence[Issue]) -> list[Instruction]:
        for issue in order:
            if isinstance(issue, str):
                self.free(issue)
            elif self.shared.isdisjoint(self.touched[issue[0]]):
                self.append(Instruction("run", lane(self.net.ops[issue[0]].device, "compute"), issue[0]))
            else:
                self.execute([part for i in issue for part in self.parts(i)])
        instructions, done = [], 0
        for position in sorted(self.records):
            instructions += self.out[done : position + 1]
            event, done = self.records[position], position + 1
            instructions.append(Instruction("record", event.lane, event=event))
        return instructions + self.out[done:]

    def parts(self, i: int) -> list[_Part]:
        """The instructions that execute an operator."""
        op, blobs = self.net.ops[i], self.net.blobs
        kind, reads, makes = issued_as(op), list(op.reads), list(op.makes)
        if kind == "collective":
            lanes = [issued_on(op, blobs, part) for part in range(len(makes))]
            return [_Part(Instruction(kind, at, i, n), reads, makes[n : n + 1], []) for n, at in enumerate(lanes)]
        views = op.effects.viewing
        written = [made for position, made in enumerate(makes) if position not in views]
        return [_Part(Instruction(kind, issued_on(op, blobs), i), reads, written, [makes[n] for n in sorted(views)])]

    def execute(self, parts: Sequence[_Part]) -> None:
        """Append instructions. On each lane, the waits that any of its instructions needs come first."""
        needed: dict[str, list[_Use]] = {}
        for part in parts:
            needed.setdefault(part.instruction.lane, []).extend(self.needed(part))
        for at, uses in needed.items():
            self.after(at, uses)
        positions = [self.append(part.instruction) for part in parts]
        for position, part in zip(positions, parts, strict=True):
            self.known_at[position] = self.clock.setdefault(part.instruction.lane, {})
            self.note(position, part)
        if len(parts) > 1:
            ends = {part.instruction.lane: (p, part) for p, part in zip(positions, parts, strict=True)}
            for position, part in zip(positions, parts, strict=True):
                end, last = ends[at := part.instruction.lane]
                self.last_of_group[position] = _Use(at, end, *last.written[0])

    def needed(self, part: _Part) -> Iterator[_Use]:
        """The uses that an instruction has to come after."""
        blobs = self.net.blobs
        for name, version in part.reads:
            storage = blobs[name].storage
            if storage in self.writer:
                yield self.writer[storage]
            if (name, version) in self.views:
                yield self.views[name, version]
        for name, _ in part.written:
            yield from self.uses_of(blobs[name].storage)
        if part.instruction.kind == "copy" and part.written[0][1] == 0:
            earlier = self.buffers.receive(part.written[0][0])
            yield from self.uses_of(earlier) if earlier is not None else ()

    def note(self, position: int, part: _Part) -> None:
        """What an appended instruction has touched."""
        at, blobs = part.instruction.lane, self.net.blobs
        for name, version in part.reads:
            self.users.setdefault(blobs[name].storage, {})[at] = _Use(at, position, name, version)
        for name, version in part.written:
            use = self.writer[blobs[name].storage] = _Use(at, position, name, version)
            self.users[blobs[name].storage] = {at: use}
        for name, version in part.views:
            use = self.views[name, version] = _Use(at, position, name, version)
            self.users.setdefault(blobs[name].storage, {})[at] = use

    def free(self, storage: str) -> None:
        """Drop a storage once every lane is done with it."""
        at = lane(self.net.blobs[storage].device, "compute")
        if storage in self.shared:
            self.after(at, self.uses_of(storage))
        self.append(Instruction("free", at, storage=storage))
        self.buffers.free(storage)

    def uses_of(self, storage: str) -> Iterable[_Use]:
        return self.users.get(storage, {}).values()

    def after(self, at: str, uses: Iterable[_Use]) -> None:
        """Make lane *at* come after other lanes' uses; the latest first, since it may imply the others."""
        whole = [self.last_of_group.get(use.position, use) for use in uses if use.lane != at]
        for use in sorted(whole, key=lambda use: -use.position):
            if self.clock.setdefault(at, {}).get(use.lane, -1) < use.position:
                self.wait(at, use)

    def wait(self, at: str, use: _Use) -> None:
        """Make lane *at* come after a use by another lane, and so after everything that that lane had waited for by
        then."""
        event = self.records.setdefault(use.position, Event(use.blob, use.version, use.lane))
        merged = dict(self.known_at[use.position])
        for other, position in self.clock[at].items():
            if position > merged.get(other, -1):
                merged[other] = position
        merged[use.lane] = use.position
        self.clock[at] = merged
        self.append(Instruction("wait", at, event=event))

    def append(self, instruction: Instruction) -> int:
        self.out.append(instruction)
        return len(self.out) - 1
