"""A process that makes the steps of one side: ``python tests/bench/one_side.py SIDE CASE FORM HEAP``.

What one side does to the heap is not the other's then: glibc's settings are the whole process's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

import torch
from apart import serve
from graphir.runtime.machine.heap import kept_heap
from stepping import CASES, Case, eager_step, momentum_sgd
from timing import warmed

import graphir
from graphir import passes, runtime


def main(side: str, name: str, form: str, heap: str) -> None:
    """Serve steps of a case in eager PyTorch or by a plan, with the optimizer's fused or for-loop form.

    Args:
        side: ``eager`` or ``plan``.
        name: of the case.
        form: ``fused`` or ``for-loop``.
        heap: ``kept`` or ``as it is``.
    """
    case = CASES[name]
    if case.alone:
        torch.set_num_threads(1)
    with ExitStack() as stack:
        if heap == "kept":
            stack.enter_context(kept_heap())
        make = _eager if side == "eager" else _plan
        serve(warmed(make(case, form, stack), case.warm))


def _eager(case: Case, form: str, stack: ExitStack) -> Callable[[], object]:
    example = case.make()
    return eager_step(example, momentum_sgd(example.model, fused=form == "fused"))


def _plan(case: Case, form: str, stack: ExitStack) -> Callable[[], object]:
    example = case.make()
    optimizer = momentum_sgd(example.model, fused=form == "fused")
    program = graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    plan = passes.emit(passes.share_storage(program))
    session = stack.enter_context(runtime.Session(plan, program.state, binding="cpu"))
    return lambda: session.step(*example.inputs, *example.targets)


main(*sys.argv[1:])
