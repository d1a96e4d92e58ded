"""Tables split by rows or columns: the captured step, with each block of a table as a module of its own.

::

    i, o ─▶ emb ─▶ …      ─▶      i, o ─┬─▶ emb.rows_0 ─┐                  i, o ─┬─▶ emb.columns_0 ─┐
                                        └─▶ emb.rows_1 ─┴─ add ─▶ emb ─▶ …       └─▶ emb.columns_1 ─┴─ cat ─▶ emb ─▶ …

The blocks are placed then as any module is, and what puts them together again is replicated: each replica gets its rows
of every block, and adds them up, or joins them, in the order of the blocks. The update of a table is that of each
block; what reads the gradient of a whole table, a norm or the search for infinities, reads that of its blocks.

Under the table's own names the program is given, and hands back, whole tensors: :class:`graphir.ir.parts.Parts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from graphir.errors import PassError
from graphir.ir.names import fresh
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator
from graphir.ir.opset import ACCUMULATES
from graphir.ir.optypes.own import OWN
from graphir.ir.parts import Parts
from graphir.ir.program import Program

from .sparse_reduction import sparse_gradients
from .table_blocks import LOOKUPS, Table
from .table_draft import Draft
from .table_lookups import BACKWARD, Lookups

__all__ = ["split_tables"]

_ELEMENTWISE: Final = frozenset(
    {ACCUMULATES, "aten.mul.Tensor", "aten.div.Tensor", "aten.neg.default", "aten.clamp.default"}
)
"""Types whose result has an element for each of the split operands', and that read no others but numbers."""

_NORM: Final = "aten.linalg_vector_norm.default"
_SUM: Final = "graphir.sparse_sum"
_OF_MATRICES: Final = "graphir.muon"
"""The update that computes with all of a matrix."""
_FINITE: Final = "aten._amp_foreach_non_finite_check_and_unscale.default"


def split_tables(program: Program, tables: Sequence[Table], by: str) -> Program:
    """The captured program with tables in blocks.

    Args:
        program: captured.
        tables: that are split.
        by: the pass that splits them.

    Raises:
        PassError: a table's optimizer state, or what is computed of its gradient, cannot be split.
    """
    if not tables:
        return program
    splitting = _Splitting(program, tables, by)
    step = splitting.step()
    parts = splitting.parts()
    return program.with_(init=splitting.init(), step=step, interface=replace(program.interface, parts=parts))


