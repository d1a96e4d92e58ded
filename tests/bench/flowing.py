"""Pipelines of micro-batches on two devices against one device, the bound, and torch.distributed.pipelining."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import models
import torch
from apart import apart
from limits import limited
from stepping import momentum_sgd
from timing import in_turn, quartile, ratio, warmed
from torch import Tensor, fx, nn

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program

__all__ = ["CASES", "Case", "predicted_rows", "rows"]

_ROUNDS, _WARM, _STEPS = 30, 1, 1


class Stack(nn.Module):
    """Eight layers, each one linear and a relu."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _mlp(rows: int = 1024, width: int = 512) -> models.Example:
    torch.manual_seed(0)
    batch = (torch.randn(rows, width),), (torch.randn(rows, width),)
    return models.Example(Stack(width), *batch, nn.functional.mse_loss)


def _gpt() -> models.Example:
    """With a head of its own: torch's pipelines have no weight on two stages."""
    example = models.gpt(batch=16, length=64, width=128, heads=4, layers=8, vocabulary=256)
    model = example.model
    assert isinstance(model, models.GPT)
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    return example


def _resnet() -> models.Example:
    return models.resnet(batch=32, blocks=6, channels=32, image=32)


class Case(NamedTuple):
    """Attributes:
    make: makes the example.
    cuts: which modules may be on the second device; those are that make the step the shortest, as predicted.
    parts: of how many micro-batches.
    rival: whether torch.distributed.pipelining takes part, which is cut in the middle.
    """

    make: Callable[[], models.Example]
    cuts: Sequence[Sequence[str]]
    parts: int
    rival: bool = True


_GPT, _MLP = [["layers[4:8]", "norm", "head"]], [["layers[4:8]"]]
_RESNET = [[f"blocks[{first}:6]", "avgpool", "fc"] for first in (2, 3, 4)]

CASES: dict[str, Case] = {
    "GPT, m = 4": Case(_gpt, _GPT, 4),
    "GPT, m = 8": Case(_gpt, _GPT, 8),
    "MLP, m = 4": Case(_mlp, _MLP, 4),
    "MLP, m = 8": Case(_mlp, _MLP, 8),
    "ResNet, m = 8": Case(_resnet, _RESNET, 8, rival=False),
}

PLANS: dict[str, tuple[Callable[[Program], Program] | None, float | None]] = {
    "as captured": (None, None),
    "gpipe": (lambda program: passes.pipeline(program, "gpipe"), None),
    "1f1b": (lambda program: passes.pipeline(program, "1f1b"), 0.90),
    "zero bubble": (passes.pipeline, 0.95),
    "zero bubble, no limit": (lambda program: passes.pipeline(program, limits={}), 1.0),
}
"""What orders each plan, and the least share that it is to reach of the bound that two cores allow."""

RIVALS = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
"""The schedules of torch.distributed.pipelining that take two stages, or two in each of two processes."""


APART = "two threads, half of the micro-batches each, apart"
"""The control: what two cores give to threads that exchange nothing."""

GIVEN = "zero bubble, limits given"
"""The plan within the peak of 1F1B's on its fullest device, which is measured on plans."""

COPIED = "copied by torch.fx"
"""The yardstick of the machine."""

COPIES = 3.3
"""The most copies of a node that the pass may take for an operator."""


