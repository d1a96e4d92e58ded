"""Sizes at which no session runs a step of a program."""

from __future__ import annotations

from ..ir.fitting import point_text
from ..ir.program import Program
from ..ir.size import Dims, size_dims

__all__ = ["refused_at"]


def refused_at(program: Program, dims: Dims) -> str:
    """Why a session refuses a step at *dims*, a value for each dimension; empty where it takes one.

    A session takes sizes that the program covers, those of which its witness can tell, and arguments with at least one
    row. Lookups, one dimension of an argument that replicas do not share, may be none.
    """
    if guard := program.covers.broken(dims):
        values = ", ".join([f"{dim}={dims[dim]}" for dim in guard.dims])
        return f"{values} does not meet {guard}: {guard.reason}"
    if program.witness is None and (unknown := program.covers.unknown(dims)):
        return f"{point_text(dims)}: {unknown}"
    for feed in program.interface.feeds:
        for prefix in program.replicas if feed.blob is not None else ():
            blob = program.step.blobs.get(f"{prefix}{feed.blob}")
            shape = () if blob is None else blob.shape or ()
            if len(shape) == 1 and feed.batch_dim is None:
                continue
            for dim in [dim for size in shape for dim in size_dims(size)]:
                if dims.get(dim) == 0:
                    return f"{dim}=0, and {prefix}{feed.blob} has at least one row"
    return ""