class _Splitting:
    """One sweep in program order.

    Args:
        program: captured.
        tables: that are split.
        by: the pass that splits them.
    """

    def __init__(self, program: Program, tables: Sequence[Table], by: str) -> None:
        self.program, self.net = program, program.step
        self.tables = {table.param: table for table in tables}
        self.draft = Draft(self.net, by)
        self.lookups = Lookups(self.draft)
        self.dims: dict[str, int | None] = {}
        self.owners: dict[str, Table] = {}
        for table in tables:
            self.divide(table.param, table, table.dim)
            for name in program.interface.optimizer_state.get(table.param, {}).values():
                self.divide(name, table, _dim_of_state(self.net, name, table))
        self.prepared = _prepared(self.net, self.tables)
        self.sparse = _sparse(self.net, self.tables)

    def divide(self, name: str, table: Table, dim: int | None) -> tuple[str, ...]:
        """Put the blocks' in the place of a blob that is the table's, and read by what is."""
        self.dims[name], self.owners[name] = dim, table
        return self.draft.divide(name, table, dim)

    # Nets

    def step(self) -> Net:
        for op in self.net.ops:
            self.operator(op)
        return self.net.with_(
            ops=tuple(self.draft.ops),
            blobs=self.draft.blobs,
            external_inputs=self.every(self.net.external_inputs),
            external_outputs=self.every(self.net.external_outputs),
            gradients=self.draft.gradients,
        )

    def every(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names, blocks' in the place of what they have."""
        return tuple([part for name in names for part in self.draft.split.get(name, (name,))])

    def init(self) -> Net:
        """The net that loads every block from its place."""
        init, ops = self.program.init, list[Operator]()
        for op in init.ops:
            name = op.outputs[0] if op.outputs else ""
            table = self.owners.get(name)
            if table is None:
                ops.append(op)
                continue
            for block, part in zip(table.blocks, self.draft.split[name], strict=True):
                place: dict[str, Arg] = {} if self.dims[name] is None else {"dim": self.dims[name]}
                if place and block.first:
                    place["first"] = block.first
                module = block.path if op.module else ""
                ops.append(op._replace(outputs=(part,), args={**op.args, **place}, module=module, by=self.draft.by))
        names = [part for name in init.blobs for part in self.draft.split.get(name, (name,))]
        blobs = {name: self.draft.blobs.get(name) or init.blobs[name] for name in names}
        return init.with_(ops=tuple(ops), blobs=blobs, external_outputs=self.every(init.external_outputs))

    def parts(self) -> dict[str, Parts]:
        """What of the interface lives in parts."""
        interface = self.program.interface
        named = [*interface.module_state.values(), *interface.gradients.values()]
        named += [name for own in interface.optimizer_state.values() for name in own.values()]
        split = self.draft.split
        return {name: Parts(self.dims[name], split[name]) for name in dict.fromkeys(named) if name in split}

    # Operators

    def operator(self, op: Operator) -> None:
        """Append what stands in the place of a captured operator."""
        lookup = self.lookups.of.get(op.of)
        if op.type in LOOKUPS and op.inputs[0] in self.tables:
            self.lookups.forward(op, self.tables[op.inputs[0]])
        elif lookup is not None and op.type in BACKWARD:
            self.lookups.backward(op, lookup)
            for name in op.outputs:
                if name in self.draft.split:
                    self.owners[name] = lookup.table
                    self.dims[name] = lookup.table.dim
        elif op.type == "aten.clone.default" and op.outputs[0] in self.sparse:
            self.indices(op, self.sparse[op.outputs[0]])
        elif op.outputs and op.outputs[0] in self.prepared:
            self.prepare(op, self.prepared[op.outputs[0]])
        elif any(name in self.draft.split for name in op.inputs) or any(i in self.sparse for i, _ in _pairs_of(op)):
            self.of_split(op)
        else:
            self.draft.ops.append(op)

    def prepare(self, op: Operator, table: Table) -> None:
        """What a table computes of its inputs, each block does for itself; views follow what they show."""
        if op.effects.shows and op.inputs[op.effects.views[0][1]] not in self.draft.copied:
            self.draft.ops.append(op)
        else:
            self.draft.copy(op, table)

    def indices(self, op: Operator, table: Table) -> None:
        """A copy of the indices of a sparse gradient: blocks of rows have their own, those of columns share it."""
        if table.kind == "columns":
            first = table.blocks[0]
            self.draft.ops.append(op._replace(of=self.draft.split[table.param][0], module=first.path, by=self.draft.by))
        else:
            self.draft.blobs.pop(op.outputs[0])

    def sparse_gradient(self, indices: str, values: str, table: Table, op: Operator) -> None:
        """What each block reads in the place of the sparse gradient of an embedding that is no bag's."""
        like = op._replace(phase="backward")
        maker, found = self.net.producer(indices), self.lookups.gradient_shown(values, table)
        if found is None:
            raise self.unsplittable(op, table)
        if table.kind == "columns":
            self.draft.copied[values] = self.lookups.values(values, *found, like)
            self.leave_out(values, found[1])
        else:
            source = maker.inputs[0] if maker is not None and maker.type == "aten.clone.default" else indices
            self.draft.copied[indices] = self.lookups.slots(source, found[0], like)

    def leave_out(self, values: str, gradient: str) -> None:
        """Leave out what makes *values* of a gradient, as far as nothing else reads it."""
        name, kept = values, {*self.net.gradients.values(), *self.net.external_outputs, gradient}
        while name not in kept and len(self.net.consumers(name)) == 1 and (maker := self.net.producer(name)):
            self.draft.ops.remove(maker)
            del self.draft.blobs[name]
            name = maker.inputs[0]

    def of_split(self, op: Operator) -> None:
        """What reads something that is split: an update, or what is computed of a gradient."""
        table = next(
            table for name in op.inputs if (table := self.owners.get(name) or self.sparse.get(name)) is not None
        )
        for indices, values in _pairs_of(op):
            if indices in self.sparse:
                self.sparse_gradient(indices, values, table, op)
        if op.type == _NORM:
            self.norm(op, table)
        elif op.type == _FINITE:
            self.search(op, table)
        elif op.phase == "update" and op.type in OWN and op.type != _OF_MATRICES:
            self.draft.each(op, table)
        elif op.type == _SUM:
            self.sum(op, table)
        elif op.type in _ELEMENTWISE and self.elementwise(op):
            self.divide(op.outputs[0], table, table.dim)
            self.draft.each(op, table)
        else:
            raise self.unsplittable(op, table)

    def elementwise(self, op: Operator) -> bool:
        """Whether what it reads is split, or a number."""
        return all(name in self.draft.split or self.net.blobs[name].shape == () for name in op.inputs)

    def sum(self, op: Operator, table: Table) -> None:
        """The sum of sparse gradients."""
        for k, name in enumerate(op.outputs):
            self.owners[name], self.dims[name] = table, None
            self.draft.divide(name, table, 1 if k == 1 and table.kind == "columns" else None)
        for k, block in enumerate(table.blocks):
            rows = block.size if table.kind == "rows" else table.shape[0]
            inputs, outputs = self.draft.parts(op.inputs, k), self.draft.parts(op.outputs, k)
            changed = op._replace(inputs=inputs, outputs=outputs, args={**op.args, "rows": rows}, module=block.path)
            self.draft.ops.append(changed._replace(of=self.draft.split[table.param][k], by=self.draft.by))

    def norm(self, op: Operator, table: Table) -> None:
        """The norm of a gradient is that of the norms of its blocks."""
        norms = self.together(op, table, op.outputs[0])
        self.draft.emit(op.type, (norms,), op.outputs, op.args, op, op.module)

    def search(self, op: Operator, table: Table) -> None:
        """Something is infinite in a gradient where it is in a block of it."""
        self.divide(op.outputs[0], table, table.dim)
        found = self.together(op, table, op.outputs[1])
        self.draft.emit("aten.amax.default", (found,), op.outputs[1:], {}, op, op.module)

    def together(self, op: Operator, table: Table, number: str) -> str:
        """Append an operator for each block, and the numbers that they make as one blob."""
        draft = self.draft
        whole = draft.blobs[number]
        numbers = [draft.block_blob(whole, table, block, None) for block in table.blocks]
        for k, block in enumerate(table.blocks):
            outputs = tuple([numbers[k] if name == number else draft.part(name, k) for name in op.outputs])
            inputs = draft.parts(op.inputs, k)
            draft.ops.append(op._replace(inputs=inputs, outputs=outputs, module=block.path, by=draft.by))
        made = fresh(f"{number}s", draft.blobs)
        draft.blobs[made] = whole._replace(name=made, storage=made, shape=(len(numbers),))
        draft.emit("aten.stack.default", numbers, (made,), {}, op, op.module, operands=f"[{'t' * len(numbers)}]")
        return made

    def unsplittable(self, op: Operator, table: Table) -> PassError:
        return PassError(
            f"table {table.module!r} cannot be split: {op.type} reads it, its gradient, or what is made of it, whole",
            fix="place it whole",
        )


def _dim_of_state(net: Net, name: str, table: Table) -> int | None:
    """Along which dimension a table's optimizer state is split as the table is; None: each block has its own.

    Raises:
        PassError: it cannot be split.
    """
    shape = net.blobs[name].shape
    if shape == ():
        return None
    if shape == table.shape or (table.kind == "rows" and shape == table.shape[:1]):
        return table.dim
    raise PassError(
        f"table {table.module!r} cannot be split by {table.kind}: its optimizer state {name!r}, of shape "
        f"[{', '.join(map(str, shape or ()))}], cannot be split with it",
        fix="split it by rows, or place it whole" if table.kind == "columns" else "place it whole",
    )


def _prepared(net: Net, tables: Mapping[str, Table]) -> dict[str, Table]:
    """What modules that are tables compute of their inputs before they look up rows, and the table."""
    found: dict[str, Table] = {}
    for op in reversed(net.ops):
        if op.type in LOOKUPS and op.inputs[0] in tables:
            found.update(dict.fromkeys(op.inputs[1:], tables[op.inputs[0]]))
            continue
        table = next((found[name] for name in op.outputs if name in found), None)
        if table is not None and op.phase == "forward" and f"{op.module}.".startswith(f"{table.module}."):
            found.update(dict.fromkeys(op.inputs, table))
    made = {
        name
        for op in net.ops
        for name in op.outputs
        if name in found and op.phase == "forward" and f"{op.module}.".startswith(f"{found[name].module}.")
    }
    return {name: table for name, table in found.items() if name in made}


def _sparse(net: Net, tables: Mapping[str, Table]) -> dict[str, Table]:
    """The indices of sparse gradients of embeddings that are no bags', and the table."""
    pairs = [(*pair, tables[param]) for pair, param in sparse_gradients(net).items() if param in tables]
    found: dict[str, Table] = {}
    while pairs:
        indices, _, table = pairs.pop()
        maker = net.producer(indices)
        if maker is not None and maker.type == _SUM:
            pairs += [(*pair, table) for pair in _pairs_of(maker)]
        elif maker is None or maker.type not in BACKWARD:
            found[indices] = table
    return found


def _pairs_of(op: Operator) -> list[tuple[str, str]]:
    """The indices and values of the sparse gradients that an operator reads."""
    if op.type == _SUM:
        count = len(op.inputs) // 2
        return list(zip(op.inputs[count:], op.inputs[:count], strict=True))
    return [(op.inputs[1], op.inputs[2])] if op.phase == "update" and op.type.startswith("graphir.sparse_") else []
