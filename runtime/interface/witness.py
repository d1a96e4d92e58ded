"""Asking a captured program's witness about the dimensions of each replica's share."""

from __future__ import annotations

from collections.abc import Callable

from graphir.errors import SessionError
from graphir.ir.program import Program
from graphir.ir.size import Dims

__all__ = ["witness_of"]


def witness_of(given: Program, program: Program) -> Callable[[Dims], None]:
    """What raises a CoverageError where the step of the captured module is not that of *program*.

    Args:
        given: the program that was captured, or what passes made of it.
        program: the plan's.

    Raises:
        SessionError: *given* was not captured in this process, or another program was.
    """
    where = "Session(...)"
    if not isinstance(given, Program):
        raise SessionError(
            f"witness is a {type(given).__name__}, not a program",
            where=where,
            fix="pass the program that graphir.capture returned: witness=program",
        )
    witness = given.witness
    if witness is None:
        raise SessionError(
            f"program {given.name!r} has no witness: it was not captured in this process, but loaded or imported",
            where=where,
            fix="capture the model here and pass that program, or leave witness out and trust the plan",
        )
    ours, theirs = (p.interface for p in (program, given))
    if (ours.arguments, ours.feeds, ours.module_state) != (theirs.arguments, theirs.feeds, theirs.module_state):
        raise SessionError(
            f"the plan was not made of program {given.name!r}, which is given as its witness: their arguments or "
            "states differ",
            where=where,
            fix="pass the program that the plan was made of",
        )
    sharing = program.sharing

    def check(dims: Dims) -> None:
        for prefix in sharing:
            witness({dim[len(prefix) :]: value for dim, value in dims.items() if dim.startswith(prefix)})

    return check
