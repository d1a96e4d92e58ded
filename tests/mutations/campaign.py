"""Every mutant against ``certify`` on one side, and what running it shows on the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from math import ceil
from random import Random
from typing import Any, NamedTuple

import graphir
from graphir.errors import EquivalenceError, GraphirError, VerifyError
from graphir.ir.program import Program
from mutations.arguments import ARGUMENTS
from mutations.imported import IMPORTED
from mutations.judging import ImportedTrial, Trial
from mutations.nested import NESTED
from mutations.nets_of_caffe2 import Imported
from mutations.operands import OPERANDS, ORDER
from mutations.placing import PLACING
from mutations.state import INTERFACE, STATE
from mutations.subjects import Sort, Subject
from mutations.viewing import VIEWING

__all__ = ["KINDS", "KINDS_OF_NETS", "VERDICTS", "Begun", "Verdict", "imported_trials", "trials"]

KINDS = {**OPERANDS, **ORDER, **ARGUMENTS, **VIEWING, **PLACING, **STATE, **INTERFACE}
"""Every kind of mutation of programs, by its name in the table."""

KINDS_OF_NETS = {**IMPORTED, **NESTED}
"""Every kind of mutation of Caffe2's nets."""

VERDICTS = (
    "refused by verify",
    "differs, refused",
    "differs, accepted",
    "equal, accepted",
    "equal, refused",
)
"""What becomes of a mutant; the third is a fault of certify."""

_TRIES = 4
"""How many mutants are made for each that is judged, at most: others are refused by verify, or equal the original."""

_MORE_TRIES = 12
"""The same of kinds of which verify lets few through."""


class Verdict(NamedTuple):
    """What became of one mutant; *error* is certify's, where it is none of those that it may raise."""

    kind: str
    subject: str
    what: str
    verdict: str
    error: str = ""


class Begun(NamedTuple):
    """A mutant is about to be run; *verdict* holds if the process dies of it."""

    verdict: Verdict


def quota(kind: str, sort: Sort) -> int:
    """How many mutants of a kind are judged of one subject, at most."""
    return _QUOTAS.get(kind, _QUOTA).get(sort, 0)


_QUOTA: Mapping[str, int] = {"training": 6, "spread": 5, "forward": 11}
_TRAINED: Mapping[str, int] = {"training": 14, "spread": 9, "forward": 4}
_PLACED: Mapping[str, int] = {"training": 6, "spread": 40}
_RARE: Mapping[str, int] = {"training": 40, "spread": 30, "forward": 40}
_REFUSED: Mapping[str, int] = {"training": 10, "spread": 8, "forward": 16}
_OFTEN_REFUSED = (
    "operand: of another shape",
    "operator moved",
    "update before or after a use",
    "integer: by one",
    "argument left out",
    "element type, format, form",
)
_QUOTAS: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(_OFTEN_REFUSED, _REFUSED),
    **dict.fromkeys(("gradient of another parameter", "update dropped", "update before or after a use"), _TRAINED),
    **dict.fromkeys(("functional for in place", "optimizer's state", "learning rate's group"), _TRAINED),
    "chain of states": _TRAINED,
    **dict.fromkeys(("copy before the update", "copy home dropped", "copy of another blob", "copy dropped"), _PLACED),
    **dict.fromkeys(("collective", "replicas"), _PLACED),
    **dict.fromkeys(("seed ids", "switch turned", "copy as a view", "guards", "index from the other end"), _RARE),
    **dict.fromkeys(("size that agrees when captured", "as_strided and its like"), _RARE),
    **dict.fromkeys(("update before or after a use", "element type, format, form", "arguments"), _RARE),
}
"""Where a kind is rare in some sort of subjects, more are taken of the others."""


def quota_of_nets(kind: str) -> int:
    """How many mutants of a kind are judged of one Caffe2 net, at most: of kinds that need nets that run, more."""
    return 20 if kind in _READ else 120


