"""Inputs that a captured step cuts into micro-batches.

::

    x : [3*batch, 4] ─┬─▶ micro_0/x : [batch, 4]      rows 0 to batch
                      ├─▶ micro_1/x : [batch, 4]      rows batch to 2*batch
                      └─▶ micro_2/x : [batch, 4]      rows 2*batch to 3*batch
"""

from __future__ import annotations

from typing import NamedTuple

from graphir.errors import PassError
from graphir.ir.program import Program
from graphir.ir.size import BATCH, Polynomial, Size, size_dims

__all__ = ["Cut", "cuts_of"]


class Cut(NamedTuple):
    """How an input is cut.

    Attributes:
        dim: along which its rows are.
        parts: how many micro-batches it is cut into, at least two.
    """

    dim: int
    parts: int


def cuts_of(program: Program) -> dict[str, Cut]:
    """The inputs of a captured program that are cut into micro-batches.

    Raises:
        PassError: an input's rows are no whole number of batches.
    """
    found: dict[str, Cut] = {}
    blobs = program.step.blobs
    for feed in program.interface.feeds:
        name, dim = feed.blob, feed.batch_dim
        shape = blobs[name].shape if name is not None and name in blobs else None
        if name is not None and shape is not None and dim is not None:
            parts = _batches(shape[dim])
            if parts is None:
                raise PassError(
                    f"program {program.name!r} takes {shape[dim]} rows of {name!r}: no whole number of batches",
                    fix="give each argument one row for each row of the batch",
                )
            if parts > 1:
                found[name] = Cut(dim, parts)
    return found


def _batches(size: Size) -> int | None:
    """How many times the batch a size is: 1 where it does not follow the batch, None where it does so otherwise."""
    if BATCH not in size_dims(size):
        return 1
    if isinstance(size, Polynomial) and len(size.terms) == 1:
        ((names, times),) = size.terms
        return times if names == (BATCH,) and times > 0 else None
    return None
