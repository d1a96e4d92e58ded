"""Proofs that two programs compute the same values, bit for bit, in every step and at every size.

Both are executed on symbolic values (:mod:`.values`): ``init`` once, then one step for all, from whatever states are
equal for ever (:mod:`.induction`). What a session reads of a program beside its nets is compared as it stands
(:mod:`.interfaces`). docs/design/certificates.md has the statement that is proved, what it assumes, and the argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..collector import collector_paused
from ..errors import EquivalenceError, counted
from ..ir.operator import Operator
from ..ir.optypes.table import operator_type
from ..ir.plan import Plan, program_of
from ..ir.program import Program
from ..ir.text import operator_text
from ..ir.verify import Planned, require, subject_of, verify
from .diff import words
from .induction import Induction, by_induction
from .interfaces import InterfaceDifference, interface_difference, phase_difference
from .meaning import canonical_type
from .parting import place_of, refuse
from .values import lasting

__all__ = ["Certificate", "certify"]


@dataclass(frozen=True)
class Certificate:
    """Two programs compute the same values, whatever the inputs, in every step and at every size that both admit.

    Attributes:
        before: name of the first program.
        after: name of the second one.
        values: the value number of each external output of a step, and of each parameter, buffer, constant and
            optimizer state after it. Numbers mean something within one certificate only.
        compared: how many values of each kind were compared.
        caveats: operators whose bits differ from run to run by nature, or that read memory which nobody wrote, and why;
            and those that run on the host instead of a gpu, or the other way round.
        assumptions: what the proof takes for granted of kernels, as far as it made use of it.
    """

    before: str
    after: str
    values: Mapping[str, int] = field(repr=False)
    compared: Mapping[str, int]
    caveats: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Always true: where a proof fails there is an error instead."""
        return True

    def __str__(self) -> str:
        counts = ", ".join(counted(count, kind.removesuffix("s")) for kind, count in self.compared.items())
        lines = [f"{self.after!r} computes what {self.before!r} computes, bit for bit: {counts}, in every step"]
        lines += [f"  given that {assumption}" for assumption in self.assumptions]
        return "\n".join(lines + [f"  but {caveat}" for caveat in self.caveats])


def certify(
    before: Program | Plan | Planned, after: Program | Plan | Planned, *, verified: bool = False
) -> Certificate:
    """Prove that two programs compute the same values.

    External outputs, parameters, buffers, constants and optimizer states are compared by name, and so is everything
    that a session reads of a program. Where a Caffe2 step names no external outputs, what it leaves unread are its
    outputs. Meant for passes that move things; replication changes values. A refusal says that there is no proof: two
    programs that compute the same by other operators, or in another order of operands, are refused too.

    Args:
        before: a program; or a plan, a session or a compiled step, which stand for their program.
        after: the same.
        verified: both are known to be well-formed. Proofs are about well-formed programs only, so without this they are
            verified first (not where operands are).

    Raises:
        GraphirError: one of them is neither.
        EquivalenceError: they don't; names the first blob that differs, and shows both derivations.
        VerifyError: one of them is not well-formed.
    """
    before, after = subject_of(before), subject_of(after)
    for subject in (before, after):
        require(subject, (Program, Plan), "certify")
    with collector_paused():
        return _certificate(program_of(before), program_of(after), verified)


def _certificate(a: Program, b: Program, verified: bool) -> Certificate:
    if not verified:
        verify(a, placed=False)
        verify(b, placed=False)
    outputs = a.step.results
    _refuse_missing(a, b, outputs)
    _refuse_difference(interface_difference(a, b), b)
    proof = by_induction((a, b), (outputs, outputs))
    if not proof.holds:
        refuse(a, b, outputs, proof)
    _refuse_difference(phase_difference(a, b), b)
    _refuse_other_calls(a, b, proof)
    values = {**proof.states[0], **proof.outputs[0]}
    compared = {"outputs": len(proof.outputs[0]), "states": len(proof.states[0])}
    return Certificate(a.name, b.name, values, compared, _caveats(b, proof), _assumptions(a, b))


def _refuse_difference(different: InterfaceDifference | None, after: Program) -> None:
    if different is not None:
        raise EquivalenceError(
            f"{different.what} differ: {words(different.before)} before, {words(different.after)} after",
            where=place_of(after),
            fix=different.fix,
        )


