"""What a replication callback is given of one copy of a module: its operators, its blobs, and how to edit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from torch import nn

from graphir.errors import GraphirError, PassError, nearest
from graphir.ir.blob import Blob
from graphir.ir.names import base_name, prefix_of
from graphir.ir.operator import Arg, Operator
from graphir.ir.opset import signature
from graphir.ir.program import Program

from .edits import Operands, StepEdits
from .meetings import Meeting
from .shapes import results_of

__all__ = ["CopiedOperators", "Replica"]

_NO_ARGS: Final[Mapping[str, Arg]] = MappingProxyType({})


class CopiedOperators:
    """The operators of each copy of each module, in program order, as edits leave them.

    Reductions over replicas belong to no copy.
    """

    def __init__(self, program: Program) -> None:
        self._found: dict[tuple[str, str], list[Operator]] = {}
        replicas = frozenset(program.replicas)
        for op in program.step.ops:
            names = op.outputs or op.inputs
            prefix = prefix_of(names[0]) if names else ""
            if op.phase != "reduce" and op.type not in program.step.dialect.stays and prefix in replicas:
                self._found.setdefault((prefix, op.module), []).append(op)

    def of(self, prefix: str, path: str) -> list[Operator]:
        """Those of a module in the replica with this prefix; what changes the list changes what is known."""
        return self._found.setdefault((prefix, path), [])


class Replica:
    """One copy of a module in a replicated program.

    Its edits apply to the operators of this copy alone: the same callback is called for the other copies and makes
    theirs. Each is refused where it cannot be; what a callback did takes effect when all have returned.

    Attributes:
        path: of the module in the model; empty for the model itself.
        copy_id: the position of the replica; 0 is the master copy.
        prefix: of the replica's blobs, such as ``gpu_0/``.
        module: a shallow copy of the module for this replica. It has the model's parameters and buffers, and keeps what
            callbacks set.
    """

    def __init__(
        self, edits: StepEdits, operators: CopiedOperators, path: str, copy_id: int, module: nn.Module | None
    ) -> None:
        self.path, self.copy_id, self.module = path, copy_id, module  # type: ignore[assignment]  # None: internal use
        self.prefix = edits.program.replicas[copy_id]
        self._edits, self._operators = edits, operators
        self._meetings = 0

    module: nn.Module

    def __repr__(self) -> str:
        return f"<copy {self.copy_id} of module {self.path!r}: {len(self._ops)} operators>"

    @property
    def _ops(self) -> list[Operator]:
        return self._operators.of(self.prefix, self.path)

    @property
    def ops(self) -> tuple[Operator, ...]:
        """The module's operators in this replica, in program order: forward, backward and update. Those of modules
        inside of it are theirs."""
        return tuple(self._ops)

    @property
    def blobs(self) -> Mapping[str, Blob]:
        """What these operators read and make, by name."""
        names = [name for op in self._ops for name in (*op.inputs, *op.outputs)]
        return MappingProxyType({name: self._edits.blobs[name] for name in names if name in self._edits.blobs})

    @property
    def copies(self) -> int:
        """How many copies of the module there are."""
        return len(self._edits.program.replicas)

    @property
    def reduction(self) -> Mapping[str, Arg]:
        """How the program reduces gradients: ``reduction`` and ``shares`` as ``AllReduce`` has them. Empty: it sums.
        Without gradients it is the mean."""
        return self._edits.reduction

    def insert_before(
        self,
        op: Operator,
        type: str,
        inputs: Operands,
        args: Mapping[str, Arg] = _NO_ARGS,
        *,
        names: Sequence[str | None] | str = "",
    ) -> Operator:
        """Put an operator directly before *op*.

        It runs on the device of *op*, in its phase, and beside it when passes move that.

        Args:
            op: one of :attr:`ops`, or one that an edit returned.
            type: such as ``"aten.mul.Tensor"``.
            inputs: names of blobs, with or without the replica's prefix, one for each parameter of the type that takes
                tensors: a list where the parameter takes one, None where it is absent.
            args: the arguments that are no tensors, by name.
            names: of the results, with or without the prefix: one for each, None for one that is not wanted. New ones,
                or those of results that edits have taken out. By default they are called after *op*.

        Returns:
            The operator; its ``outputs`` can be read from now on.

        Raises:
            PassError: the operator cannot be there; the message says why.
        """
        return self._insert(op, type, inputs, args, names, after=False)

    def insert_after(
        self,
        op: Operator,
        type: str,
        inputs: Operands,
        args: Mapping[str, Arg] = _NO_ARGS,
        *,
        names: Sequence[str | None] | str = "",
    ) -> Operator:
        """Put an operator directly after *op*; all else as for :meth:`insert_before`."""
        return self._insert(op, type, inputs, args, names, after=True)

    def _insert(
        self,
        op: Operator,
        type: str,
        inputs: Operands,
        args: Mapping[str, Arg],
        names: Sequence[str | None] | str,
        *,
        after: bool,
    ) -> Operator:
        at = self._position(op)
        results = self._results(op, type, names)
        new = self._edits.operator(op, type, self._inputs(inputs), args, results, after=after, module=self.path)
        self._edits.insert(op, new, after=after)
        self._ops.insert(at + after, new)
        return new

    def replace(
        self,
        op: Operator,
        type: str,
        inputs: Operands,
        args: Mapping[str, Arg] = _NO_ARGS,
        *,
        names: Sequence[str | None] | str = "",
    ) -> Operator:
        """Put another operator in the place of *op*; arguments as for :meth:`insert_before`.

        By default it makes what *op* made. What it does not make any more has to be made by an operator that is put in,
        or be read by nobody. It has to overwrite what *op* overwrote.
        """
        at = self._position(op)
        results = self._results(op, type, names) if names else self._same_results(op, type)
        new = self._edits.operator(op, type, self._inputs(inputs), args, results, instead=True, module=self.path)
        self._edits.replace(op, new)
        self._ops[at] = new
        return new

    def rename_inputs(self, op: Operator, names: Mapping[str, str]) -> Operator:
        """Let *op* read other blobs: *names* maps what it reads, with or without the prefix, to what it is to read.

        Raises:
            PassError: it does not read such a blob, or cannot read the other one.
        """
        at = self._position(op)
        renamed = {self._known(old): self._known(new) for old, new in names.items()}
        unread = [old for old in renamed if old not in op.inputs]
        if unread:
            raise PassError(
                f"{op.outputs[0] if op.outputs else op.type!r} does not read {unread[0]!r}",
                fix=f"it reads {', '.join(op.inputs) or 'nothing'}",
            )
        new = self._edits.renamed(op, renamed)
        self._edits.replace(op, new)
        self._ops[at] = new
        return new

    def remove(self, op: Operator) -> None:
        """Take *op* out. What it made has to be made by an operator that is put in, or be read by nobody."""
        at = self._position(op)
        self._edits.remove(op)
        del self._ops[at]

    def all_reduce(self, op: Operator, name: str, *, weighted: bool = False) -> str:
        """Add a blob up over all copies of the module, which meet directly after *op*.

        Every copy has to come: the first call for a copy meets the first calls for all others, and so on.

        Args:
            op: one of :attr:`ops`, or one that an edit returned; in every copy the same one.
            name: of the blob that this copy brings, with or without the prefix.
            weighted: reduce as the program reduces gradients (see :attr:`reduction`); else add up.

        Returns:
            The name of this copy's result, which operators behind *op* can read. An operator that reads it is executed
            once all copies have come.

        Raises:
            PassError: there is no such blob by then.
        """
        self._position(op)
        own = self._known(name)
        version = self._edits.version_at(own, op, after=True)
        meeting = self._meeting(op, own, self.reduction if weighted else _NO_ARGS)
        meeting.given[self.copy_id] = own, version
        self._edits.meet(op, meeting, self.copy_id)
        result = meeting.results[self.copy_id]
        blob = self._edits.blobs[own]
        alone = Operator("AllReduce", (own,), (result,), {}, blob.device, operands="[t]", results="[t]")
        (made,) = results_of(alone, self._edits.blobs, self._edits.program.dims)
        self._edits.blobs[result] = Blob(
            result, made.shape, made.dtype, blob.device, "temporary", result, made.strides, made.offset
        )
        return result

    def _meeting(self, op: Operator, name: str, args: Mapping[str, Arg]) -> Meeting:
        """The meeting whose turn it is; the first copy that comes opens it."""
        number, self._meetings = self._meetings, self._meetings + 1
        of = op.of or (op.outputs[0] if op.outputs else "")
        edits = self._edits

        def opened() -> Meeting:
            wanted = [edits.fresh(f"{prefix}{base_name(name)}_reduced") for prefix in edits.program.replicas]
            return Meeting(self.path, args, wanted, op.phase, of, edits.by)

        return edits.meeting((self.path, number), opened, args)

    def close(self) -> None:
        """Refuse what the callback left undone.

        Raises:
            PassError: something is read that nothing makes any more.
        """
        self._edits.require_made()

    def fresh(self, name: str) -> str:
        """*name* with the replica's prefix, and a number behind it where a blob is called so."""
        return self._edits.fresh(self._own(name))

    # Names

    def _position(self, op: Operator) -> int:
        if self._edits.over:
            raise PassError(
                f"the program with copy {self.copy_id} of module {self.path!r} is made, and is edited no more",
                fix="edit in a callback: passes.replication_callback calls one for the new program",
            )
        for at, own in enumerate(self._ops):
            if own is op:
                return at
        shown = f"{op.type} -> {', '.join(op.outputs)}" if isinstance(op, Operator) else repr(op)[:40]
        raise PassError(
            f"{shown} is no operator of copy {self.copy_id} of module {self.path!r}",
            fix="give one of replica.ops, or what an edit returned in its place",
        )

    def _results(self, op: Operator, type: str, names: Sequence[str | None] | str) -> list[str | None]:
        if names:
            given: list[str | None] = [names] if isinstance(names, str) else list(names)
            return [None if name is None else self._own(name) for name in given]
        base = base_name(op.outputs[0]) if op.outputs else self.path or "model"
        word, count = type.split(".")[1] if "." in type else type, len(_returned(type))
        parts = [f"{base}.{word}"] if count == 1 else [f"{base}.{word}.{k}" for k in range(count)]
        return [self._edits.fresh(self.prefix + part) for part in parts]

    def _same_results(self, op: Operator, type: str) -> list[str | None]:
        """For what a type returns the names of what *op* returns, as far as there are any."""
        unnamed: list[str | None] = [None] * len(_returned(type))
        if op.results is not None:
            made = iter(op.outputs)
            named = [next(made) if mark == "t" else None for mark in op.results]
        else:
            named = list(op.outputs[: len(_returned(op.type))])
        return (named + unnamed)[: len(unnamed)]

    def _own(self, name: str) -> str:
        """A result's name with the prefix."""
        prefix = prefix_of(name)
        if prefix and prefix != self.prefix:
            raise self._foreign(name)
        return name if prefix else self.prefix + name

    def _inputs(self, inputs: Operands) -> list[str | Sequence[str] | None]:
        if isinstance(inputs, str):
            raise PassError(f"inputs are a list of names, not {inputs!r}", fix=f"write [{inputs!r}]")
        return [
            None if item is None else self._known(item) if isinstance(item, str) else [self._known(n) for n in item]
            for item in inputs
        ]

    def _known(self, name: str) -> str:
        """The blob of this copy, or of all, that a name means."""
        blobs, prefix = self._edits.blobs, prefix_of(name)
        if prefix in self._edits.program.replicas and prefix != self.prefix:
            raise self._foreign(name)
        for found in (name, self.prefix + name):
            if found in blobs:
                return found
        raise PassError(
            f"copy {self.copy_id} of module {self.path!r} has no blob {name!r}{nearest(name, self.blobs)}",
            fix="replica.blobs has those of its operators",
        )

    def _foreign(self, name: str) -> PassError:
        return PassError(
            f"{name!r} is another replica's, and edits are of {self.prefix!r} alone",
            fix="copies meet by replica.all_reduce",
        )


def _returned(type: str) -> Sequence[object]:
    """What a type returns.

    Raises:
        PassError: there is no such type, or it returns lists.
    """
    try:
        results = signature(type).results
    except GraphirError as e:
        raise PassError(e.what, fix=e.fix) from None
    if any(result.many for result in results):
        raise PassError(f"{type} returns a list of tensors", fix="use a type that returns each by itself")
    return results
