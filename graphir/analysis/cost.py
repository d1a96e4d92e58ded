"""What an operator costs: its arithmetic and the bytes that it moves, from shapes, and the seconds that follow.

The prediction is a roofline: an operator takes as long as the longer one of its arithmetic and its memory traffic,
and a constant for being called. It leaves out what a kernel loses on small matrices and gains in caches, so it tells
short operators from long ones, and not much more.
"""

from __future__ import annotations

from typing import NamedTuple

from ..ir.blob import dense_nbytes
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.optypes.sized import SizedOperator, UnknownShape
from ..ir.optypes.table import operator_type
from ..ir.size import Dims

__all__ = ["Rates", "Work", "operator_seconds", "work"]


class Work(NamedTuple):
    """What one operator does.

    Attributes:
        flops: additions and multiplications of matrix products, convolutions and registered operators that say theirs;
            0 for every other type.
        nbytes: bytes of the operands that it reads and the results that it writes; 0 for views.
    """

    flops: int
    nbytes: int


class Rates(NamedTuple):
    """How fast a device works.

    Attributes:
        flops_per_second: of large matrix products.
        bytes_per_second: of large elementwise operators.
        seconds_per_call: what calling an operator takes, however small it is.
    """

    flops_per_second: float
    bytes_per_second: float
    seconds_per_call: float

    def seconds(self, work: Work) -> float:
        """How long an operator with this work takes."""
        return self.seconds_per_call + max(work.flops / self.flops_per_second, work.nbytes / self.bytes_per_second)


def work(op: Operator, net: Net, dims: Dims) -> Work:
    """The work of an operator of *net* at these sizes. What has no shape counts nothing."""
    if len(op.effects.views) == len(op.outputs) and op.outputs:
        return Work(0, 0)
    known = operator_type(op.type)
    touched = op.outputs if known.reads_rows else (*op.outputs, *op.inputs)
    nbytes = sum([dense_nbytes(net.blob(name), dims) for name in touched])
    if known.flops is None:
        return Work(0, nbytes)
    try:
        return Work(known.flops(SizedOperator(op, net.blobs, dims, 1)), nbytes)
    except UnknownShape:
        return Work(0, nbytes)


def operator_seconds(net: Net, dims: Dims, rates: Rates) -> list[float]:
    """What one instruction of each operator takes. A part of a collective reads all that the collective reads, and
    makes one of its results."""
    found = []
    for op in net.ops:
        done = work(op, net, dims)
        if op.type == "AllReduce":
            read = done.nbytes // 2
            done = done._replace(nbytes=read + read // len(op.inputs))
        found.append(rates.seconds(done))
    return found
