"""When gradients are reduced: early, as a plan issues it (:mod:`..order`), and not behind the backward.

::

    w2_grad   ▆▆▆▆▆▆▆▆              until the next reductions are issued, with its result, which the update reads
    reduced       ▆▆▆▆
    w1_grad         ▆▆▆▆▆▆▆▆
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphir.ir.touches import Flags, Numbers

from ..order import BUCKET
from .step import Step

__all__ = ["collective", "lives"]


class _Reduction(NamedTuple):
    """A reduction.

    Attributes:
        ready: the operator before which all operands are there.
        operands, results: numbers of storages.
        updates: whether updates that wait for nothing else read its results.
    """

    ready: int
    operands: list[int]
    results: list[int]
    updates: bool


def collective(step: Step) -> Flags:
    """By operator, whether each device reads its own operand, and gets its own result."""
    return np.array([op.kind == "reduce" for op in step.net.ops], np.bool_)


def lives(step: Step) -> tuple[Numbers, Numbers]:
    """By storage, the first operator at which it is there, and the first at which it is not, where everything is on
    the devices where it is; state is there throughout."""
    count, state = len(step.net.ops), step.is_state
    start, end = np.zeros(len(step.names), np.int64), np.full(len(step.names), count, np.int64)
    stays = int((~state).sum())
    start[~state], end[~state] = step.spans.start[:stays], step.spans.end[:stays]
    found = sorted(_reductions(step), key=lambda one: one.ready)
    issued: list[list[_Reduction]] = []
    nbytes = BUCKET
    for one in found:
        if nbytes >= BUCKET:
            issued.append([])
            nbytes = 0
        issued[-1].append(one)
        nbytes += int(step.nbytes[one.operands[0]])
    behind = count
    for group in reversed(issued):
        at = group[-1].ready
        for one in group:
            start[one.results] = at
            if one.updates:
                end[one.operands] = end[one.results] = behind
        behind = at
    return start, end


def _reductions(step: Step) -> list[_Reduction]:
    """The reductions of gradients, in the order of the program."""
    reduces = collective(step)
    last = step.last(~reduces[step.op]).tolist()
    outside = (step.made < 0).tolist()
    found = []
    for i in np.flatnonzero(reduces).tolist():
        if step.net.ops[i].phase != "reduce":
            continue
        operands = step.read(i)
        results = step.storage[(step.op == i) & step.makes].tolist()
        readers = np.unique(step.op[np.isin(step.storage, results) & (step.op != i)]).tolist()
        updates = all(
            step.net.ops[k].phase == "update" and all(outside[s] or s in results for s in step.read(k)) for k in readers
        )
        found.append(_Reduction(max([last[k] for k in operands]) + 1, operands, results, updates))
    return found
