"""Plans: the contract between the passes, which emit them, and the runtime, which executes them.

A plan is a placed program and a list of instructions. Each instruction belongs to a *lane*: the computation of a
device, or its incoming or outgoing copies. Lanes run at the same time; events order them::

    gpu:0.compute:  run x = …     record x                       wait x by gpu:1.copy_in   free x
                                        \\                        /
    gpu:1.copy_in:                 wait x by gpu:0.compute    copy x_gpu_1 <- x   record x   record x_gpu_1
                                                                                                  \\
    gpu:1.compute:                                              wait x_gpu_1 by gpu:1.copy_in   run y = …

The list is one total order in which every record comes before the waits for it, and each lane is its projection; so
executing the list from top to bottom in one thread is correct, and no executor that keeps each lane's order can
deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

from pydantic import NonNegativeInt, StringConstraints

from ..errors import Gone
from .blob import Blob
from .device import Device
from .frozen import FrozenDict, freeze, frozen
from .net import Net, replaced
from .operator import Operator
from .program import Program

__all__ = [
    "KINDS",
    "STREAMS",
    "Event",
    "Instruction",
    "Kind",
    "Plan",
    "issued_as",
    "issued_on",
    "lane",
    "lane_device",
    "parts_of",
    "program_of",
    "sizes_of",
]

Kind: TypeAlias = Literal["run", "copy", "collective", "record", "wait", "free"]
KINDS: Final[tuple[str, ...]] = get_args(Kind)

LaneName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(gpu|cpu):[0-9]{1,6}\.(compute|copy_in|copy_out)$")]
"""``gpu:0.compute``."""

T = TypeVar("T")

STREAMS: Final = ("compute", "copy_in", "copy_out")
"""The lanes of a device; :func:`issued_on` says which one an operator belongs to."""


@lru_cache(maxsize=4096)
def lane(device: Device, stream: str) -> str:
    """``gpu:0.compute``."""
    return f"{device}.{stream}"


def lane_device(lane: str) -> Device:
    """The device of a lane."""
    return Device.parse(lane.partition(".")[0])


def issued_as(op: Operator) -> Kind:
    """The kind of the instructions that execute an operator."""
    if op.kind == "reduce":
        return "collective"
    return "copy" if op.kind == "copy" else "run"


def parts_of(op: Operator) -> int:
    """How many instructions execute an operator: of a collective, one for each result."""
    return len(op.outputs) if issued_as(op) == "collective" else 1


def issued_on(op: Operator, blobs: Mapping[str, Blob], part: int = 0) -> str:
    """The lane that executes an operator, or a part of a collective.

    A run belongs to its device's ``compute``, a copy to the destination's ``copy_in``, or to the source's ``copy_out``
    where the destination is the cpu. A part of a collective belongs to its result's ``copy_in``, so that gradients
    are reduced while others are still computed.
    """
    kind = issued_as(op)
    if kind == "run":
        return lane(op.device, "compute")
    if kind == "collective":
        return lane(blobs[op.outputs[part]].device, "copy_in")
    if op.device.kind == "cpu":
        return lane(blobs[op.inputs[0]].device, "copy_out")
    return lane(op.device, "copy_in")


class Event(NamedTuple):
    """A lane has made or read a version of a blob. Printed ``gpu_0/fc1 by gpu:1.copy_in``.

    A lane may record an event again later; a wait is for the last record before it in the plan's order.
    """

    blob: str
    version: NonNegativeInt
    lane: LaneName


class Instruction(NamedTuple):
    """One instruction of a lane.

    Attributes:
        kind: ``run``, ``copy`` and ``collective`` execute an operator of ``plan.step``; ``record`` and ``wait`` an
            event; ``free`` drops a storage.
        lane: the lane that executes it.
        op: position of the operator in ``plan.step.ops`` (run, copy, collective), else -1.
        part: which result of a collective this makes.
        event: of a record or a wait.
        storage: of a free.
    """

    kind: Kind
    lane: LaneName
    op: int = -1
    part: NonNegativeInt = 0
    event: Event | None = None
    storage: str = ""

    def makes(self, outputs: tuple[T, ...]) -> tuple[T, ...]:
        """The operator's *outputs* that this instruction makes: one for a part of a collective, else all."""
        return outputs[self.part : self.part + 1] if self.kind == "collective" else outputs


@dataclass(frozen=True, repr=False)
class Plan:
    """A placed program, the sizes that its predictions are for, and its instructions in issue order.

    Attributes:
        program: without state and module.
        dims: the value of each dimension that predicted bytes and seconds refer to. The instructions hold for every
            value.
        instructions: the total order. It may differ from the order of ``step.ops``, as long as every operator comes
            after the operators whose values it reads or overwrites.
        values: the value number of each external output and of each state blob that the step changes, as emit found
            it: see :func:`graphir.analysis.values.value_numbers`. Empty in files of an earlier graphir.
        buffers: for storages that a copy makes and the step frees, the number of a receive buffer on their device. An
            executor may allocate the buffer once, as large as its largest storage: each storage is freed before the
            next one is made, and events order the free before the copy.
    """

    program: Program
    dims: Mapping[str, int]
    instructions: tuple[Instruction, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        freeze(self, dims=frozen, values=frozen, buffers=frozen)

    @property
    def name(self) -> str:
        """The program's name."""
        return self.program.name

    @property
    def step(self) -> Net:
        """The program's step."""
        return self.program.step

    @property
    def init(self) -> Net:
        """The program's init."""
        return self.program.init

    @property
    def history(self) -> tuple[str, ...]:
        """The passes that the program went through."""
        return self.program.history

    @property
    def devices(self) -> tuple[Device, ...]:
        """The program's devices."""
        return self.program.devices

    @cached_property
    def lanes(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Each lane's instructions, lanes in device order and in the order of :data:`STREAMS`."""
        found: dict[str, list[Instruction]] = {
            lane(device, stream): [] for device in self.devices for stream in STREAMS
        }
        for instruction in self.instructions:
            found[instruction.lane].append(instruction)
        return FrozenDict({name: tuple(instructions) for name, instructions in found.items() if instructions})

    def with_(self, **changes: Any) -> Plan:  # dataclasses.replace has this signature
        """This plan with some attributes replaced."""
        return replaced(self, changes)

    def __hash__(self) -> int:
        return hash((self.program, len(self.instructions)))

    def __repr__(self) -> str:
        on = ", ".join(self.devices)
        return f"<plan {self.name!r}: {len(self.instructions)} instructions on {on or 'no device'}>"

    def __str__(self) -> str:
        from .text import canonical_text

        return canonical_text(self)

    python = Gone("graphir.runtime.python(plan, lane)")

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        from .files import save

        save(self, path)


def program_of(subject: Program | Plan) -> Program:
    """The program itself, or the one that a plan was emitted from."""
    return subject.program if isinstance(subject, Plan) else subject


def sizes_of(subject: Program | Plan) -> dict[str, int]:
    """The value of each dimension: the captured one, or for a plan the one that it was emitted for."""
    return {**program_of(subject).dims, **subject.dims}
