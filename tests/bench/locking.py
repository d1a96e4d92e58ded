"""What an operator takes longer where another thread calls operators too, by how long it computes.

The figures from which :mod:`graphir.analysis.execution` predicts steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import models
from graphir.runtime.executors.choice import choose
from parallel import mlp, session, timed
from timing import in_turn

from graphir.ir.plan import Plan

__all__ = ["rows"]

EXECUTORS = "serial", "threads"
ROUNDS, STEPS = 32, 4


def _gpt(width: int) -> Callable[[int], models.Example]:
    return lambda batch: models.gpt(batch, length=64, width=width, heads=4, layers=4, vocabulary=256)


CASES: dict[str, tuple[Callable[[int], models.Example], int]] = {
    **{f"MLP {width}": (lambda batch, width=width: mlp(batch, width), width) for width in (64, 128, 192, 256)},
    **{f"GPT of width {width}": (_gpt(width), 4) for width in (16, 32, 64, 128)},
}
"""What makes an example of a batch size, and that size."""


def rows() -> Iterator[str]:
    """The table: an operator in one thread, then the speed-up of two and what each operator takes longer in them.

    Of the fastest rounds, each of which goes through all models: what else runs takes a core for a while.
    """
    yield "| model | an operator, µs | threads, speed-up | µs longer | chosen |"
    yield "| --- | ---: | ---: | ---: | --- |"
    with ExitStack() as stack:
        runs: dict[str, Callable[[], float]] = {}
        plans: dict[str, Plan] = {}
        for case, (make, batch) in CASES.items():
            for executor in EXECUTORS:
                made, given = session(make, batch, 2, executor)
                runs[f"{case}, {executor}"] = timed(stack.enter_context(made), given, STEPS)
                plans[case] = made.plan
        taken = in_turn(runs, ROUNDS)
    for case, plan in plans.items():
        operators = len(plan.step.ops)
        serial, two = [min(taken[f"{case}, {executor}"]) / operators * 1e6 for executor in EXECUTORS]
        chosen = choose(plan, "auto", {}, threads=1).executor
        yield f"| {case} | {serial:.1f} | {serial / two:.2f} | {2 * two - serial:.1f} | {chosen} |"
