"""The file form of nets, programs and plans: pydantic models that say what each file may hold.

Fields that have their default are left out of files. :mod:`.encode` makes records of values, :mod:`.decode` values of
records.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, StringConstraints

from ..blob import Role
from ..operator import Phase
from ..plan import Kind

__all__ = [
    "VERSION",
    "AnyFile",
    "BlobRecord",
    "EffectsRecord",
    "EventRecord",
    "GroupRecord",
    "Header",
    "InstructionRecord",
    "InterfaceRecord",
    "LeafRecord",
    "NetFile",
    "NetRecord",
    "OperatorRecord",
    "PlanFile",
    "ProgramFile",
    "ProgramRecord",
    "SizeText",
    "TensorRecord",
]

VERSION: Final = 2
"""The version of the file format that is written. Version 1 is read, too: there, value numbers meant something else, so
that a plan's are left out."""

SizeText: TypeAlias = "int | str"
Pairs: TypeAlias = tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
Pattern: TypeAlias = Annotated[str, StringConstraints(pattern=r"^([t_]|\[[t_]*\])*$")]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
OneLine: TypeAlias = Annotated[str, StringConstraints(pattern=r"^\P{Cc}*$")]
Lane: TypeAlias = Annotated[str, StringConstraints(pattern=r"^(gpu|cpu):[0-9]{1,6}\.(compute|copy_in|copy_out)$")]


class Header(BaseModel):
    """What every version of every file begins with."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: str
    version: int


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class BlobRecord(_Record):
    """A :class:`~graphir.ir.blob.Blob`; without ``storage`` it is its own."""

    name: str
    shape: tuple[SizeText, ...] | None = None
    dtype: str | None = None
    device: str
    role: Role
    storage: str | None = None
    strides: tuple[SizeText, ...] | None = None
    offset: SizeText = 0


class EffectsRecord(_Record):
    """An entry of a net's table of effects."""

    writes: Pairs = ()
    views: Pairs = ()
    random: bool = False


class OperatorRecord(_Record):
    """An :class:`~graphir.ir.operator.Operator`; ``effects`` and ``source`` are positions in the net's tables, none:
    it has none."""

    type: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    args: dict[str, JsonValue] = {}
    device: str
    phase: Phase = "forward"
    module: str = ""
    by: str = ""
    seed: int | None = None
    operands: Pattern | None = None
    results: Pattern | None = None
    effects: int | None = None
    input_versions: tuple[NonNegativeInt, ...] | None = None
    output_versions: tuple[NonNegativeInt, ...] | None = None
    proto: str = ""
    source: int | None = None


class NetRecord(_Record):
    """A :class:`~graphir.ir.net.Net`."""

    name: str
    external_inputs: tuple[str, ...] = ()
    external_outputs: tuple[str, ...] = ()
    effects: tuple[EffectsRecord, ...] = ()
    sources: tuple[str, ...] = ()
    blobs: tuple[BlobRecord, ...] = ()
    ops: tuple[OperatorRecord, ...] = ()
    gradients: dict[str, str] = {}
    proto: str | None = None


class LeafRecord(_Record):
    """A :class:`~graphir.ir.program.Slot` or a :class:`~graphir.ir.program.Slot`."""

    blob: str | None = None
    batch_dim: int | None = None
    value: JsonValue = None


class GroupRecord(_Record):
    """A :class:`~graphir.ir.program.ParamGroup`."""

    lr: str
    params: tuple[str, ...] = ()
    options: dict[str, JsonValue] = {}


class InterfaceRecord(_Record):
    """An :class:`~graphir.ir.program.Interface`."""

    arguments: str = ""
    feeds: tuple[LeafRecord, ...] = ()
    loss: str | None = None
    fetches: tuple[LeafRecord, ...] = ()
    results: str | None = None
    module_state: dict[str, str] = {}
    optimizer: str = ""
    optimizer_state: dict[str, dict[str, str]] = {}
    param_groups: tuple[GroupRecord, ...] = ()
    one_replica: bool = False
    gradients: dict[str, str] = {}


class TensorRecord(_Record):
    """Element type, shape and checksum (CRC-32 of its bytes) of a tensor that is stored beside the file.

    A file without checksums, of an earlier graphir, is read without comparing them.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    crc32: int | None = None


class GuardRecord(_Record):
    """A :class:`~graphir.ir.guard.Guard`, but for its reason in its own text."""

    guard: str
    reason: OneLine


class ProgramRecord(_Record):
    """A :class:`~graphir.ir.program.Program`; ``state`` says which tensors are stored beside the file, if any are."""

    name: str
    dims: dict[str, int] = {}
    fixed: OneLine = ""
    replicas: tuple[str, ...] = ("",)
    history: tuple[str, ...] = ()
    guards: tuple[GuardRecord, ...] = ()
    interface: InterfaceRecord = InterfaceRecord()
    state: dict[str, TensorRecord] | None = None
    init: NetRecord
    step: NetRecord


class EventRecord(_Record):
    """A :class:`~graphir.ir.plan.Event`; without ``lane`` it is the instruction's own."""

    blob: str
    version: NonNegativeInt = 0
    lane: Lane | None = None


class InstructionRecord(_Record):
    """A :class:`~graphir.ir.plan.Instruction`."""

    kind: Kind
    lane: Lane
    op: int = -1
    part: NonNegativeInt = 0
    event: EventRecord | None = None
    storage: str = ""


class NetFile(_Record):
    """A file that holds a net."""

    format: Literal["graphir.net"]
    version: Literal[1, 2]
    net: NetRecord


class ProgramFile(_Record):
    """A file that holds a program."""

    format: Literal["graphir.program"]
    version: Literal[1, 2]
    program: ProgramRecord


class PlanFile(_Record):
    """A file that holds a plan."""

    format: Literal["graphir.plan"]
    version: Literal[1, 2]
    program: ProgramRecord
    dims: dict[str, int]
    instructions: tuple[InstructionRecord, ...]
    values: dict[str, Digest] = {}
    buffers: dict[str, NonNegativeInt] = {}


AnyFile: TypeAlias = NetFile | ProgramFile | PlanFile
"""What a file may hold."""
