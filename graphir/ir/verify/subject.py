"""Checks that a function was given one of graphir's values, and finds the one to look at."""

from __future__ import annotations

from typing import Final, Protocol, overload

from ...errors import GraphirError
from ..net import Net
from ..plan import Plan
from ..program import Program

__all__ = ["Planned", "require", "subject_of"]

_FIX: Final = "capture one, or graphir.load its file, or graphir.parse its text"


class Planned(Protocol):
    """An object with a plan: a session, or a compiled step, whose plan is the one that was used last."""

    @property
    def plan(self) -> Plan: ...


@overload
def subject_of(given: Plan | Planned) -> Plan: ...
@overload
def subject_of(given: Program | Plan | Planned) -> Program | Plan: ...
@overload
def subject_of(given: Net | Program | Plan | Planned) -> Net | Program | Plan: ...
def subject_of(given: object) -> object:
    """The plan of an object that has one; anything else as it is."""
    found = getattr(given, "plan", None)
    return found if isinstance(found, Plan) else given


def require(subject: object, kinds: tuple[type, ...], function: str) -> None:
    """Refuse a subject that is of none of *kinds*; the error names the *function* that was called.

    Raises:
        GraphirError: *subject* is of none of *kinds*.
    """
    if not isinstance(subject, kinds):
        *others, last = (kind.__name__ for kind in kinds)
        wanted = f"{', '.join(others)} or {last}" if others else last
        fix = _FIX
        if Plan in kinds and isinstance(subject, Program):
            fix = "passes.emit makes a plan of a program"
        elif isinstance(getattr(subject, "plan", None), Plan):
            fix = f"give the plan, {type(subject).__name__.lower()}.plan"
        raise GraphirError(f"{function} takes a {wanted}, not {type(subject).__name__}", fix=fix)
