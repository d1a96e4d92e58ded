"""Lookups in a table that is split, and their backward: what each block does, and how that is put together.

*By columns* each block does what the table does, with its columns of the weight and of the gradient; the embeddings are
joined along their last dimension.

*By rows* each block looks up its own rows, and has zeros for those of others; the embeddings are added up. Torch has no
such lookups, so they are types of graphir's own (:mod:`graphir.ir.optypes.blocks`). ``block_indices`` tells a block's
lookups from those of others once, for its forward and its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from graphir.ir.blob import Blob
from graphir.ir.names import fresh
from graphir.ir.operator import Arg, Effects, Operator, Symbol
from graphir.ir.size import Size, add, multiply, product

from .table_blocks import BAGS, EMBEDDING, Table
from .table_draft import Draft

__all__ = ["BACKWARD", "Lookup", "Lookups"]

_EMBEDDING_BACKWARD: Final = "aten.embedding_dense_backward.default"
_BAG_BACKWARD: Final = "aten._embedding_bag_backward.default"
_SPARSE_BAG_BACKWARD: Final = "graphir.embedding_bag_backward"
_WEIGHTS_BACKWARD: Final = "aten._embedding_bag_per_sample_weights_backward.default"

BACKWARD: Final = frozenset({_EMBEDDING_BACKWARD, _BAG_BACKWARD, _SPARSE_BAG_BACKWARD, _WEIGHTS_BACKWARD})
"""The types of the backward of a lookup."""

_MEAN: Final = 1


@dataclass(frozen=True)
class Lookup:
    """One lookup in a table that is split.

    Attributes:
        op: as captured.
        table: in which.
        found: each block's embeddings.
        local: by rows, each block's indices.
        sizes: by rows, each block's sizes of bags, where they are averaged.
        slices: by columns, each block's columns of a gradient.
    """

    op: Operator
    table: Table
    found: tuple[str, ...]
    local: list[str] = field(default_factory=list)
    sizes: list[str] = field(default_factory=list)
    slices: dict[str, list[str]] = field(default_factory=dict)

    @property
    def bags(self) -> bool:
        return self.op.type in BAGS

    @property
    def padding(self) -> int:
        """The index that counts for nothing; -1: none."""
        return int(self.op.args.get("padding_idx", -1))  # type: ignore[arg-type]

    @property
    def weights(self) -> tuple[str, ...]:
        """The blob of weights of lookups, where they have some."""
        return self.op.inputs[3:4]

    @property
    def last(self) -> dict[str, Arg]:
        """The argument that says whether the last offset ends the last bag."""
        return {"include_last_offset": True} if self.op.args.get("include_last_offset") else {}


class Lookups:
    """The lookups of a step in tables that are split.

    Args:
        draft: of the step.

    Attributes:
        of: by each of their captured results.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.of: dict[str, Lookup] = {}

    # Forward

    def forward(self, op: Operator, table: Table) -> None:
        """Append a lookup in each block, and what puts them together."""
        by_rows = table.kind == "rows"
        lookup = self._by_rows(op, table) if by_rows else self._by_columns(op, table)
        self.of.update(dict.fromkeys(op.outputs, lookup))
        gradient = self.draft.net.gradients.get(op.outputs[0])
        if gradient is not None and by_rows:
            self.draft.gradients.update(dict.fromkeys(lookup.found, gradient))

    def _by_columns(self, op: Operator, table: Table) -> Lookup:
        draft, result = self.draft, self.draft.blobs[op.outputs[0]]
        last = len(result.shape or ()) - 1
        found = tuple([draft.block_blob(_activation(result), table, block, last) for block in table.blocks])
        for name in op.outputs[1:]:
            draft.divide(name, table, last if draft.blobs[name].shape == result.shape else None)
        for k, block in enumerate(table.blocks):
            outputs = (found[k], *draft.parts(op.outputs[1:], k))
            inputs = draft.parts(op.inputs, k)
            changed = op._replace(inputs=inputs, outputs=outputs, module=block.path, by=draft.by)
            draft.ops.append(changed._replace(of=self._repeated(op, k)))
        draft.emit(
            "aten.cat.default", found, op.outputs[:1], {"dim": last}, op, op.module, of=op.of, operands=_list(found)
        )
        return Lookup(op, table, found)

    def _by_rows(self, op: Operator, table: Table) -> Lookup:
        draft, result = self.draft, self.draft.blobs[op.outputs[0]]
        for name in op.outputs[1:]:
            draft.blobs.pop(name)
        found = tuple([draft.block_blob(_activation(result), table, block, None) for block in table.blocks])
        lookup = Lookup(op, table, found)
        for k, block in enumerate(table.blocks):
            weight, indices, *others = draft.parts(op.inputs, k)
            lookup.local.append(self._local(lookup, k, op, indices, lookup.padding if lookup.bags else -1))
            if op.type == EMBEDDING:
                draft.emit(
                    "graphir.block_embedding",
                    (weight, lookup.local[k]),
                    (found[k],),
                    {},
                    op,
                    block.path,
                    of=self._repeated(op, k),
                )
                continue
            if op.args.get("mode") == _MEAN:
                lookup.sizes.append(self._sizes(lookup, k, indices, others[0]))
            inputs = (weight, lookup.local[k], *self._bag_operands(lookup, k))
            operands = f"ttt{self._pattern(lookup)}"
            draft.emit(
                "graphir.block_embedding_bag",
                inputs,
                (found[k],),
                lookup.last,
                op,
                block.path,
                of=self._repeated(op, k),
                operands=operands,
            )
        draft.add_up(found, op.outputs[0], op, op.module, op.of)
        return lookup

    def _repeated(self, op: Operator, k: int) -> str:
        """What a block's lookup repeats, where a checkpoint looks up rows again."""
        lookup = self.of.get(op.of)
        return op.of if lookup is None else lookup.found[k]

    def _local(self, lookup: Lookup, k: int, like: Operator, indices: str, padding: int, name: str = "local") -> str:
        """Append the indices of a block."""
        draft, table = self.draft, lookup.table
        block = table.blocks[k]
        made = draft.block_blob(_plain(draft.blobs[indices]), table, block, None, f"{lookup.found[k]}.{name}")
        args: dict[str, Arg] = {"first": block.first, "rows": block.size, "num_weights": table.shape[0]}
        if padding >= 0:
            args["padding_idx"] = padding
        of = lookup.found[k] if like.phase == "backward" and like is not lookup.op else self._repeated(like, k)
        draft.emit("graphir.block_indices", (indices,), (made,), args, like, block.path, of=of)
        return made

    def _sizes(self, lookup: Lookup, k: int, indices: str, offsets: str) -> str:
        """Append the sizes of whole bags, without padding."""
        draft, op, block = self.draft, lookup.op, lookup.table.blocks[k]
        made = fresh(f"{lookup.found[k]}.sizes", draft.blobs)
        bags = (draft.blobs[op.outputs[0]].shape or ())[:1]
        draft.blobs[made] = _plain(draft.blobs[offsets])._replace(name=made, storage=made, shape=bags)
        args = dict(lookup.last)
        if lookup.padding >= 0:
            args["padding_idx"] = lookup.padding
        draft.emit("graphir.bag_sizes", (indices, offsets), (made,), args, op, block.path, of=self._repeated(op, k))
        return made

    def _bag_operands(self, lookup: Lookup, k: int) -> tuple[str, ...]:
        """A block's offsets, sizes where it has them, and weights."""
        offsets, *weights = self.draft.parts(lookup.op.inputs[2:4], k)
        return (offsets, *lookup.sizes[k : k + 1], *weights)

    def _pattern(self, lookup: Lookup) -> str:
        """Whether there are sizes and weights."""
        return ("t" if lookup.sizes else "_") + ("t" if lookup.weights else "_")

    # Backward

    def backward(self, op: Operator, lookup: Lookup) -> None:
        """Append what each block does of a lookup's backward."""
        if op.type == _WEIGHTS_BACKWARD:
            self._weights_backward(op, lookup)
        elif lookup.table.kind == "columns":
            self._columns_backward(op, lookup)
        elif op.type == _EMBEDDING_BACKWARD:
            self._embedding_backward(op, lookup)
        else:
            self._bag_backward(op, lookup)

    def _columns_backward(self, op: Operator, lookup: Lookup) -> None:
        draft, table = self.draft, lookup.table
        slices = self.columns_of(op.inputs[0], lookup, op)
        for name in op.outputs:
            draft.divide(name, table, 1 if draft.blobs[name].dtype == draft.blobs[slices[0]].dtype else None)
        for k, block in enumerate(table.blocks):
            inputs = (slices[k], *draft.parts(op.inputs[1:], k))
            outputs = draft.parts(op.outputs, k)
            changed = op._replace(inputs=inputs, outputs=outputs, module=block.path, by=draft.by, of=lookup.found[k])
            draft.ops.append(changed)

    def _embedding_backward(self, op: Operator, lookup: Lookup) -> None:
        draft, table = self.draft, lookup.table
        padding = int(op.args.get("padding_idx", -1))  # type: ignore[arg-type]
        for k, (block, made) in enumerate(zip(table.blocks, draft.divide(op.outputs[0], table, 0), strict=True)):
            local = lookup.local[k]
            if block.first <= padding < block.first + block.size:  # its row is looked up, and has no gradient
                local = self._local(lookup, k, op, draft.part(op.inputs[1], k), padding, "local_without_padding")
            args = {**op.args, "num_weights": block.size, "padding_idx": -1}
            draft.emit(op.type, (op.inputs[0], local), (made,), args, op, block.path, of=lookup.found[k])

    def _bag_backward(self, op: Operator, lookup: Lookup) -> None:
        draft, table = self.draft, lookup.table
        dense = op.type == _BAG_BACKWARD and not op.args.get("sparse")
        for name in op.outputs:
            draft.divide(name, table, 0 if dense else None)
        for k, block in enumerate(table.blocks):
            inputs = (op.inputs[0], lookup.local[k], *self._bag_operands(lookup, k))
            args = dict(lookup.last)
            if dense:
                args["num_weights"] = block.size
            kind = "" if dense else "_sparse"
            draft.emit(
                f"graphir.block_embedding_bag{kind}_backward",
                inputs,
                draft.parts(op.outputs, k),
                args,
                op,
                block.path,
                of=lookup.found[k],
                operands=f"ttt{self._pattern(lookup)}",
            )

    def _weights_backward(self, op: Operator, lookup: Lookup) -> None:
        """The gradient of a lookup's weight is the sum over the blocks."""
        draft, table = self.draft, lookup.table
        total = draft.blobs[op.outputs[0]]
        by_rows = table.kind == "rows"
        slices = [] if by_rows else self.columns_of(op.inputs[0], lookup, op)
        made = []
        for k, block in enumerate(table.blocks):
            made.append(draft.block_blob(total, table, block, None))
            if by_rows:
                weight, _, offsets = draft.parts(op.inputs[1:4], k)
                inputs = (op.inputs[0], weight, lookup.local[k], offsets)
                type_ = "graphir.block_embedding_bag_per_sample_weights_backward"
                draft.emit(type_, inputs, made[-1:], lookup.last, op, block.path, of=lookup.found[k])
            else:
                changed = op._replace(
                    inputs=(slices[k], *draft.parts(op.inputs[1:], k)),
                    outputs=tuple(made[-1:]),
                    module=block.path,
                    by=draft.by,
                )
                draft.ops.append(changed._replace(of=lookup.found[k]))
        draft.add_up(made, total.name, op, table.blocks[0].path, lookup.found[0])

    def columns_of(self, gradient: str, lookup: Lookup, like: Operator) -> list[str]:
        """The blocks' columns of a gradient, as views of it; made where they are first read."""
        draft = self.draft
        found = lookup.slices.get(gradient)
        if found is not None:
            return found
        whole, found = draft.blobs[gradient], []
        dim = len(whole.shape or ()) - 1
        for block, activation in zip(lookup.table.blocks, lookup.found, strict=True):
            made = fresh(f"{activation}_grad", draft.blobs)
            draft.blobs[made] = _columns(whole, made, block.first, block.size)
            args: dict[str, Arg] = {"dim": dim, "start": block.first, "end": block.first + block.size}
            effects = Effects(views=((0, 0),))
            draft.emit("aten.slice.Tensor", (gradient,), (made,), args, like, like.module, effects=effects)
            draft.gradients[activation] = made
            found.append(made)
        lookup.slices[gradient] = found
        return found

    # Sparse gradients of an embedding that is no bag's: indices, and the rows of a gradient as they are

    def gradient_shown(self, values: str, table: Table) -> tuple[Lookup, str] | None:
        """The lookup in a table, and the gradient of what it found, that *values* show, or are a copy of where its rows
        lie apart; None where they are neither."""
        net, name = self.draft.net, values
        while True:
            for lookup in self.of.values():
                if lookup.table is table and net.gradients.get(lookup.op.outputs[0]) == name:
                    return lookup, name
            maker = net.producer(name)
            if maker is None or not (maker.effects.shows or maker.type == "aten.clone.default"):
                return None
            name = maker.inputs[maker.effects.views[0][1] if maker.effects.shows else 0]

    def slots(self, indices: str, lookup: Lookup, like: Operator) -> tuple[str, ...]:
        """Append the indices of each block's sparse gradient."""
        blocks = range(len(lookup.table.blocks))
        return tuple([self._local(lookup, k, like, indices, lookup.padding, "slots") for k in blocks])

    def values(self, values: str, lookup: Lookup, gradient: str, like: Operator) -> tuple[str, ...]:
        """Append each block's columns of the values of a sparse gradient."""
        draft, table, found = self.draft, lookup.table, []
        blob = draft.blobs[values]
        for part, activation, block in zip(
            self.columns_of(gradient, lookup, like), lookup.found, table.blocks, strict=True
        ):
            dense = fresh(f"{part}.dense", draft.blobs)
            draft.blobs[dense] = draft.blobs[part]._replace(name=dense, storage=dense, strides=None, offset=0)
            layout: dict[str, Arg] = {"memory_format": Symbol("contiguous_format")}
            draft.emit("aten.clone.default", (part,), (dense,), layout, like, block.path, of=activation)
            found.append(draft.block_blob(blob, table, block, 1))
            draft.blobs[found[-1]] = draft.blobs[found[-1]]._replace(storage=dense, role=draft.blobs[dense].role)
            args: dict[str, Arg] = {"size": draft.blobs[found[-1]].shape}
            effects = Effects(views=((0, 0),))
            draft.emit("aten.view.default", (dense,), found[-1:], args, like, block.path, effects=effects)
        return tuple(found)


def _activation(blob: Blob) -> Blob:
    """What a block's embeddings are like."""
    return blob._replace(role="activation")


def _plain(blob: Blob) -> Blob:
    """A blob that an operator makes of another one."""
    return blob._replace(role="temporary", strides=None, offset=0)


def _list(names: Sequence[str]) -> str:
    return f"[{'t' * len(names)}]"


def _columns(whole: Blob, name: str, first: int, size: int) -> Blob:
    """A view of some columns of a blob."""
    shape = whole.shape or ()
    strides = whole.strides or tuple([product(shape[d + 1 :]) for d in range(len(shape))])
    offset: Size = add(whole.offset, multiply(first, strides[-1]))
    return whole._replace(name=name, shape=(*shape[:-1], size), strides=strides, offset=offset)
