"""How long it takes from a plan to the end of its first step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import models
import torch
from limits import limited

import graphir
from graphir import passes, runtime

__all__ = ["rows"]

ALLOWED = 1.0
WARM_STEPS = 5


def rows(runs: int = 5) -> Iterator[str]:
    """The table of ``Session(...)`` and a first step, less a warm step, by clock and by processor."""
    yield "| model | devices | Session | first step | warm step | start | start, processor | at most |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    example = models.resnet50(batch=2)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.01, momentum=0.9)
    captured = graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    batch = (*example.inputs, *example.targets)
    for devices in ([0], [0, 1]):
        program = passes.replicate(captured, devices=devices)
        plan = passes.emit(passes.share_storage(program))
        found = [_start(plan, program, batch) for _ in range(runs)]
        made, first, warm, start, processor = (statistics.median(column) for column in zip(*found, strict=True))
        yield (
            f"| ResNet-50, batch 2 | {len(devices)} | {made:.3f} | {first:.3f} | {warm:.3f} "
            f"| {limited(f'{start:.3f}', at_most=ALLOWED)} | {processor:.3f} | {ALLOWED} |"
        )


def _start(
    plan: graphir.Plan, program: graphir.Program, batch: tuple[torch.Tensor, ...]
) -> tuple[float, float, float, float, float]:
    """Seconds of a session's making, its first step and a warm one; of the start, on the clock and of the processor."""
    marks = [(time.perf_counter(), time.process_time())]
    with runtime.Session(plan, program.state, binding="cpu") as session:
        marks.append((time.perf_counter(), time.process_time()))
        session.step(*batch)
        marks.append((time.perf_counter(), time.process_time()))
        steps = []
        for _ in range(WARM_STEPS):
            begun = time.perf_counter(), time.process_time()
            session.step(*batch)
            steps.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    made, first = marks[1][0] - marks[0][0], marks[2][0] - marks[1][0]
    warm, warm_processor = (statistics.median(column) for column in zip(*steps, strict=True))
    return made, first, warm, made + first - warm, marks[2][1] - marks[0][1] - warm_processor
