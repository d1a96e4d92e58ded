"""How predicted seconds of steps compare with measured ones, and what it takes to simulate a plan."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import nets
import torch
from limits import limited
from placing import program_of_net
from stepping import momentum_sgd
from test_zoo import ROWS, batch_of, model_of
from timing import seconds
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.analysis.cost import Cost
from graphir.analysis.execution import STREAMS
from graphir.analysis.schedule import schedule
from graphir.ir.plan import Plan

__all__ = ["SIZES", "rows", "simulation_rows"]

Batch: TypeAlias = "tuple[tuple[object, ...], dict[str, object]]"
"""What a step is given: arguments, and those by keyword."""

SIZES = {
    "alexnet": 4,
    "autoencoder": 32,
    "convnext": 96,
    "fcn": 16,
    "mnasnet": 32,
    "mobilenet v2": 8,
    "regnet": 24,
    "resnet": 8,
    "resnext": 8,
    "squeezenet": 16,
    "u-net": 48,
    "vgg": 96,
    "vision transformer": 256,
    "wavenet": 192,
}
"""Models of the zoo, and a batch of each at which its operators average 50 µs and more."""

ROUNDS, STEPS, WARM = 6, 4, 2
ALLOWED = 0.1
"""A prediction may be off by this part, or by twice the spread of the plan against itself."""

LONG = 50e-6
PLANS = 20

OPERATORS, INSTRUCTIONS, SIMULATED_IN = 310_000, 1_000_000, 4


def rows() -> Iterator[str]:
    """The table of a step on two logical devices, a thread each, each kernel in one thread.

    In each round the plan's operators are profiled, in an empty file, and its steps are made, so that whatever the
    machine does befalls both. The spread is that of two runs of a round against each other, the farther quartile.
    Sessions keep their heap: else it is chance whether glibc gives a step's memory back, and the next step takes longer
    by a page fault for each page.
    """
    yield (
        "| model | plan | operators | µs each | step, ms | predicted, ms | off, % | at most | against itself, % "
        "| without a profile, ms |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    counted = 0
    try:
        for name, size in SIZES.items():
            torch.manual_seed(0)
            for kind, program, batch in _programs(name, size):
                plan = passes.emit(passes.share_storage(program))
                row, long = _row(plan, program, batch)
                counted += long
                yield f"| {name}, batch {size} | {kind} | {row} |"
    finally:
        torch.set_num_threads(threads)
    yield ""
    yield f"{limited(str(counted), at_least=PLANS)} plans whose operators average at least {LONG * 1e6:.0f} µs."


def _programs(name: str, size: int) -> Iterator[tuple[str, graphir.Program, Batch]]:
    """The model on two devices, each with a replica, and with the second half of its activations moved."""
    row = ROWS[name]
    model: nn.Module = model_of(row)
    share, whole = batch_of(row, size, 0), batch_of(row, 2 * size, 0)
    program = graphir.capture(
        model,
        share.inputs,
        kwargs=share.kwargs,
        targets=share.targets,
        loss=row.loss,
        optimizer=momentum_sgd(model, fused=True),
        batch_dims=row.batch_dims,
    )
    yield "replicated", passes.replicate(program, [0, 1]), ((*whole.inputs, *whole.targets), dict(whole.kwargs))
    chosen = passes.find_activations(program)
    moved = passes.inject_copies(passes.shift_activations(program, chosen[len(chosen) // 2 :], {0: 1}))
    yield "shifted", moved, ((*share.inputs, *share.targets), dict(share.kwargs))


def _row(plan: Plan, program: graphir.Program, batch: Batch) -> tuple[str, bool]:
    """The figures of a plan; and whether its operators are long enough for its limit to hold."""
    given, named = batch
    predicted: list[float] = []
    measured: list[float] = []
    again: list[float] = []
    each = 0.0
    with runtime.Session(plan, program.state, binding="cpu", executor="threads", threads=1, keep_heap=True) as session:
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                profile = graphir.profile(plan, threads=1, path=Path(folder) / "profile.json")
            found = graphir.estimate(plan, executor="threads", threads=1, profile=profile)
            predicted.append(found.seconds)
            each = sum(operator.seconds for operator in found.operators) / len(found.operators)
            for _ in range(WARM):
                session.step(*given, **named)
            for taken in (measured, again):
                taken.append(statistics.median(seconds(lambda: session.step(*given, **named)) for _ in range(STEPS)))
    bare = graphir.estimate(plan, executor="threads", threads=1, profile=None).seconds
    low, _, high = statistics.quantiles([b / a for a, b in zip(measured, again, strict=True)], n=4)
    spread = max(high - 1, 1 - low)
    pairs = [p / statistics.fmean(m) for p, *m in zip(predicted, measured, again, strict=True)]
    off = 100 * (statistics.median(pairs) - 1)
    most = math.inf if each < LONG else 100 * max(ALLOWED, 2 * spread)
    marked = f"{off:+.1f}" if abs(off) <= most else limited(f"{abs(off):.1f}", at_most=most)
    at_most = "" if math.isinf(most) else f"{most:.1f}"
    return (
        f"{len(plan.step.ops)} | {each * 1e6:.0f} | {statistics.median(measured) * 1e3:.2f} "
        f"| {statistics.median(predicted) * 1e3:.2f} | {marked} | {at_most} | {100 * spread:.1f} | {bare * 1e3:.2f}"
    ), each >= LONG


def simulation_rows() -> Iterator[str]:
    """The table of a plan with a million instructions on eight devices."""
    yield "| what | instructions | seconds | at most | µs each |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    program = program_of_net(nets.synthetic_net(OPERATORS, devices=8, cross=0.1)).with_(dims={"batch": 1024})
    plan = passes.emit(passes.inject_copies(program))
    topology = graphir.Topology.named("h200x8")
    costs = [Cost(2e-6, "roofline")] * len(plan.step.ops)
    steps: dict[str, tuple[Callable[[], object], int | None]] = {
        "the simulation": (lambda: schedule(plan, plan.dims, costs, STREAMS, topology), SIMULATED_IN),
        "the whole estimate": (lambda: graphir.estimate(plan, topology), None),
    }
    count = len(plan.instructions)
    for name, (step, most) in steps.items():
        taken = min(seconds(step) for _ in range(3))
        allowed = None if most is None else most * max(count / INSTRUCTIONS, 1)
        figure = limited(f"{taken:.2f}", at_most=allowed)
        yield f"| {name} | {count:,} | {figure} | {(allowed and f'{allowed:.1f}') or ''} | {taken / count * 1e6:.2f} |"
