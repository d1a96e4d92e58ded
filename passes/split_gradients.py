"""Compute gradients of parameters apart from gradients that the backward goes on with.

::

    x_grad, w_grad = aten.convolution_backward(…, output_mask=[true, true, false])

    x_grad = aten.convolution_backward(…, output_mask=[true, false, false])        ───▶ the backward goes on
    w_grad = aten.convolution_backward(…, output_mask=[false, true, false])        ───▶ the update, which can wait

A convolution's backward gives all gradients in one operator. Of two, :func:`.pipeline` with zero bubble can put the
second one off. Only what has the same bits apart is split (``parts_apart`` of its type): a convolution's kernels are
separate ones anyway. A norm's are not: its two calls take half as long again as the one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from graphir.ir.operator import Operator
from graphir.ir.optypes.table import operator_type
from graphir.ir.program import Program

from .base import Pass, build, register

__all__ = ["SplitGradients", "split_gradients"]


@register
class SplitGradients(Pass):
    """See :func:`split_gradients`."""

    name: ClassVar[str] = "split_gradients"

    def rewrite(self, program: Program) -> Program:
        step = program.step
        ops = [part for op in step.ops for part in _parts(op)]
        return program if len(ops) == len(step.ops) else program.with_(step=step.with_(ops=tuple(ops)))


def split_gradients(program: Program) -> Program:
    """The program in which a convolution's backward is two operators: for the input, and for weight and bias.

    Changes no value. Before :func:`pipeline`, by which gradients of parameters fill what would be idle; elsewhere it
    gains nothing. A backward that gives only one of both is left as it is, and so are the backwards of norms.

    Args:
        program: any program.
    """
    return build(SplitGradients)(program)


def _parts(op: Operator) -> Iterator[Operator]:
    """The operator, or the two that make its results."""
    mask = op.args.get("output_mask")
    results = op.results or "t" * len(op.outputs)
    known = operator_type(op.type).parts_apart and not op.output_versions
    if not known or not isinstance(mask, tuple) or results[:1] != "t" or "t" not in results[1:]:
        yield op
        return
    others = len(results) - 1
    for first in (True, False):
        asked = tuple([bool(wanted) and (position == 0) == first for position, wanted in enumerate(mask)])
        yield op._replace(
            outputs=op.outputs[:1] if first else op.outputs[1:],
            results="t" + "_" * others if first else "_" + results[1:],
            args={**op.args, "output_mask": asked},
            by=SplitGradients.name,
        )