def trials(
    subject: Subject, share: float = 1.0, seed: int = 0, start: int = 0, kinds: Collection[str] = KINDS
) -> Iterator[Verdict | Begun]:
    """Verdicts on mutants of a subject: of each kind so many that verify lets through, or a share of that. Before
    each one that is run it is announced, for whoever watches a process that may die of it; those before *start* are
    passed over."""
    own = Trial(subject)
    kept: tuple[Program, Trial] = subject.program, own

    def mutants(kind: str) -> Iterator[_Mutant]:
        for what, program, *before in KINDS[kind](subject.program, Random(f"{seed} {subject.name} {kind}")):
            original = before[0] if before else subject.program

            def trial(original: Program = original) -> Trial:
                nonlocal kept
                if original is not subject.program and kept[0] is not original:
                    kept = original, Trial(subject, original)
                return own if original is subject.program else kept[1]

            yield what, program, original, lambda trial=trial, program=program: trial().differs(program)

    yield from _verdicts(subject.name, start, (
        _Share(kind, ceil(share * quota(kind, subject.sort)), _MORE_TRIES if kind in _OFTEN_REFUSED else _TRIES,
               mutants(kind))
        for kind in KINDS if kind in kinds
    ))  # fmt: skip


def imported_trials(net: Imported, share: float = 1.0, seed: int = 0, start: int = 0) -> Iterator[Verdict | Begun]:
    """The same for a Caffe2 net."""
    kept: tuple[Any, ImportedTrial | None] = None, None

    def mutants(kind: str) -> Iterator[_Mutant]:
        read = kind in _READ
        for what, step, init, before in KINDS_OF_NETS[kind](net, Random(f"{seed} {net.name} {kind}")):
            original = before or net.step

            def trial(original: Any = original) -> ImportedTrial:
                nonlocal kept
                trial = kept[1]
                if trial is None or kept[0] is not original or trial.read != (read or net.fed is None):
                    trial = ImportedTrial(net, original, net.init, read=read)
                    kept = original, trial
                return trial

            mutant = _loaded(net, step, init)
            yield what, mutant, trial().program, lambda trial=trial, step=step, init=init: trial().differs(step, init)

    yield from _verdicts(net.name, start, (
        _Share(kind, ceil(share * quota_of_nets(kind)), _TRIES, mutants(kind))
        for kind in KINDS_OF_NETS if net.fed is not None or kind in _SAID
    ))  # fmt: skip


_Mutant = tuple[str, Program | None, Program, Callable[[], bool]]
"""What was changed; the mutant, if it can be loaded; its original; and what tells whether it differs from that."""


class _Share(NamedTuple):
    """The mutants of one kind: at most so many are judged, and at most *tries* times as many made."""

    kind: str
    most: int
    tries: int
    mutants: Iterator[_Mutant]


def _verdicts(name: str, start: int, shares: Iterable[_Share]) -> Iterator[Verdict | Begun]:
    """Verdicts on the mutants of the subject of this name, as :func:`trials` has them."""
    number = 0
    for kind, most, tries, mutants in shares:
        judged = 0
        for what, program, original, differs in islice(mutants, tries * most):
            if judged >= most:
                break
            if program is None or not _well_formed(program):
                yield Verdict(kind, name, what, VERDICTS[0])
                continue
            judged += 1
            number += 1
            if number > start:
                accepted, error = certified(original, program)
                yield Begun(Verdict(kind, name, what, verdict_of(accepted, differs=True), error))
                yield Verdict(kind, name, what, verdict_of(accepted, differs()), error)


_READ = ("Caffe2: text of an argument", *NESTED)
"""Kinds that are told from the original by reading them: no translation takes such arguments."""

_SAID = (*_READ, "Caffe2: argument", "Caffe2: argument named", "Caffe2: device", "Caffe2: control input, name")
"""Kinds of nets that cannot be run: what such a mutant says is what it computes."""


def _loaded(net: Imported, step: Any, init: Any) -> Program | None:
    try:
        return net.program(step, init)
    except GraphirError:
        return None


def _well_formed(program: Program) -> bool:
    try:
        graphir.verify(program, placed=False)
    except VerifyError:
        return False
    return True


def certified(before: Program, after: Program) -> tuple[bool, str]:
    """Whether certify holds two programs for equal; and what it raised, if that is nothing that it says it may."""
    try:
        return graphir.certify(before, after, verified=True).holds, ""  # both were, by us
    except EquivalenceError:
        return False, ""
    except Exception as e:
        return False, f"{type(e).__name__}: {e}".partition("\n")[0]


def verdict_of(accepted: bool, differs: bool) -> str:
    """The verdict in words."""
    return VERDICTS[(2 if accepted else 1) if differs else (3 if accepted else 4)]
