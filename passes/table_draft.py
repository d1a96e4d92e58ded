"""A captured step while its tables are split: the operators so far, and what blocks have in the place of its blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphir.ir.blob import Blob
from graphir.ir.names import fresh
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Arg, Effects, Operator
from graphir.ir.opset import ACCUMULATES

from .table_blocks import Block, Table

__all__ = ["Draft"]


class Draft:
    """The step so far.

    Args:
        net: as captured.
        by: the pass that changes it.

    Attributes:
        ops: so far.
        blobs: of the captured step and of blocks.
        gradients: of activations, those of blocks included.
        split: for each captured blob that is no more, what the blocks have in its place.
        copied: for each captured blob that every block makes for itself, the blocks' ones; the first is it.
    """

    def __init__(self, net: Net, by: str) -> None:
        self.net, self.by = net, by
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = dict(net.blobs)
        self.gradients: dict[str, str] = dict(net.gradients)
        self.split: dict[str, tuple[str, ...]] = {}
        self.copied: dict[str, tuple[str, ...]] = {}

    def part(self, name: str, k: int) -> str:
        """What the k-th block reads in the place of a captured blob: its own, or the one that there is."""
        found = self.split.get(name) or self.copied.get(name)
        return name if found is None else found[k]

    def parts(self, names: Sequence[str], k: int) -> tuple[str, ...]:
        return tuple([self.part(name, k) for name in names])

    def divide(self, name: str, table: Table, dim: int | None) -> tuple[str, ...]:
        """Put blobs of the table's blocks in the place of a captured one.

        Args:
            name: of the captured blob, which has a storage of its own.
            table: whose blocks.
            dim: along which it is split as the table is; None: each block has one of the whole shape.
        """
        whole = self.blobs.pop(name)
        self.gradients.pop(name, None)
        found = tuple([self.block_blob(whole, table, block, dim) for block in table.blocks])
        self.split[name] = found
        return found

    def block_blob(self, whole: Blob, table: Table, block: Block, dim: int | None, name: str = "") -> str:
        """Declare a blob of a block, like a captured one, and return its name."""
        made = fresh(name or table.part_of(whole.name, block), self.blobs)
        shape = whole.shape
        if dim is not None and shape is not None:
            shape = (*shape[:dim], block.size, *shape[dim:][1:])
        self.blobs[made] = whole._replace(name=made, storage=made, shape=shape, strides=None, offset=0)
        return made

    def copy(self, op: Operator, table: Table) -> None:
        """Append an operator for each block, which every one of them runs for itself."""
        for name in op.outputs:
            names = [name]
            blob = self.blobs[name]
            for k, block in list(enumerate(table.blocks))[1:]:
                names.append(fresh(table.part_of(name, block), self.blobs))
                storage = names[k] if blob.storage == name else self.part(blob.storage, k)
                self.blobs[names[k]] = blob._replace(name=names[k], storage=storage)
            self.copied[name] = tuple(names)
        self.each(op, table)

    def each(self, op: Operator, table: Table) -> None:
        """Append an operator once for each block, with what the block has in the place of what it reads and makes."""
        for k, block in enumerate(table.blocks):
            of = self.part(op.of, k) if op.of else ""
            inputs, outputs = self.parts(op.inputs, k), self.parts(op.outputs, k)
            self.ops.append(op._replace(inputs=inputs, outputs=outputs, module=block.path, by=self.by, of=of))

    def emit(
        self,
        type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        args: Mapping[str, Arg],
        like: Operator,
        module: str,
        *,
        of: str = "",
        operands: str | None = None,
        effects: Effects = PURE,
    ) -> None:
        """Append an operator of the phase, the device and the line of another one."""
        self.ops.append(
            Operator(
                type,
                tuple(inputs),
                tuple(outputs),
                args,
                like.device,
                like.phase,
                module,
                self.by,
                operands=operands,
                of=of,
                source=like.source,
                effects=effects,
            )
        )

    def add_up(self, parts: Sequence[str], total: str, like: Operator, module: str, of: str = "") -> None:
        """Append the sum of blobs of the blocks, in their order, as a captured blob."""
        blob, found = self.blobs[total], parts[0]
        for k, part in enumerate(parts[1:]):
            last = k == len(parts) - 2
            made = total if last else fresh(f"{total}.sum_{k}", self.blobs)
            if not last:
                self.blobs[made] = blob._replace(name=made, storage=made, strides=None, offset=0, role="temporary")
            self.emit(ACCUMULATES, (found, part), (made,), {}, like, module, of=of)
            found = made
