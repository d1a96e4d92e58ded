"""What a step computes where the last replicas have no rows.

::

    gpu_0/… ──▶ gpu_0/w_grad ─┐             ┌─▶ gpu_0/w_grad_reduced ──▶ update gpu_0/w
                              ├─ AllReduce ─┤            │
    gpu_1/… ──▶ gpu_1/w_grad ─┘             └─▶ gpu_1/…  │ Copy
                                                         └─▶ gpu_2/w_grad_reduced ──▶ update gpu_2/w

A replica without rows executes nothing of its forward and backward:

1. What is empty without its rows, and what is computed of that, is left out.
2. What joins values of several replicas (a reduction, the pieces of a placed module's rows) takes those that are
   there. A reduction knows a replica by its prefix: gradients of parameters alone, such as a regulariser's, do not
   count either where the replica has no rows. What it hands to such a replica is copied from the first one.
3. State that its forward or backward writes, such as running statistics, stays as it is.
4. What its other operators make is left out where nobody reads it any more.

Updates of state stay, so that parameters and optimizer state are the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from ..errors import PlanError
from ..ir.blob import STATE_ROLES, Blob
from ..ir.guard import Guard
from ..ir.names import base_name, prefix_of
from ..ir.net import Net
from ..ir.operator import Operator, map_arg, participants, stored_versions
from ..ir.program import Program
from ..ir.size import BATCH, Polynomial, Shape, Size, add, dimension, size_dims, substitute
from ..ir.text import operator_text

__all__ = ["LeftOut"]

_SPLIT: Final = "aten.split_with_sizes.default"
_CAT: Final = "aten.cat.default"

_Value: TypeAlias = tuple[str, int]
"""A version of a blob."""


class LeftOut:
    """A program without what its last replicas compute.

    Args:
        program: with a batch dimension for each replica.
        count: how many replicas have rows, at least one.

    Attributes:
        program: the program that is left.
        became: for each operator of the given one, the positions of those in its place: none where it is left out; a
            reduction is followed by copies.

    Raises:
        PlanError: a replica has no batch dimension, or an update reads what is left out.
    """

    def __init__(self, program: Program, count: int) -> None:
        for prefix in program.replicas:
            if prefix + BATCH not in program.dims:
                raise PlanError(
                    f"replica {prefix} of program {program.name!r} has no batch dimension",
                    fix="capture the model so that its sizes follow the batch",
                )
        self._whole, self._net = program, program.step
        self._first, self._without = program.replicas[0], frozenset(program.replicas[count:])
        self._rows = frozenset([prefix + BATCH for prefix in self._without])
        self._sizes: dict[Size, Size] = {}
        self._shapes: dict[Shape, Shape] = {}
        self._blobs: dict[str, Blob] = {}
        self._gone = {name for name in self._net.external_inputs if self._is_empty(name)}
        self._stays: dict[_Value, _Value] = {}  # versions of state that are not made, and those that are there instead
        kept = [list(self._executed(op)) for op in self._net.ops]
        outputs = [name for name in self._net.external_outputs if self._is_handed_out(name)]
        self._drop_unread(kept, outputs)
        made = {*outputs, *(name for ops in kept for op in ops for name in op.outputs)}
        outputs = [name for name in self._net.external_outputs if name in made]  # also what an update reads
        self.became: list[tuple[int, ...]] = []
        end = 0
        for ops in kept:
            self.became.append(tuple(range(end, end + len(ops))))
            end += len(ops)
        self.program = self._program([op for ops in kept for op in ops], outputs)

    # Sizes

    def _size(self, size: Size) -> Size:
        """A size without the rows that are missing."""
        if size.__class__ is not Polynomial:
            return size
        found = self._sizes.get(size)
        if found is None:
            found = self._sizes[size] = substitute(size, lambda dim: 0 if dim in self._rows else dimension(dim))
        return found

    def _shape(self, shape: Shape | None) -> Shape | None:
        if shape is None:
            return None
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = tuple(map(self._size, shape))
        return found

    def _blob(self, name: str) -> Blob:
        """A blob with its sizes as they are left."""
        found = self._blobs.get(name)
        if found is None:
            blob = self._net.blobs[name]
            shape, strides, offset = self._shape(blob.shape), self._shape(blob.strides), self._size(blob.offset)
            found = self._blobs[name] = blob._replace(shape=shape, strides=strides, offset=offset)
        return found

    def _is_empty(self, name: str) -> bool:
        """Whether a blob has no elements for want of rows."""
        before, left = self._net.blobs[name].shape or (), self._blob(name).shape or ()
        return any(size == 0 and size != given for given, size in zip(before, left, strict=True))

    # Operators, first to last

    def _executed(self, op: Operator) -> Iterator[Operator]:
        """What is left of an operator, as far as it does not follow from who reads it."""
        if op.kind == "reduce":
            yield from self._reduced(op)
        elif op.type == "graphir.sparse_sum":
            yield from self._sparse_sum(op)
        elif op.type == _SPLIT and self._gone.isdisjoint(op.inputs):
            yield from self._split(op)
        elif op.type == _CAT and not self._gone.isdisjoint(op.inputs) and self._spans_replicas(op.outputs[0]):
            yield from self._joined(op)
        elif self._gone.isdisjoint(op.inputs) and not any(map(self._is_empty, op.outputs)) and not self._is_own(op):
            yield self._resized(op)
        else:
            self._leave(op)

    def _resized(self, op: Operator) -> Operator:
        args = {key: map_arg(arg, self._size) for key, arg in op.args.items()}
        return op if args == op.args else op._replace(args=args)

    def _leave(self, op: Operator) -> None:
        """Leave an operator out: its results are gone, and the state that it writes stays as it was."""
        if op.phase == "update":
            raise PlanError(
                "an update reads what a replica without rows does not compute",
                at=operator_text(op, self._net),
                where=f"program {self._whole.name!r}",
                fix="give each replica rows",
            )
        reads, written = list(op.reads), dict(op.effects.writes)
        views = op.effects.viewing
        for position, (name, version) in enumerate(op.makes):
            if position in views or not self._is_state(name):
                self._gone.add(name)
            else:
                before = reads[written[position]] if position in written else (name, version - 1)
                self._stays[name, version] = self._stays.get(before, before)

    def _is_state(self, name: str) -> bool:
        blobs = self._net.blobs
        return blobs[blobs[name].storage].role in STATE_ROLES

    def _writes_state(self, op: Operator) -> bool:
        views = op.effects.viewing
        return any(self._is_state(name) for k, name in enumerate(op.outputs) if k not in views)

    def _is_own(self, op: Operator) -> bool:
        """Whether an operator writes state of a replica without rows before its update; a placed module has rows."""
        return op.phase in ("forward", "backward") and self._writes_state(op) and self._is_replicas(op.outputs)

    def _is_replicas(self, names: Sequence[str]) -> bool:
        """Whether these are a left out replica's own blobs, of which the first replica has one, too."""
        return any(
            prefix_of(name) in self._without and self._first + base_name(name) in self._net.blobs for name in names
        )

    def _spans_replicas(self, name: str) -> bool:
        """Whether some rows of a blob are those of replicas that have any."""
        return any(
            base_name(dim) == BATCH and dim not in self._rows
            for size in self._net.blobs[name].shape or ()
            for dim in size_dims(size)
        )

    # What joins and splits values of several replicas

    def _taking(self, names: Sequence[str]) -> list[int]:
        """The participants of a reduction that have rows."""
        return [i for i, name in enumerate(names) if prefix_of(name) not in self._without]

    def _reduced(self, op: Operator) -> Iterator[Operator]:
        """A reduction of the participants that have rows, and the copies of its result for those that have none."""
        taking = self._taking(op.inputs)
        made = dict(zip(participants(op), op.makes, strict=True))
        sources = [made[i] for i in made if i in taking]
        if not sources or any(op.inputs[i] in self._gone for i in taking):
            self._leave(op)
            return
        yield self._resized(_of_participants(op, taking, 1, self._net))
        source, read = sources[0]
        for i, (name, version) in made.items():
            if i not in taking:
                yield Operator(
                    "Copy",
                    (source,),
                    (name,),
                    {},
                    self._net.blobs[name].device,
                    op.phase,
                    by=op.by,
                    input_versions=stored_versions([read]),
                    output_versions=stored_versions([version]),
                )

    def _sparse_sum(self, op: Operator) -> Iterator[Operator]:
        """A sum of the sparse gradients that there are; it has as many lookups as they."""
        count = len(op.inputs) // 2
        taking = self._taking(op.inputs[:count])
        if not taking or any(op.inputs[i] in self._gone for k in taking for i in (k, k + count)):
            self._leave(op)
            return
        yield self._resized(_of_participants(op, taking, 2, self._net))
        lookups: Size = 0
        for i in taking:
            (rows, _) = self._blob(op.inputs[i]).shape or (0, 0)
            lookups = add(lookups, rows)
        indices, values = map(self._blob, op.outputs)
        assert indices.shape is not None and values.shape is not None
        self._blobs[indices.name] = indices._replace(shape=(indices.shape[0], lookups))
        self._blobs[values.name] = values._replace(shape=(lookups, values.shape[1]))

    def _joined(self, op: Operator) -> Iterator[Operator]:
        """The rows of the pieces that there are."""
        pieces = [name for name in op.inputs if name not in self._gone]
        if not pieces:
            self._leave(op)
            return
        versions = [version for name, version in op.reads if name not in self._gone]
        yield self._resized(op)._replace(
            inputs=tuple(pieces), input_versions=stored_versions(versions), operands=f"[{'t' * len(pieces)}]"
        )

    def _split(self, op: Operator) -> Iterator[Operator]:
        """Rows split into the pieces that there are."""
        kept = [i for i, name in enumerate(op.outputs) if not self._is_empty(name)]
        sizes = op.args.get("split_sizes")
        if len(kept) == len(op.outputs):
            yield self._resized(op)
        elif not kept or not isinstance(sizes, tuple) or len(sizes) != len(op.outputs):
            self._leave(op)
        else:
            makes = list(op.makes)
            self._gone.update([name for name in op.outputs if self._is_empty(name)])
            yield self._resized(
                op._replace(
                    outputs=tuple([op.outputs[i] for i in kept]),
                    output_versions=stored_versions([makes[i][1] for i in kept]),
                    args={**op.args, "split_sizes": tuple([sizes[i] for i in kept])},
                    results=f"[{'t' * len(kept)}]",
                    effects=op.effects._replace(views=tuple([(k, 0) for k in range(len(kept))])),
                )
            )

    # Who reads what is left

    def _is_handed_out(self, name: str) -> bool:
        """Whether an external output is there: not the loss or a result of a replica without rows."""
        interface, base = self._whole.interface, base_name(name)
        results = {interface.loss, *(fetch.blob for fetch in interface.fetches)}
        of_replica = prefix_of(name) in self._without and base not in interface.placed
        return name not in self._gone and not (of_replica and base in results)

    def _drop_unread(self, kept: list[list[Operator]], outputs: Sequence[str]) -> None:
        """Drop operators of replicas without rows that nobody needs. A write to a storage is needed for whatever is
        read of it later, a view only for itself."""
        needed, storages = set(outputs), {self._net.blobs[name].storage for name in outputs}
        for ops in reversed(kept):
            for op in reversed(ops):
                views = op.effects.viewing
                if not self._may_drop(op) or any(
                    name in needed if k in views else self._net.blobs[name].storage in storages
                    for k, name in enumerate(op.outputs)
                ):
                    needed.update(op.inputs)
                    storages.update([self._net.blobs[name].storage for name in op.inputs])
                else:
                    ops.remove(op)

    def _may_drop(self, op: Operator) -> bool:
        of_replica = bool(op.outputs) and all(prefix_of(name) in self._without for name in op.outputs)
        return of_replica and not self._writes_state(op)

    # The program

    def _program(self, ops: Sequence[Operator], outputs: Sequence[str]) -> Program:
        whole, net = self._whole, self._net
        read = {name for op in ops for name in op.inputs}
        inputs = [name for name in net.external_inputs if name in read or not self._is_input_of_left_out(name)]
        names = {*inputs, *(name for op in ops for name in op.outputs)}
        step = net.with_(
            ops=tuple(self._numbered(ops, names)),
            blobs={name: self._blob(name) for name in net.blobs if name in names},
            external_inputs=tuple(inputs),
            external_outputs=tuple(outputs),
            gradients={a: gradient for a, gradient in net.gradients.items() if a in names and gradient in names},
        )
        return whole.with_(
            step=step,
            dims={dim: value for dim, value in whole.dims.items() if prefix_of(dim) not in self._without},
            covers=whole.covers.with_guards(self._guards()),
        )

    def _is_input_of_left_out(self, name: str) -> bool:
        return self._net.blobs[name].role == "input" and prefix_of(name) in self._without

    def _numbered(self, ops: Sequence[Operator], names: set[str]) -> Iterator[Operator]:
        """The operators, with versions counted without the writes that are left out."""
        latest: dict[str, int] = {}
        numbers: dict[_Value, int] = {}
        written = {name for name, _ in self._stays}
        for op in ops:
            if op.of and op.of not in names:
                op = op._replace(of="")
            if written.isdisjoint(op.inputs) and written.isdisjoint(op.outputs):
                yield op
                continue
            reads = [self._stays.get(value, value) for value in op.reads]
            versions = [numbers.get(value, value[1]) for value in reads]
            for name, version in op.makes:
                numbers[name, version] = latest[name] = latest.get(name, 0) + 1 if name in written else version
            yield op._replace(
                inputs=tuple([name for name, _ in reads]),
                input_versions=stored_versions(versions),
                output_versions=stored_versions([numbers[value] for value in op.makes]),
            )

    def _guards(self) -> Iterator[Guard]:
        """Guards of the rows that there are."""
        for guard in self._whole.covers.guards:
            if all(prefix_of(dim) in self._without for dim in guard.dims):
                continue
            size = self._size(guard.size)
            if isinstance(size, Polynomial):
                yield guard._replace(size=size)


