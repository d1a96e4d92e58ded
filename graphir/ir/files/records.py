"""The file form of nets, programs and plans: what each file may hold, as pydantic reads it.

Pydantic reads effects, slots, groups, interfaces, events and instructions by their own annotations. The records here
are for classes that a file writes in another way: blobs that own their storage, sizes, devices and arguments as text,
and tables. A tuple may be written as a list of its fields, without defaults at the end, or as an object of its fields.
:mod:`.encode` writes records, :mod:`.decode` makes values of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, PositiveInt, StringConstraints

from ..blob import Role
from ..operator import Effects, Issue, Phase, Received
from ..plan import Instruction
from ..program import Interface, Reduction

__all__ = [
    "FIELDS_SINCE",
    "OLDEST",
    "OPTIMIZERS_SINCE",
    "VERSION",
    "AnyFile",
    "BlobRecord",
    "GuardRecord",
    "Header",
    "NetFile",
    "NetRecord",
    "OperatorRecord",
    "PlanFile",
    "ProgramFile",
    "ProgramRecord",
    "SizeText",
    "TensorRecord",
]

VERSION: Final = 5
"""The version of the file format that is written."""

OLDEST: Final = 3
FIELDS_SINCE: Final = 4
OPTIMIZERS_SINCE: Final = 5
"""The oldest version that is read, and the first ones with what :mod:`.upgrade` gives older ones."""

SizeText: TypeAlias = "int | str"
Pattern: TypeAlias = Annotated[str, StringConstraints(pattern=r"^([t_]|\[[t_]*\])*$")]
Digest: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
OneLine: TypeAlias = Annotated[str, StringConstraints(pattern=r"^\P{Cc}*$")]
Versions: TypeAlias = tuple[NonNegativeInt, ...] | None


class Header(BaseModel):
    """The fields that every file has, in every version."""

    model_config = ConfigDict(strict=True, extra="ignore")

    format: str
    version: int


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class BlobRecord(NamedTuple):
    """A :class:`~graphir.ir.blob.Blob`; without ``storage`` the blob owns its bytes."""

    name: str
    device: str
    role: Role
    dtype: str | None = None
    shape: tuple[SizeText, ...] | None = None
    storage: str | None = None
    strides: tuple[SizeText, ...] | None = None
    offset: SizeText = 0


class OperatorRecord(NamedTuple):
    """An :class:`~graphir.ir.operator.Operator`; ``effects`` and ``source`` are positions in the net's tables; None
    where the operator has none. ``of`` is the position of a blob of the net, or a name that no blob of the net has."""

    type: str
    device: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    phase: Phase = "forward"
    module: str = ""
    by: str = ""
    args: Mapping[str, JsonValue] = {}
    source: int | None = None
    of: int | str = ""
    effects: int | None = None
    operands: Pattern | None = None
    results: Pattern | None = None
    output_versions: Versions = None
    input_versions: Versions = None
    seed: int | None = None
    proto: str = ""
    issue: Issue = ""
    received: Received = ""


class NetRecord(_Record):
    """A :class:`~graphir.ir.net.Net`."""

    name: str
    external_inputs: tuple[str, ...] = ()
    external_outputs: tuple[str, ...] = ()
    effects: tuple[Effects, ...] = ()
    sources: tuple[str, ...] = ()
    blobs: tuple[BlobRecord, ...] = ()
    ops: tuple[OperatorRecord, ...] = ()
    gradients: dict[str, str] = {}
    proto: str | None = None


class TensorRecord(NamedTuple):
    """Element type, shape and checksum (CRC-32 of its bytes) of a tensor that is stored beside the file.

    Files of an earlier graphir have no checksums. Their tensors are read without a check.
    """

    dtype: str
    shape: tuple[NonNegativeInt, ...]
    crc32: int | None = None


class GuardRecord(NamedTuple):
    """A :class:`~graphir.ir.guard.Guard`: its text, which does not hold the reason, and the reason."""

    guard: str
    reason: OneLine


class ProgramRecord(_Record):
    """A :class:`~graphir.ir.program.Program`; ``state`` says which tensors are stored beside the file, if any are.

    The program's ``covers`` are the fields ``fixed``, ``guards``, ``only`` and ``recorded`` here.
    """

    name: str
    dims: dict[str, int] = {}
    fixed: OneLine = ""
    replicas: tuple[str, ...] = ("",)
    history: tuple[str, ...] = ()
    guards: tuple[GuardRecord, ...] = ()
    only: OneLine = ""
    recorded: tuple[dict[str, int], ...] = ()
    ahead: NonNegativeInt | None = None
    reduction: Reduction = "mean"
    caveats: tuple[OneLine, ...] = ()
    shares: tuple[PositiveInt, ...] = ()
    notes: dict[str, JsonValue] = {}
    interface: Interface = Interface()
    state: dict[str, TensorRecord] | None = None
    init: NetRecord
    step: NetRecord


class NetFile(_Record):
    """A file that holds a net."""

    format: Literal["graphir.net"]
    version: int
    net: NetRecord


class ProgramFile(_Record):
    """A file that holds a program."""

    format: Literal["graphir.program"]
    version: int
    program: ProgramRecord


class PlanFile(_Record):
    """A file that holds a plan."""

    format: Literal["graphir.plan"]
    version: int
    program: ProgramRecord
    dims: dict[str, int]
    instructions: tuple[Instruction, ...]
    values: dict[str, Digest] = {}
    buffers: dict[str, NonNegativeInt] = {}


AnyFile: TypeAlias = NetFile | ProgramFile | PlanFile
"""What a file may hold."""
