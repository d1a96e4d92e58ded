"""How long the passes take: on a captured ResNet-50 with 8 replicas, and per operator on synthetic nets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import models
import nets
import torch
from limits import limited
from timing import seconds

import graphir
from graphir import passes
from graphir.ir.net import Net
from graphir.ir.program import Program

__all__ = ["program_of_net", "resnet50_rows", "synthetic_rows"]

REPLICAS = 8
SIZES = (10_000, 100_000, 1_000_000)
ALLOWED = 4.5


def resnet50_rows(runs: int = 5) -> Iterator[str]:
    """The table of replicate, shift and inject on ResNet-50, verification included."""
    example = models.resnet50(batch=2, image=64)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    program = graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    chosen = passes.find_activations(program)
    chosen = chosen[len(chosen) // 2 :]
    pipeline = passes.Pipeline([
        passes.Replicate(devices=tuple(range(REPLICAS))),
        passes.ShiftActivations(activations=tuple(chosen), shifts={r: REPLICAS + r for r in range(REPLICAS)}),
        passes.InjectCopies(),
    ])  # fmt: skip
    pipeline.run(program)
    measured = [pipeline.run(program) for _ in range(runs)]
    placed = measured[0].program
    captured, after = len(program.step.ops), len(placed.step.ops)
    yield f"{captured:,} operators captured, {after:,} after the passes, {REPLICAS} replicas"
    yield ""
    yield "| pass | seconds | verifying its result |"
    yield "| --- | ---: | ---: |"
    totals = []
    for i, timing in enumerate(measured[0].timings):
        own = statistics.median(run.timings[i].seconds for run in measured)
        verifying = statistics.median(run.timings[i].verify_seconds for run in measured)
        totals.append(own + verifying)
        yield f"| {timing.name} | {own:.3f} | {verifying:.3f} |"
    yield f"| in all | {sum(totals):.3f} | (included) |"


def program_of_net(net: Net) -> Program:
    """A program of one replica with this step."""
    return Program("synthetic", Net("synthetic.init", (), {}), net, replicas=("gpu_0/",))


def synthetic_rows(runs: int = 3) -> Iterator[str]:
    """The table of microseconds an operator, without verification, beside those of one look-up of each operand."""
    yield (
        "| operators | activations chosen | operators moved | shift, µs each | copies | inject, µs each | at most "
        "| look-ups |"
    )
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for size in SIZES:
        program = program_of_net(nets.synthetic_net(size, devices=2, cross=0.1))
        chosen = passes.find_activations(program)
        chosen = chosen[len(chosen) // 2 :]
        shift = passes.ShiftActivations(activations=tuple(chosen), shifts={0: 2, 1: 3})
        inject = passes.InjectCopies()
        shifts, injects, lookups = [], [], []
        for _ in range(runs):
            run = _timed(shift, program)
            shifts.append(run[1])
            copied = _timed(inject, program)
            injects.append(copied[1])
            lookups.append(seconds(lambda net=program.step: _look_up(net)))
        moved = sum(op.by == shift.name for op in run[0].step.ops)
        copies = len(copied[0].step.ops) - size
        per_shift, per_inject, per_look = (
            statistics.median(times) / size * 1e6 for times in (shifts, injects, lookups)
        )
        yield (
            f"| {size:,} | {len(chosen):,} | {moved:,} | {limited(f'{per_shift:.2f}', at_most=ALLOWED)} | {copies:,} "
            f"| {limited(f'{per_inject:.2f}', at_most=ALLOWED)} | {ALLOWED} | {per_look:.2f} |"
        )


def _look_up(net: Net) -> None:
    """The least that a pass over a net does: look up the blob of every operand."""
    blobs = net.blobs
    for op in net.ops:
        for name in op.inputs + op.outputs:
            blobs.get(name)


def _timed(step: passes.Pass, program: Program) -> tuple[Program, float]:
    made: list[Program] = []
    taken = seconds(lambda: made.append(step.recorded(program)))
    return made[0], taken