def _of_participants(op: Operator, taking: Sequence[int], lists: int, net: Net) -> Operator:
    """A reduction of some of its participants.

    Args:
        op: takes so many *lists* of operands, each with one of every participant. A collective has as many results.
        taking: the participants.
        lists: see there.
        net: the operator's.
    """
    count = len(op.inputs) // lists
    if len(taking) == count:
        return op
    positions = [k * count + i for k in range(lists) for i in taking]
    reads, makes = list(op.reads), list(op.makes)
    shares, pattern = op.args.get("shares"), f"[{'t' * len(taking)}]"
    args = op.args
    if isinstance(shares, tuple) and shares:
        args = {**args, "shares": tuple([shares[i] for i in taking])}
    op = op._replace(
        inputs=tuple([op.inputs[i] for i in positions]),
        input_versions=stored_versions([reads[i][1] for i in positions]),
        args=args,
        operands=pattern * lists,
    )
    if op.kind != "reduce":
        return op
    made = participants(op)
    left = [k for k, participant in enumerate(made) if participant in taking]
    return op._replace(
        outputs=tuple([op.outputs[k] for k in left]),
        output_versions=stored_versions([makes[k][1] for k in left]),
        device=net.blobs[op.inputs[0]].device,
        results=f"[{''.join(['t' if participant in made else '_' for participant in taking])}]",
    )
