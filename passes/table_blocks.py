"""Which tables are split, and into which blocks of rows or columns.

A block reads as a module inside of its table: ``emb.rows_0`` has the parameter ``emb.rows_0.weight``, as ``emb`` has
``emb.weight``. So it is placed, moved on and listed as any module.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from graphir.errors import PassError
from graphir.ir.device import Device, gpu
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program
from graphir.ir.size import bind_shape

from .module_patterns import roots

__all__ = ["BAGS", "EMBEDDING", "KINDS", "LOOKUPS", "Block", "Kind", "Table", "tables_of"]

Kind: TypeAlias = Literal["rows", "columns"]

KINDS: Final = ("rows", "columns")
"""How a table is split: into blocks of its rows, or of the columns of its embeddings."""

EMBEDDING: Final = "aten.embedding.default"

BAGS: Final = frozenset({"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"})

LOOKUPS: Final = BAGS | {EMBEDDING}
"""The types that look up rows of a table, their first operand."""

_MAX: Final = 2
"""The mode of an embedding bag that takes maxima."""


class Block(NamedTuple):
    """A block of a table.

    Attributes:
        path: as a module.
        first: its first row or column.
        size: how many it has.
        device: where it is placed.
    """

    path: str
    first: int
    size: int
    device: Device


class Table(NamedTuple):
    """A table that is split.

    Attributes:
        module: its path.
        param: its blob.
        kind: rows or columns.
        shape: rows and columns.
        blocks: in their order.
    """

    module: str
    param: str
    kind: Kind
    shape: tuple[int, int]
    blocks: tuple[Block, ...]

    @property
    def dim(self) -> int:
        """The dimension of the parameter that is split."""
        return KINDS.index(self.kind)

    def part_of(self, name: str, block: Block) -> str:
        """What a block has in the place of a blob of the table."""
        own = name.removeprefix(self.module)
        return block.path + (own if own[:1] in ("", ".", "_") and own != name else f".{name}")


def tables_of(
    program: Program,
    claimed: Mapping[str, str],
    splits: Mapping[str, tuple[Kind, Sequence[int]]],
    devices: Sequence[Device],
) -> list[Table]:
    """The tables that patterns name, in the order of their paths.

    Args:
        program: captured.
        claimed: by module that is split, the pattern that holds for it.
        splits: by pattern, how its tables are split, and the gpus of their blocks.
        devices: of the replicas.

    Raises:
        PassError: a module is no table, or what cannot be split so; a device has no replica.
    """
    for pattern, (_, numbers) in splits.items():
        for device in map(gpu, numbers):
            if device not in devices:
                raise PassError(
                    f"{pattern!r} cannot be placed on {device}: no replica is there",
                    fix=f"devices: {', '.join(devices)}",
                )
    owned = _owned(program, claimed)
    readers = _readers(program.step, {name for names in owned.values() for name in names})
    return [
        _table(program, module, owned.get(module, []), readers, *splits[claimed[module]])
        for module in dict.fromkeys(roots(claimed).values())
    ]


def _owned(program: Program, modules: Container[str]) -> dict[str, list[str]]:
    """The parameters and buffers of each of some modules, and of those inside of it."""
    named = set(program.interface.module_state.values())
    found: dict[str, list[str]] = {}
    for name in program.step.external_inputs:
        path = name
        while name in named and (path := path.rpartition(".")[0]):
            if path in modules:
                found.setdefault(path, []).append(name)
    return found


def _readers(step: Net, states: Container[str]) -> dict[str, list[Operator]]:
    """The operators that read a storage, updates aside."""
    found: dict[str, list[Operator]] = {}
    for op in step.ops:
        if op.phase != "update":
            for storage in dict.fromkeys(step.blobs[name].storage for name in op.inputs):
                if storage in states:
                    found.setdefault(storage, []).append(op)
    return found


def _table(
    program: Program,
    module: str,
    own: Sequence[str],
    readers: Mapping[str, Sequence[Operator]],
    kind: Kind,
    devices: Sequence[int],
) -> Table:
    """A module as a table in blocks.

    Raises:
        PassError: it cannot be one.
    """
    step = program.step
    lookups = [op for name in own for op in readers.get(name, ()) if op.type in LOOKUPS and op.inputs[0] == name]
    if len(own) != 1 or not lookups:
        has = ", ".join(map(repr, own)) or "no parameter that the step reads"
        raise PassError(
            f"module {module!r} is no embedding table: it has {has}",
            fix="rows and columns are of an nn.Embedding or nn.EmbeddingBag alone; place other modules whole",
        )
    _require_lookups(readers[own[0]], module, own[0])
    for op in lookups:
        _require_splittable(op, module, kind)
    rows, columns = bind_shape(step.blobs[own[0]].shape or (), program.dims)
    return Table(module, own[0], kind, (rows, columns), _blocks(module, kind, (rows, columns), devices))


def _require_lookups(readers: Sequence[Operator], module: str, param: str) -> None:
    """Refuse a table that is read otherwise than by lookups of its module, and updates."""
    for op in readers:
        inside = op.module == module or op.module.startswith(f"{module}.")
        if op.type == "aten.embedding_renorm_.default":
            raise PassError(
                f"table {module!r} cannot be split: it has max_norm, by which lookups change its rows",
                fix="place it whole, or leave max_norm out",
            )
        if not inside:
            raise PassError(
                f"table {module!r} cannot be split: its parameter {param!r} is one of {op.module!r}, too",
                fix="place both modules whole on one device, or none",
            )
        if op.type not in LOOKUPS and op.type != "aten._embedding_bag_per_sample_weights_backward.default":
            raise PassError(
                f"table {module!r} cannot be split: its parameter {param!r} is read by {op.type}",
                fix="place it whole; what is split may be looked up only",
            )


def _require_splittable(op: Operator, module: str, kind: Kind) -> None:
    """Refuse lookups whose blocks do not add up."""
    if kind == "columns":
        return
    if op.type in BAGS and op.args.get("mode") == _MAX:
        raise PassError(
            f"table {module!r} cannot be split by rows: its bags take the maximum, which blocks cannot add up",
            fix="split it by columns, or place it whole",
        )
    if op.args.get("scale_grad_by_freq"):  # torch divides a row of bags by how often another row is looked up
        raise PassError(
            f"table {module!r} cannot be split by rows: it has scale_grad_by_freq",
            fix="split it by columns, or place it whole",
        )


def _blocks(module: str, kind: Kind, shape: tuple[int, int], devices: Sequence[int]) -> tuple[Block, ...]:
    """The blocks by torch.chunk's rule: of equal size, but the last one, which may be smaller."""
    length, count = shape[KINDS.index(kind)], len(devices)
    size = max(-(-length // count), 1)
    ends = [*range(0, length, size), length]
    if len(ends) - 1 < count:
        raise PassError(
            f"table {module!r} has {length} {kind}: {len(ends) - 1} blocks by torch.chunk's rule, not {count}",
            fix=f"give at most {len(ends) - 1} devices, or place it whole",
        )
    return tuple(
        Block(f"{module}.{kind}_{k}", first, end - first, gpu(device))
        for k, (device, (first, end)) in enumerate(zip(devices, pairwise(ends), strict=True))
    )
