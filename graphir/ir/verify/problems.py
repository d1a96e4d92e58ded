"""Broken invariants, collected while something is verified and raised as one error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from ...errors import GraphirError, PlacementError, VerifyError
from ..net import Net
from ..operator import Operator
from ..text import operator_text

__all__ = ["RAW", "Misplaced", "Problem", "raise_all"]

RAW: Final = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""Exceptions of torch and Python for values of wrong types or sizes, such as those that break an invariant."""

_MOST_PRINTED: Final = 20
_MOST_MISPLACED: Final = 5
"""Fewer are printed if every problem is an operand on the wrong device: one fix serves all operands."""

_COPY: Final = "run inject_copies before emit"
_DECLARE: Final = "declare what an operator makes on its device (Blob.on), or move it by shift_modules instead; then "
_BLAME: Final = "verify before and after each pass or edit to see which one broke it"
_ORIGIN: Final = (
    "no pass made this mistake, but the code that built or edited the program; if capture alone made the program, "
    "report a bug"
)


Misplaced: TypeAlias = Literal["", "brings", "makes"]
"""How to mend an operand on the wrong device. *brings*: a copy brings it to the operator or back. *makes*: the operator
makes it on another device than declared, which no copy mends. Empty: the device is right, or something else is wrong
too."""


class Problem(NamedTuple):
    """One broken invariant.

    Attributes:
        what: what is wrong, in one line.
        op: the operator at which it shows, if it does at one.
        net: the net of that operator.
        instruction: position and text of the instruction at which it shows, if it does at one.
        placement: of an operand on the wrong device, whether a copy can mend that; see :data:`Misplaced`.
    """

    what: str
    op: Operator | None = None
    net: Net | None = None
    instruction: str = ""
    placement: Misplaced = ""

    @property
    def at(self) -> str:
        """The operator or instruction, as text."""
        if self.op is None or self.net is None:
            return self.instruction
        try:
            return operator_text(self.op, self.net)
        except (ValueError, LookupError, GraphirError):  # too broken to print in full
            return f"{', '.join(self.op.outputs)} = {self.op.type}({', '.join(self.op.inputs)})"


def raise_all(problems: Sequence[Problem], where: str, *, passes: bool = True) -> None:
    """Raise all *problems* as one error; nothing where there are none.

    Args:
        problems: in the order in which they were found.
        where: what was verified, and the last pass that it went through.
        passes: it went through passes, so that one of them may be to blame.

    Raises:
        PlacementError: every problem is an operand on the wrong device.
        VerifyError: some problem is something else.
    """
    if not problems:
        return
    placement = all(p.placement for p in problems)
    error = PlacementError if placement else VerifyError
    fixes = [_BLAME if passes else _ORIGIN] * (not placement)
    ways = {p.placement for p in problems}
    if ways != {""}:
        fixes.append(_DECLARE * ("makes" in ways) + _COPY)
    if len(problems) == 1:
        raise error(problems[0].what, at=problems[0].at, where=where, fix="; ".join(fixes))
    if ways == {"brings"}:
        what = f"{len(problems)} operands are on other devices than their operators; the first: {problems[0].what}"
        raise error(what, at=problems[0].at, where=where, fix=_COPY)
    most = _MOST_MISPLACED if placement else _MOST_PRINTED
    lines = [f"{len(problems)} invariants are broken"]
    for number, problem in enumerate(problems[:most], 1):
        lines.append(f"  {number:<4} {problem.what}")
        lines += [f"       at {problem.at}"] * bool(problem.at)
    if len(problems) > most:
        lines.append(f"  … and {len(problems) - most} more")
    raise error("\n".join(lines), where=where, fix="; ".join(fixes))
