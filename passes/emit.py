"""Turn a placed program into a plan: lanes, the events that order them, and the frees.

The issue order is the program's order. Within a lane, order is enough; between lanes a dependency needs a record after
the earlier instruction and a wait before the later one. Dependencies are

* read after write: an operand's storage was last written, or the operand's view of it was made, by another lane;
* write after read, write after write: a storage that is overwritten was last used by other lanes;
* free after use: a storage is dropped by its device's compute lane once every lane is done with it.

A dependency that earlier waits imply gets no wait of its own. What each lane knows of the others is kept as a vector
clock, which a record carries and a wait merges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from graphir.analysis.values import value_numbers
from graphir.errors import PassError, nearest
from graphir.ir.blob import STATE_ROLES
from graphir.ir.names import base_name
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program
from graphir.ir.verify import verify
from graphir.plan import Event, Instruction, Plan, issued_as, issued_on, lane

from .base import require_program

__all__ = ["emit"]


def emit(program: Program, dims: Mapping[str, int] | None = None) -> Plan:
    """The plan of a placed program.

    Args:
        program: every operand is where its operator needs it.
        dims: sizes for the plan's predictions, such as ``{"batch": 64}`` (a replica's; a prefixed name sets one
            replica's). The captured sizes by default. The instructions hold for any size.

    Raises:
        PlacementError: an operand is elsewhere; inject_copies puts the copies in.
        PassError: an unknown dimension, or a size below 1.
    """
    require_program(program, "emit")
    verify(program)
    return Plan(
        program=program.with_(state={}, module=None),
        dims=_bind(program, dims or {}),
        instructions=tuple(_Emission(program.step).run()),
        values=value_numbers(program),
    )


def _bind(program: Program, dims: Mapping[str, int]) -> dict[str, int]:
    bound = dict(program.dims)
    for name, size in dims.items():
        named = [dim for dim in bound if name in (dim, base_name(dim))]
        if not named:
            reason = f"; its sizes are fixed: {program.fixed}" if program.fixed else nearest(name, bound)
            raise PassError(
                f"program {program.name!r} has no dimension {name!r}{reason}",
                fix=f"dimensions: {', '.join(bound) or 'none'}",
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PassError(f"dimension {name!r} cannot be {size!r}", fix="sizes are integers from 1 up")
        if size == 1 and named[0] in program.above_one:
            raise PassError(
                f"dimension {name!r} cannot be 1: {program.above_one[named[0]]}", fix="capture the model at 1"
            )
        bound.update(dict.fromkeys(named, size))
    return bound


class _Use(NamedTuple):
    """The last instruction of a lane that touched a storage, and the value that it touched."""

    position: int
    blob: str
    version: int


class _Emission:
    """One sweep in program order.

    Attributes:
        out: the instructions without records; a position is an index into it.
        records: for each position, the events recorded right after it.
        clock: for each lane, the last position of every other lane that it is known to come after.
        known_at: for each position that a record may follow, the clock of its lane just then.
        writer: for each storage, its last writer's lane and use.
        readers: for each storage, every lane's last use since then.
        views: for each view, the lane and the use that made it; it is later than its storage's last write.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.out: list[Instruction] = []
        self.records: dict[int, list[Event]] = {}
        self.clock: dict[str, dict[str, int]] = {}
        self.known_at: list[dict[str, int]] = []
        self.writer: dict[str, tuple[str, _Use]] = {}
        self.readers: dict[str, dict[str, _Use]] = {}
        self.views: dict[tuple[str, int], tuple[str, _Use]] = {}

    def run(self) -> list[Instruction]:
        dead = _last_uses(self.net)
        for i, op in enumerate(self.net.ops):
            kind, blobs = issued_as(op), self.net.blobs
            if kind == "collective":
                for part, made in enumerate(op.makes):
                    self.execute(Instruction(kind, issued_on(op, blobs, part), i, part), op, list(op.reads), [made])
            else:
                self.execute(Instruction(kind, issued_on(op, blobs), i), op, list(op.reads), list(op.makes))
            for storage in dead.get(i, ()):
                self.free(storage)
        instructions = []
        for position, instruction in enumerate(self.out):
            instructions.append(instruction)
            for event in self.records.get(position, ()):
                instructions.append(Instruction("record", instruction.lane, event=event))
        return instructions

    def execute(
        self, instruction: Instruction, op: Operator, reads: list[tuple[str, int]], makes: list[tuple[str, int]]
    ) -> None:
        """Append an instruction that executes an operator, after the waits that it needs."""
        at, blobs = instruction.lane, self.net.blobs
        for name, version in reads:
            self.after_writer(at, blobs[name].storage)
            if (name, version) in self.views:
                self.after(at, *self.views[name, version])
        views = {output for output, _ in op.effects.views}
        written = [made for position, made in enumerate(makes) if position not in views]
        for name, _ in written:
            self.after_users(at, blobs[name].storage)
        position = self.append(instruction)
        for name, version in reads:
            self.readers.setdefault(blobs[name].storage, {})[at] = _Use(position, name, version)
        for name, version in written:
            storage = blobs[name].storage
            self.writer[storage] = at, _Use(position, name, version)
            self.readers[storage] = {}
        self.views.update((makes[i], (at, _Use(position, *makes[i]))) for i in views)
        for name, version in makes:
            if blobs[name].storage != name:
                self.readers.setdefault(blobs[name].storage, {})[at] = _Use(position, name, version)

    def free(self, storage: str) -> None:
        """Drop a storage once every lane is done with it."""
        at = lane(self.net.blobs[storage].device, "compute")
        self.after_writer(at, storage)
        self.after_users(at, storage)
        self.append(Instruction("free", at, storage=storage))

    def after_writer(self, at: str, storage: str) -> None:
        if storage in self.writer:
            self.after(at, *self.writer[storage])

    def after_users(self, at: str, storage: str) -> None:
        self.after_writer(at, storage)
        for reader, use in self.readers.get(storage, {}).items():
            self.after(at, reader, use)

    def after(self, at: str, other: str, use: _Use) -> None:
        """Make lane *at* come after another lane's use of a storage."""
        clock = self.clock.setdefault(at, {})
        if other == at or clock.get(other, -1) >= use.position:
            return
        event = Event(use.blob, use.version, other)
        events = self.records.setdefault(use.position, [])
        if event not in events:
            events.append(event)
        merged = dict(self.known_at[use.position])
        for lane_, position in clock.items():
            merged[lane_] = max(position, merged.get(lane_, -1))
        merged[other] = max(use.position, merged.get(other, -1))
        self.clock[at] = merged
        self.append(Instruction("wait", at, event=event))

    def append(self, instruction: Instruction) -> int:
        self.out.append(instruction)
        self.known_at.append(self.clock.setdefault(instruction.lane, {}))
        return len(self.out) - 1


def _last_uses(net: Net) -> dict[int, list[str]]:
    """For each operator, the storages that nobody needs after it. State and outputs are needed after the step."""
    blobs = net.blobs
    kept = {blobs[name].storage for name in net.external_outputs}
    kept.update(name for name, blob in blobs.items() if blob.role in STATE_ROLES)
    kept.update(name for name in net.external_inputs if blobs[name].device.kind == "cpu")
    last: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        for name in (*op.inputs, *op.outputs):
            last[blobs[name].storage] = i
    dead: dict[int, list[str]] = {}
    for storage, i in last.items():
        if storage not in kept:
            dead.setdefault(i, []).append(storage)
    return dead
