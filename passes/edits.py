"""A step in the making: operators are put in, replaced and taken out, and replicas meet.

Every edit stands at an operator of the step, in its *slot*, so that edits of many modules are cheap. An operator that
is put in runs on its anchor's device and in its phase, and beside it wherever passes move that. What is made and read
is looked at as soon as it is known, so that an edit that cannot be is refused where it is made, and the rest of
the invariants when the step is finished and verified.

A *meeting* is a reduction over the replicas' copies of one blob. Each copy comes to it behind an operator of its own,
and the step's order is mended so that all have come before anyone goes on (:mod:`.meetings`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

from graphir.errors import PassError
from graphir.ir.blob import Blob
from graphir.ir.names import fresh
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator, flattened, stored_versions
from graphir.ir.opset import effects_of, without_defaults
from graphir.ir.program import Program
from graphir.ir.text import operator_text

from .meetings import Meeting, Ticket, in_order
from .replicas import gradient_reduction
from .shapes import results_of

__all__ = ["Operands", "StepEdits"]

Operands: TypeAlias = "Sequence[str | Sequence[str] | None]"
"""What an operator reads, one entry for each parameter of its type that takes tensors: a blob's name, a list of them
where the parameter takes a list, or None where it is absent."""


class StepEdits:
    """The step of a replicated program while it is edited.

    Args:
        program: replicated.
        by: the pass that edits.
    """

    def __init__(self, program: Program, by: str) -> None:
        self.program, self.by = program, by
        self.net = program.step
        self.blobs: dict[str, Blob] = dict(self.net.blobs)
        self._slots: list[list[Operator | Ticket]] = [[op] for op in self.net.ops]
        self._slot_of = {id(op): i for i, op in enumerate(self.net.ops)}
        self._makers: dict[str, list[int]] = {}
        self._readers: dict[str, int] = {}
        self._named: dict[str, int] = {}
        for i, op in enumerate(self.net.ops):
            self._count(op, 1)
            for name in op.outputs:
                self._makers.setdefault(name, []).append(i)
        self._numbered: dict[tuple[str, int], Meeting] = {}
        self._reduced: dict[str, None] = {}
        self._dropped: dict[tuple[str, int], Operator] = {}
        self.changed, self.over = False, False

    # What one edit does

    def insert(self, anchor: Operator, new: Operator, *, after: bool) -> None:
        """Put an operator directly before or after *anchor*."""
        slot = self._slot_of[id(anchor)]
        self._slots[slot].insert(self._behind(slot, anchor) if after else self._place(slot, anchor), new)
        self._enter(new, slot)

    def replace(self, old: Operator, new: Operator) -> None:
        """Put *new* in the place of *old*. What it does not make any more has to be made otherwise, or be unread."""
        slot = self._slot_of.pop(id(old))
        self._slots[slot][self._place(slot, old)] = new
        self._leave(old, slot)
        self._enter(new, slot)

    def remove(self, old: Operator) -> None:
        """Take an operator out. What it made has to be made otherwise, or be unread."""
        slot = self._slot_of.pop(id(old))
        del self._slots[slot][self._place(slot, old)]
        self._leave(old, slot)

    def meet(self, anchor: Operator, meeting: Meeting, copy: int) -> None:
        """Let a copy come to a meeting directly after *anchor*, and after meetings to which it comes there already."""
        slot = self._slot_of[id(anchor)]
        self._slots[slot].insert(self._behind(slot, anchor), meeting.ticket(copy))
        self.changed = True

    def meeting(self, key: tuple[str, int], make: Callable[[], Meeting], args: Mapping[str, Arg]) -> Meeting:
        """The meeting of this module and number; the first copy to ask has it made.

        Raises:
            PassError: the copies want to reduce in different ways.
        """
        found = self._numbered.get(key)
        if found is None:
            found = self._numbered[key] = make()
            self._reduced.update(dict.fromkeys(found.results))
        elif found.args != args:
            raise PassError(
                f"copies of module {key[0]!r} come to an all_reduce weighted and not",
                fix="call all_reduce in the same way for every copy",
            )
        return found

    def renamed(self, op: Operator, names: Mapping[str, str]) -> Operator:
        """*op* reading other blobs, as far as *names* has them.

        Raises:
            PassError: it cannot read them, or overwrites or shows what it would no longer read.
        """
        aliased = {source for _, source in (*op.effects.writes, *op.effects.views)}
        for position, name in enumerate(op.inputs):
            if name in names and position in aliased:
                raise PassError(
                    f"{op.type} gives a new value to {name!r}, or a view of it", fix="replace the operator instead"
                )
        inputs = tuple([names.get(name, name) for name in op.inputs])
        reads = [
            self.version_at(new, op, after=False) if new != name else version
            for new, (name, version) in zip(inputs, op.reads, strict=True)
        ]
        new = op._replace(inputs=inputs, input_versions=stored_versions(reads), by=self.by)
        views = op.effects.viewing
        for position, given in enumerate(results_of(new, self.blobs, self.program.dims)[: len(op.outputs)]):
            blob = self.blobs[op.outputs[position]]
            if position not in views and (blob.shape, blob.dtype) != (given.shape, given.dtype):
                raise PassError(f"{op.type} would give {given} for {blob.name!r}", fix="read blobs of the same shapes")
        return new

    def _place(self, slot: int, op: Operator) -> int:
        return next(k for k, other in enumerate(self._slots[slot]) if other is op)

    def _behind(self, slot: int, op: Operator) -> int:
        """The place behind an operator, and behind the meetings to which a copy comes after it."""
        items, at = self._slots[slot], self._place(slot, op) + 1
        while at < len(items) and isinstance(items[at], Ticket):
            at += 1
        return at

    def _enter(self, op: Operator, slot: int) -> None:
        self._slot_of[id(op)] = slot
        self._count(op, 1)
        for name, version in op.makes:
            self._dropped.pop((name, version), None)
            self._makers.setdefault(name, []).append(slot)
        self.changed = True

    def _leave(self, op: Operator, slot: int) -> None:
        self._count(op, -1)
        for name, version in op.makes:
            self._makers[name].remove(slot)
            self._dropped[name, version] = op
        self.changed = True

    def _count(self, op: Operator, by: int) -> None:
        for name in op.inputs:
            self._readers[name] = self._readers.get(name, 0) + by
        if op.of:
            self._named[op.of] = self._named.get(op.of, 0) + by

    # How an operator is made

    def operator(
        self,
        anchor: Operator,
        type: str,
        inputs: Operands,
        args: Mapping[str, Arg],
        names: Sequence[str | None],
        *,
        after: bool = False,
        instead: bool = False,
        module: str,
    ) -> Operator:
        """A new operator at *anchor*; blobs that are new are declared.

        Args:
            anchor: it stands before this one, or *after* it, or in its place (*instead*).
            type: such as ``aten.mul.Tensor``.
            inputs: with prefixes; of blobs that are made before.
            args: the arguments that are no tensors.
            names: of the results, with the prefix: new ones, or those of what edits have taken out; None for one that
                is not wanted.
            module: the path that it belongs to.

        Raises:
            PassError: there is no such type, it does not take this, or it does what an edit may not do.
        """
        flat, pattern = flattened(inputs, str)
        versions = [self.version_at(name, anchor, after=after) for name in flat]
        stored = without_defaults(type, args)
        results = "".join("_" if name is None else "t" for name in names)
        wanted = [name for name in names if name is not None]
        effects = effects_of(type, stored, pattern, len(flat), results)
        overwritten = self._overwritten(anchor if instead else None, type, flat, effects.writes, len(wanted))
        plain = "_" not in results
        op = Operator(
            type=type,
            inputs=tuple(flat),
            outputs=(*wanted, *[name for name, _ in overwritten]),
            args=stored,
            device=anchor.device,
            phase=anchor.phase,
            module=module,
            by=self.by,
            seed=anchor.seed if instead and effects.random else None,
            operands=None if set(pattern) <= {"t"} else pattern,
            results=None if plain else results,
            effects=effects,
            input_versions=stored_versions(versions),
            output_versions=stored_versions([*[0] * len(wanted), *[version for _, version in overwritten]]),
            of=anchor.of or ("" if instead else self._beside(anchor)),
            source=anchor.source,
        )
        if effects.random and op.seed is None:
            raise PassError(
                f"{type} draws random numbers, for which the step has no seed id",
                fix="draw them in the model, so that a capture gives them one",
            )
        self._declare(op, len(wanted), anchor.outputs if instead else ())
        return op

    def _overwritten(
        self,
        old: Operator | None,
        type: str,
        inputs: Sequence[str],
        writes: Iterable[tuple[int, int]],
        count: int,
    ) -> list[tuple[str, int]]:
        """What an operator overwrites beyond its results: that which the one overwrote in whose place it is put."""
        before = {} if old is None else {name: version for name, version in old.makes if version}
        found = [inputs[source] for output, source in writes if output >= count]
        if any(output < count for output, _ in writes) or set(found) != set(before):
            what = f"{type} overwrites {', '.join(found) or 'its operand'}" if found else f"{type} overwrites nothing"
            other = f", the operator in whose place it is put {', '.join(before) or 'nothing'}" if old else ""
            raise PassError(what + other, fix="use the functional form, or overwrite what the operator overwrote")
        return [(name, before[name]) for name in found]

    def _beside(self, anchor: Operator) -> str:
        """What an operator belongs to that is put in at one which computes activations or gradients."""
        return anchor.outputs[0] if anchor.outputs and anchor.phase in ("forward", "backward") else ""

    def _declare(self, op: Operator, count: int, free: Sequence[str]) -> None:
        """Declare what is new of an operator's results; what is there already has to be of the same geometry.

        Args:
            op: makes so many results.
            count: see there.
            free: names that it may make, beside those that are new or that edits have taken out.
        """
        made, sources = results_of(op, self.blobs, self.program.dims), dict(op.effects.views)
        for position, name in enumerate(op.outputs[:count]):
            given, old = made[position], self.blobs.get(name)
            storage = self.blobs[op.inputs[sources[position]]].storage if position in sources else name
            if old is None:
                role = self.blobs[storage].role if storage != name else "temporary"
            elif name not in free and (name, 0) not in self._dropped:
                raise PassError(f"{name!r} is made already", fix="give the result another name")
            elif (old.shape, old.dtype) != (given.shape, given.dtype):
                before = f"{old.dtype}[{','.join(map(str, old.shape or ()))}]"
                raise PassError(
                    f"{op.type} gives {given} for {name!r}, which is {before}", fix="give the result another name"
                )
            else:
                role = old.role
            device = self.blobs[storage].device if storage != name else op.device
            self.blobs[name] = Blob(name, given.shape, given.dtype, device, role, storage, given.strides, given.offset)

    def version_at(self, name: str, anchor: Operator, *, after: bool) -> int:
        """The version of a blob that is there at *anchor*.

        Raises:
            PassError: there is no such blob, or none of its versions is made by then.
        """
        if name in self._reduced:
            return 0
        if name not in self.blobs:
            raise PassError(f"there is no blob {name!r}", fix="replica.blobs has those of the module's operators")
        slot = self._slot_of[id(anchor)]
        makers = [i for i in self._makers.get(name, ()) if i <= slot]
        found = 0 if name in self.net.external_inputs else -1
        for i in sorted(set(makers)):
            for other in self._slots[i]:
                if i == slot and other is anchor and not after:
                    break
                if isinstance(other, Operator):
                    found = max([found, *[version for made, version in other.makes if made == name]])
                if i == slot and other is anchor:
                    break
        if found < 0:
            raise PassError(
                f"{name!r} is not made before {anchor.outputs[0] if anchor.outputs else anchor.type!r}",
                fix="put the operator in behind the one that makes it",
            )
        return found

    def fresh(self, name: str) -> str:
        """*name*, or with a number behind it where it is taken."""
        while (found := fresh(name, self.blobs)) in self._reduced:
            name = f"{name}_1"
        return found

    @cached_property
    def reduction(self) -> Mapping[str, Arg]:
        """How the program reduces gradients; see :func:`.replicas.gradient_reduction`."""
        return gradient_reduction(self.program)

    # What is left

    def require_made(self) -> None:
        """Refuse where something is read, handed back or run beside that edits have taken out.

        Raises:
            PassError: it is.
        """
        for (name, version), op in self._dropped.items():
            if version:
                later = [v for i in set(self._makers.get(name, ())) for v in self._versions(i, name) if v > version]
                read = self._reads(name, version)
                if later or read:
                    raise self._missing(name, op, "overwritten later" if later else "read")
            elif self._readers.get(name):
                raise self._missing(name, op, "read")
            elif self._named.get(name):
                raise self._missing(name, op, "what other operators run beside")
            elif name in self.net.external_outputs:
                raise self._missing(name, op, "handed back")

    def _versions(self, slot: int, name: str) -> list[int]:
        ops = [op for op in self._slots[slot] if isinstance(op, Operator)]
        return [version for op in ops for made, version in op.makes if made == name]

    def _reads(self, name: str, version: int) -> bool:
        if not self._readers.get(name):
            return False
        ops = (op for slot in self._slots for op in slot if isinstance(op, Operator))
        return any(read == (name, version) for op in ops for read in op.reads)

    def _missing(self, name: str, op: Operator, how: str) -> PassError:
        return PassError(
            f"{name!r} is {how}, and nothing makes it any more",
            at=operator_text(op, self.net),
            fix="let an operator make it that is put in, or rename what reads it first",
        )

    def finished(self) -> Net:
        """The step, in an order in which every copy has come to a meeting before anyone goes on.

        Raises:
            PassError: copies have not come to a meeting, or there is no such order.
        """
        self.over = True
        meetings = list(self._numbered.values())
        for meeting in meetings:
            meeting.require_all(self.blobs)
        ops = in_order([item for slot in self._slots for item in slot], meetings, self.blobs)
        made = dict.fromkeys([*self.net.external_inputs, *[name for op in ops for name in op.outputs]])
        pairs = self.net.gradients.items()
        return self.net.with_(
            ops=tuple(ops),
            blobs={name: self.blobs[name] for name in made},
            gradients={name: grad for name, grad in pairs if name in made and grad in made},
        )