def _refuse_other_calls(before: Program, after: Program, proof: Induction) -> None:
    """Raise an error where the second program computes anything that the first does not, though nobody reads it, or
    leaves out an operator without a result, or one that takes from what no blob holds: by each, a session of one of
    them may fail where the other's does not."""
    old, new = proof.calls
    added = next((op for call, op in new.items() if call not in old), None)
    is_ordered = before.step.dialect.is_ordered
    needed = ((call, op) for call, op in old.items() if not op.outputs or is_ordered(op))
    dropped = next((op for call, op in needed if call not in new), None)
    op, program = (added, after) if added is not None else (dropped, before)
    if op is not None:
        nothing, which = (
            ("no operator of the first program", "second") if op is added else ("nothing any more", "first")
        )
        raise EquivalenceError(
            f"{nothing} computes what this operator of the {which} does, which may be where it fails",
            at=operator_text(op, program.init if any(op is other for other in program.init.ops) else program.step),
            where=place_of(after),
            fix="leave it as it is; what is moved, copied or repeated computes nothing new",
        )


def _refuse_missing(before: Program, after: Program, outputs: Collection[str]) -> None:
    """Raise an error where something that is compared is in one of the programs only."""
    fix = "keep its name"
    if before.replicas != after.replicas:
        fix = "certify programs with the same replicas: replicate averages gradients, which changes values"
    theirs: Collection[str] = after.step.external_outputs
    if outputs != before.step.external_outputs:  # they stay in a workspace
        theirs = [name for name in outputs if name in after.step.blobs]
    states = lasting(before.step)
    for kind, mine, its in (("output", outputs, theirs), ("state", states, lasting(after.step))):
        old, new = set(mine), set(its)
        missing = [(name, "second") for name in mine if name not in new]
        if kind == "output":  # a state that only the second one has is a copy, compared by what reads it
            missing += [(name, "first") for name in its if name not in old]
        for name, which in missing[:1]:
            raise EquivalenceError(
                f"{kind} {name!r} is missing from the {which} program", where=place_of(after), fix=fix
            )


def _caveats(after: Program, proof: Induction) -> tuple[str, ...]:
    found: dict[str, int] = {}
    for op in after.step.ops:
        functional = canonical_type(op.type)
        if operator_type(functional).nondeterministic:
            found[functional] = found.get(functional, 0) + 1
    caveats = [f"{type} ({count} operators) {operator_type(type).nondeterministic}" for type, count in found.items()]
    unwritten = proof.unwritten[1]
    for type, count in Counter(op.type for op in after.step.ops if not unwritten.isdisjoint(op.outputs)).items():
        why = "leaves memory unwritten, of which a part may be read before it is written"
        if not operator_type(type).unwritten:
            why = "makes what is read beyond its elements, where nobody writes"
        caveats.append(f"{type} ({count} operators) {why}")
    return (*caveats, *_computed_elsewhere(*proof.calls))


def _computed_elsewhere(before: Mapping[int, Operator], after: Mapping[int, Operator]) -> Iterator[str]:
    """The operators that compute on the host what a gpu did, and the other way round."""
    moved: dict[bool, Counter[str]] = {}
    for call, op in after.items():
        old = before.get(call)
        if old is None or old.device.kind == op.device.kind or op.effects.shows or op.type == "graphir.load":
            continue
        moved.setdefault(op.device.is_host, Counter())[op.type] += 1
    for on_host, types in moved.items():
        here, there = ("the host", "a gpu") if on_host else ("a gpu", "the host")
        listed = ", ".join(f"{type} ({count} operators)" for type, count in types.items())
        yield f"{listed}: on {here} instead of {there}, so bits are those of {here}'s kernels"


def _calls(program: Program, type: str) -> int:
    """How many operators of a type a step has."""
    return sum(op.type == type for op in program.step.ops)


def _assumptions(before: Program, after: Program) -> tuple[str, ...]:
    """What is taken for granted of the kernels of these programs, as far as the proof made use of it."""
    found = ["operators of one type give the same bits from the same operands in the same layout, with equal threads"]
    types = {op.type for op in before.step.ops}, {op.type for op in after.step.ops}
    in_place = sorted(type for type in types[0] ^ types[1] if canonical_type(type) != type)
    if in_place:
        found.append(f"in-place forms give the bits of their functional operators: {', '.join(in_place)}")
    norms = sorted(type for type in types[0] ^ types[1] if operator_type(type).batch_norm)
    if norms:
        found.append(f"a batch norm gives the same bits whether it updates statistics or not: {', '.join(norms)}")
    apart = sorted(type for type in types[1] if operator_type(type).parts_apart)
    if any(_calls(before, type) != _calls(after, type) for type in apart):
        found.append(f"parts of a result have the bits that they have together: {', '.join(apart)}")
    own = sorted(type for type in types[1] if operator_type(type).registered)
    if own:
        found.append(f"registered operators do what their schemas say, and nothing else: {', '.join(own)}")
    return tuple(found)
