"""Iteration counters, those without an input included. Source: ``caffe2/sgd/iter_op.h``.

An ``Iter`` of old nets has no input: its counter stays in the workspace under the output's name, and begins at 0 where
nobody has made it. :func:`with_explicit_counters` writes that down, as newer nets do::

    step:  it = Iter()       ───▶     init:  it = ConstantFill(shape=[1], value=0, dtype=int64)
                                      step:  it = Iter(it), and it is an external input
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from ...ir.net import Net
from ...ir.operator import Arg, Operator
from ...ir.program import Program
from ..dialect import counts_unseen
from .registry import Lowering, translates

__all__ = ["with_explicit_counters"]

_INT64: Final = 10
"""Caffe2's number of the element type."""


@translates("Iter")
def _iter(c: Lowering) -> None:
    _count(c, 0)


@translates("AtomicIter")
def _atomic_iter(c: Lowering) -> None:
    """The lock at input 0 is left out: a program's order is fixed."""
    _count(c, 1)


def _count(c: Lowering, position: int) -> None:
    counter = c.updated(position, 0)
    c.bind(0, c.one("aten.add_.Scalar", [counter], {"other": 1}, device=c.builder.device(counter)))


def with_explicit_counters(program: Program, given: Container[str]) -> Program:
    """The program with every counter an operand of its ``Iter``, and filled by ``init``; itself where that is so.

    Args:
        program: Caffe2's.
        given: blobs whose values before the step are known without ``init``.
    """
    if not any(counts_unseen(op) for net in (program.init, program.step) for op in net.ops):
        return program
    init = _begun(program.init, given)
    made = {*init.external_inputs, *(name for op in init.ops for name in op.outputs)}
    step = program.step
    counters = _unmade(step)
    fills = {
        name: _fill(op._replace(device=step.blobs[name].device, phase="init"), 0)
        for name, op in counters.items()
        if name not in made and name not in given
    }
    blobs = {name: step.blobs[name]._replace(role="state") for name in counters}
    return program.with_(
        init=init.with_(ops=(*init.ops, *fills.values()), blobs={**init.blobs, **{n: step.blobs[n] for n in fills}}),
        step=step.with_(
            ops=tuple([_explicit(op) for op in step.ops]),
            blobs={**blobs, **{name: blob for name, blob in step.blobs.items() if name not in blobs}},
            external_inputs=(*step.external_inputs, *counters),
        ),
    )


def _unmade(net: Net) -> dict[str, Operator]:
    """The counters without an input that nobody makes before, each with the first operator that counts."""
    made = set(net.external_inputs)
    found: dict[str, Operator] = {}
    for op in net.ops:
        if counts_unseen(op) and op.outputs[0] not in made:
            found[op.outputs[0]] = op
        made.update(op.outputs)
    return found


def _begun(init: Net, given: Container[str]) -> Net:
    """An ``init`` whose counters are operands; the first count of one that nobody has made leaves it at 1."""
    first = {id(op) for name, op in _unmade(init).items() if name not in given}
    return init.with_(ops=tuple([_fill(op, 1) if id(op) in first else _explicit(op) for op in init.ops]))


def _explicit(op: Operator) -> Operator:
    return op._replace(inputs=op.outputs) if counts_unseen(op) else op


def _fill(op: Operator, value: int) -> Operator:
    """What makes a counter, in place of *op* that counts."""
    args: dict[str, Arg] = {"shape": (1,), "value": value, "dtype": _INT64}
    return op._replace(type="ConstantFill", inputs=(), args=args)