def _captured(case: Case, example: models.Example, share: int = 1) -> Program:
    """The program of an example, or of the first of so many shares of its rows and of its micro-batches."""
    inputs, targets = ([t[: len(t) // share] for t in given] for given in (example.inputs, example.targets))
    return graphir.capture(
        example.model,
        inputs=tuple(inputs),
        targets=tuple(targets),
        loss=example.loss,
        optimizer=momentum_sgd(example.model, fused=True),
        accumulate=case.parts // share,
    )


def _cut(case: Case, program: Program) -> Program:
    """The program with the best of the case's cuts."""
    cuts = [passes.inject_copies(passes.shift_modules(program, dict.fromkeys(second, 1))) for second in case.cuts]
    if len(cuts) == 1:
        return cuts[0]
    return min(cuts, key=lambda moved: graphir.overlap(passes.emit(passes.pipeline(moved, "1f1b"))).seconds)


def _programs(case: Case) -> tuple[models.Example, Program, dict[str, Program]]:
    """The example, its program on one device, and the programs of :data:`PLANS`."""
    example = case.make()
    program = _captured(case, example)
    moved = _cut(case, program)
    return example, program, {name: order(moved) if order else moved for name, (order, _) in PLANS.items()}


def rows() -> Iterator[str]:
    """The table of steps on two devices, in the same rounds; a rival's row is that of its best schedule."""
    yield (
        "| model | order | step, ms | speed-up | at least | of the bound | of the bound and the control | at least "
        "| fullest, MiB | at most | time against torch's best | at most |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, case in CASES.items():
        yield from _rows_of(name, case)


def _rows_of(name: str, case: Case) -> Iterator[str]:
    example, one, programs = _programs(case)
    plans = {order: passes.emit(passes.share_storage(program)) for order, program in programs.items()}
    fullest = {order: max(graphir.memory(plan).peak.values()) for order, plan in plans.items()}
    taken = _taken(name, case, example, one, {"one device": passes.emit(passes.share_storage(one)), **plans})
    alone, apart_ = taken.pop("one device"), taken.pop(APART)
    cores = min(quartile(alone) / quartile(apart_), 2.0)
    rivals = {order: taken.pop(order) for order in RIVALS if order in taken}
    best = min(rivals, key=lambda order: statistics.median(rivals[order])) if rivals else ""
    bound = 2 * case.parts / (case.parts + 1)
    yield f"| {name} | one device | {quartile(alone) * 1e3:.1f} | 1.00 |  |  |  |  |  |  |  |  |"
    yield f"| {name} | {APART} | {quartile(apart_) * 1e3:.1f} | {cores:.2f} |  |  |  |  |  |  |  |  |"
    for order, seconds in taken.items():
        faster, share = quartile(alone) / quartile(seconds), PLANS[order][1] if order in PLANS else None
        bubble = order in PLANS and order.startswith("zero bubble")
        least = 1.35 if not case.rival and bubble else None
        share = share if case.rival else None
        most = fullest["1f1b"] if order == "zero bubble" else None
        against, at_most = "", ""
        if best:
            late = 1.0 if bubble else None
            against, at_most = limited(f"{ratio(seconds, rivals[best]):.2f}", at_most=late), str(late or "")
        mib = limited(f"{fullest[order] / 2**20:.2f}", at_most=None if most is None else round(most / 2**20, 2))
        yield (
            f"| {name} | {order} | {quartile(seconds) * 1e3:.1f} "
            f"| {limited(f'{faster:.2f}', at_least=least)} | {least or ''} "
            f"| {faster / bound:.2f} | {limited(f'{2 * faster / bound / cores:.2f}', at_least=share)} | {share or ''} "
            f"| {mib} | {'' if most is None else f'{most / 2**20:.2f}'} | {against} | {at_most} |"
        )
    if best:
        seconds = rivals[best]
        faster = quartile(alone) / quartile(seconds)
        yield (
            f"| {name} | torch.distributed.pipelining, {best} | {quartile(seconds) * 1e3:.1f} "
            f"| {faster:.2f} |  | {faster / bound:.2f} | {2 * faster / bound / cores:.2f} |  |  |  | 1.00 |  |"
        )


def _taken(
    name: str, case: Case, example: models.Example, one: Program, plans: dict[str, graphir.Plan]
) -> dict[str, list[float]]:
    """Seconds of a step, in rounds, by plan and by rival."""
    given = (*example.inputs, *example.targets)
    half = _captured(case, example, 2)
    halves = passes.emit(passes.share_storage(half))
    few = tuple([t[: len(t) // 2] for t in given])
    with ExitStack() as stack:

        def timed(plan: graphir.Plan, executor: str, batch: Sequence[Tensor]) -> Callable[[], float]:
            made = stack.enter_context(runtime.Session(plan, one.state, binding="cpu", executor=executor, threads=1))
            return partial(_step_seconds, warmed(partial(made.step, *batch), _WARM))

        runs = {
            order: timed(plan, "serial" if order == "one device" else "threads", given) for order, plan in plans.items()
        }
        apart_runs = [timed(halves, "serial", few) for _ in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        runs[APART] = lambda: max(pool.map(lambda run: run(), apart_runs))
        for order in RIVALS if case.rival else ():
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            processes = [(str(rank), str(Path(scratch) / "store"), name, order) for rank in range(2)]
            runs[order] = partial(_step_seconds, stack.enter_context(apart("staged.py", processes)))
        return in_turn(runs, _ROUNDS)


def _step_seconds(run: Callable[[int], float]) -> float:
    return run(_STEPS) / _STEPS


RUNS = 5
"""Of so many, one in each round of all, the shortest is what a pass takes of the processor's time: others only ever add
to it."""


def predicted_rows() -> Iterator[str]:
    """The table of predicted speed-ups on more devices, and of what the pass takes, beside what torch.fx takes to copy
    the step's graph."""
    yield (
        "| devices | m | order | predicted speed-up | at least | operators | the pass, µs an operator "
        "| copied by torch.fx, µs a node | the pass, in copies | at most |"
    )
    yield "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    cases = {(devices, parts): _deep(devices, parts) for devices in (4, 8) for parts in (devices, 2 * devices)}
    passed: dict[tuple[int, int], dict[str, Callable[[Program], Program]]] = {}
    runs: dict[tuple[int, int, str], Callable[[], float]] = {}
    for (devices, parts), (program, moved) in cases.items():
        orders = {name: order for name, (order, _) in PLANS.items() if order is not None}
        passed[devices, parts] = {**orders, GIVEN: partial(passes.pipeline, limits=_fullest(moved))}
        for name, order in passed[devices, parts].items():
            runs[devices, parts, name] = partial(_microseconds, partial(_anew, order, moved), len(moved.step.ops))
        graph = graphir.to_fx(program).graph
        runs[devices, parts, COPIED] = partial(_microseconds, partial(_copied, graph), len(graph.nodes))
    least = {run: min(taken) for run, taken in in_turn(runs, RUNS).items()}
    for (devices, parts), (program, moved) in cases.items():
        alone = graphir.overlap(passes.emit(program)).seconds
        for name, order in passed[devices, parts].items():
            faster = alone / graphir.overlap(passes.emit(order(moved))).seconds
            share = 0.85 * devices if name == "zero bubble, no limit" and parts == 2 * devices else None
            each, copied = least[devices, parts, name], least[devices, parts, COPIED]
            yield (
                f"| {devices} | {parts} | {name} | {limited(f'{faster:.2f}', at_least=share)} "
                f"| {f'{share:.2f}' if share else ''} | {len(moved.step.ops):,} "
                f"| {each:.1f} | {copied:.1f} | {limited(f'{each / copied:.2f}', at_most=COPIES)} | {COPIES} |"
            )


def _microseconds(run: Callable[[], object], each: int) -> float:
    """What a call takes of the processor's time, for each of so many."""
    start = time.process_time()
    run()
    return (time.process_time() - start) / each * 1e6


def _copied(graph: fx.Graph) -> None:
    fx.Graph().graph_copy(graph, {})


def _anew(order: Callable[[Program], Program], program: Program) -> None:
    """Order a program that nobody has looked at: what was found of the step is not kept."""
    order(program.with_(step=program.step.with_()))


def _fullest(moved: Program) -> dict[str, int]:
    """As a limit of each gpu, the most that the plan in the order of 1F1B holds on any."""
    peaks = graphir.memory(passes.emit(passes.pipeline(moved, "1f1b"))).peak
    gpus = [device for device in peaks if device.startswith("gpu")]
    return dict.fromkeys(gpus, max(peaks[device] for device in gpus))


def _deep(devices: int, parts: int) -> tuple[Program, Program]:
    """A GPT with two blocks a device: its program, and that with the blocks moved."""
    example = models.gpt(batch=2 * parts, length=64, width=256, heads=4, layers=2 * devices, vocabulary=64)
    model = example.model
    assert isinstance(model, models.GPT)
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    program = graphir.capture(
        model,
        inputs=example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=momentum_sgd(model, fused=True),
        accumulate=parts,
    )
    cut = {f"layers[{2 * d}:{2 * d + 2}]": d for d in range(1, devices)}
    return program, passes.inject_copies(
        passes.shift_modules(program, {**cut, "norm": devices - 1, "head": devices - 1})
    )
