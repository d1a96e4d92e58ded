"""Static proof that a plan runs right, however its lanes interleave.

Proven are, from the instructions and from what :class:`.executor.Executor` guarantees, nothing else:

* order (:mod:`.ordering`): every two uses of a storage, one of which writes or frees it, are ordered by lanes and
  events, and as the program orders them; what is read was written; what is dropped is not needed any more;
* progress (:mod:`.progress`): every wait has its record, no lanes wait for each other, and all lanes take part in
  collectives in one order;
* values (:func:`graphir.analysis.values.value_numbers`): outputs and state are computed as the plan promises.

Two steps that follow each other need no more. The second one starts after all of the first, so what is ordered within a
step is ordered across them; what a step leaves behind for the next is state, which must not be dropped, and receive
buffers, which must not hold anything that is needed after the step.
"""

from __future__ import annotations

from typing import Final

from graphir.analysis.values import value_numbers
from graphir.errors import PlanError, counted
from graphir.ir.plan import Plan
from graphir.ir.verify import RAW, Planned, require, subject_of

from .findings import Finding
from .ordering import Ordering
from .progress import collectives_in_order, unsatisfied_waits

__all__ = ["check", "require_sound"]

_SHOWN: Final = 3
"""Findings that an error shows."""


def check(plan: Plan | Planned) -> list[Finding]:
    """What can go wrong when a plan runs, in steps that follow each other; nothing if it is proven that nothing can. A
    session and a compiled step stand for their plan.

    Linear in the instructions, for a fixed number of lanes. A plan without value numbers, from a file of an earlier
    graphir, is not held against any.

    Raises:
        GraphirError: it is no plan.
        PlanError: its instructions or its program make no sense: ``graphir.verify`` says more.
    """
    plan = subject_of(plan)
    require(plan, (Plan,), "check")
    ordering = Ordering(plan)
    ordering.run()
    findings = unsatisfied_waits(plan, ordering.unsatisfied)
    findings += collectives_in_order(plan, ordering.collectives)
    findings += ordering.findings
    if plan.values and not any(finding.kind == "never written" for finding in findings):
        findings += _wrong_values(plan, ordering)
    return findings


def require_sound(plan: Plan) -> None:
    """Refuse a plan with findings: an error shows the first few.

    Raises:
        PlanError: :func:`check` finds something, or raises one.
    """
    findings = check(plan)
    if not findings:
        return
    shown = "\n".join(str(finding) for finding in findings[:_SHOWN]).replace("\n", "\n       ")
    more = f"\n       and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    raise PlanError(
        f"the plan is not sound: {counted(len(findings), 'finding')}",
        at=shown + more,
        where=f"plan {plan.name!r}",
        fix="emit the plan again; runtime.check(plan) lists all findings",
    )


def _wrong_values(plan: Plan, ordering: Ordering) -> list[Finding]:
    issue = ((i.op, i.part) for i in plan.instructions if i.kind in ("run", "copy", "collective"))
    try:
        computed = value_numbers(plan.program, issue)
    except RAW as e:
        raise PlanError(
            f"the values that the plan computes cannot be followed: {type(e).__name__} {e}",
            where=f"plan {plan.name!r}",
            fix="graphir.verify(plan) lists what is wrong",
        ) from e
    findings = []
    for name in dict.fromkeys((*plan.values, *computed)):
        promised, made = plan.values.get(name), computed.get(name)
        if promised == made:
            continue
        last = ordering.last_write(name) if name in plan.step.blobs else -1
        if promised is None:
            what = f"{name!r} is overwritten, but the plan promises that it stays as it is"
        elif made is None:
            what = f"{name!r} does not get the value that the plan promises"
        else:
            what = f"{name!r} has another value than the plan promises"
        missing = f"operators that make value {promised or 'it had'}, where these make {made or 'nothing'}"
        findings.append(Finding("wrong value", what, name, -1, last, missing, plan))
    return findings
