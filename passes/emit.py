"""Turn a placed program into a plan: lanes, the events that order them, and the frees.

The issue order is that of :mod:`.order`, its instructions are those of :mod:`graphir.analysis.instructions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphir.analysis.buffers import Buffers
from graphir.analysis.hazards import hazards
from graphir.analysis.instructions import instructions
from graphir.analysis.values import value_numbers
from graphir.collector import collector_paused
from graphir.errors import PassError, nearest
from graphir.ir.fitting import point_text
from graphir.ir.names import base_name
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.size import BATCH
from graphir.ir.verify import verify

from .base import require_program
from .order import AHEAD, issue_order

__all__ = ["emit", "instructed"]


def emit(program: Program, dims: Mapping[str, int] | None = None, *, ahead: int | None = None) -> Plan:
    """The plan of a placed program.

    Args:
        program: every operand is where its operator needs it.
        dims: sizes for the plan's predictions, such as ``{"batch": 64}`` (a replica's; a prefixed name sets one
            replica's). With unlike shares, 64 is the mean of the replicas' rows, divided by shares. The captured sizes
            by default. The instructions hold for any size.
        ahead: how many operators of its destination before its first reader each copy is issued; a copy that stands
            further ahead in the program, as those of :func:`park` do, is issued at its place, and so is each copy with
            which that brings state in. More of them hide slower links, and hold what was copied for longer. A value
            that was copied is freed no later than so many operators after that. By default :attr:`Program.ahead`; where
            the program says nothing, 8.

    Raises:
        PlacementError: an operand is elsewhere; inject_copies puts the copies in.
        PassError: *dims* is no mapping, or has an unknown dimension or a size below 1, or so few rows that a replica
            has none by its share. Or *ahead* is no whole number
            from 0 up.
    """
    require_program(program, "emit")
    if ahead is not None and (type(ahead) is not int or ahead < 0):
        raise PassError(f"ahead={ahead!r} is no number of operators", fix=f"give a whole number, {AHEAD} by default")
    with collector_paused():
        verify(program)
        bound = _bind(program, {} if dims is None else dims)
        return instructed(program, ahead).with_(dims=bound, values=value_numbers(program))


def instructed(program: Program, ahead: int | None = None) -> Plan:
    """The plan of a program that is known to be well-formed and placed, without the values by which it is checked."""
    net, found = program.step, hazards(program.step)
    least = next(given for given in (ahead, program.ahead, AHEAD) if given is not None)
    order, buffers = issue_order(net, program.dims, found, least), Buffers(net, program.dims)
    buffers.freed.update([issue for issue in order if isinstance(issue, str)])
    return Plan(
        program=program.with_(state={}, module=None),
        dims=program.dims,
        instructions=instructions(net, order, found, buffers),
        buffers=buffers.numbers,
    )


def _bind(program: Program, dims: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(dims, Mapping):
        raise PassError(f"dims is a {type(dims).__name__}, not a mapping", fix="give a dict from dimensions to sizes")
    bound = dict(program.dims)
    for name, size in dims.items():
        named = [dim for dim in bound if name in (dim, base_name(dim))]
        if not named:
            reason = f"; its sizes are fixed: {program.covers.fixed}" if program.covers.fixed else nearest(name, bound)
            raise PassError(
                f"program {program.name!r} has no dimension {name!r}{reason}",
                fix=f"dimensions: {', '.join(bound) or 'none'}",
            )
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PassError(f"dimension {name!r} cannot be {size!r}", fix="sizes are integers from 1 up")
        bound.update(dict.fromkeys(named, size))
        if name == BATCH and program.shares:
            bound.update(_divided(program, size))
    fix = "give other sizes in dims, or capture the model at this one"
    if guard := program.covers.broken(bound):
        at = ", ".join(f"{dim} {bound[dim]}" for dim in guard.dims)
        raise PassError(f"program {program.name!r} takes {guard}, not {at}: {guard.reason}", fix=fix)
    if program.witness is None and (unknown := program.covers.unknown(bound)):
        raise PassError(f"program {program.name!r} does not cover {point_text(bound)}: {unknown}", fix=fix)
    return bound


def _divided(program: Program, mean: int) -> dict[str, int]:
    """The rows of each replica by its share, of *mean* rows on average."""
    rows = program.divided(mean * len(program.sharing))
    if 0 in rows:
        raise PassError(
            f"a batch of {sum(rows)} rows is divided by shares={list(program.shares)} as {rows}, and the last replica "
            "gets none",
            fix=f"give {BATCH!r} as {sum(program.shares)}, or a multiple",
        )
    return {prefix + BATCH: count for prefix, count in zip(program.sharing, rows, strict=True)}
