"""Two logical devices on two cores: against one thread, against the ideal, and against two processes under DDP."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import models
import torch
from apart import apart
from limits import limited
from stepping import DispatchBound, momentum_sgd
from timing import in_turn, ratio, warmed
from torch import Tensor, nn

import graphir
from graphir import passes, runtime

__all__ = ["CASES", "ROUNDS", "mlp", "rows", "session", "small_rows", "timed"]

ROUNDS, WARM, STEPS = 12, 2, 8
"""In each round, how many steps are made, and how many before them: caches hold what ran last."""


def _gpt(batch: int) -> models.Example:
    return models.gpt(batch, length=64, width=128, heads=4, layers=4, vocabulary=256)


def mlp(batch: int, width: int = 512) -> models.Example:
    example = DispatchBound(width, layers=4), (torch.randn(batch, width),), (torch.randn(batch, width),)
    return models.Example(*example, nn.functional.mse_loss)


CASES: dict[str, tuple[Callable[[int], models.Example], int]] = {
    "GPT, batch 8": (_gpt, 8),
    "MLP 512, batch 512": (mlp, 512),
}
"""What makes an example of a batch size, and that size."""

SMALL: dict[str, tuple[Callable[[int], models.Example], int]] = {
    "MLP 64, batch 8": (lambda batch: mlp(batch, 64), 8),
    "GPT of width 16, batch 2": (models.gpt, 2),
    "residual net of 4 channels, batch 4": (models.resnet, 4),
}


def session(
    make: Callable[[int], models.Example], batch: int, replicas: int, executor: str, keep_heap: bool = False
) -> tuple[runtime.Session, tuple[Tensor, ...]]:
    """A session whose replicas share a batch, each kernel in one thread, and that batch."""
    share, whole = make(batch // replicas), make(batch)
    program = graphir.capture(
        share.model,
        inputs=share.inputs,
        targets=share.targets,
        loss=share.loss,
        optimizer=momentum_sgd(share.model, fused=True),
    )
    placed = passes.replicate(program, range(replicas)) if replicas > 1 else program
    plan = passes.emit(passes.share_storage(placed))
    options = {"executor": executor, "threads": 1, "keep_heap": keep_heap}
    return runtime.Session(plan, program.state, binding="cpu", **options), (*whole.inputs, *whole.targets)


def timed(given: runtime.Session, batch: tuple[Tensor, ...], steps: int) -> Callable[[], float]:
    """Seconds of a step."""
    run = warmed(lambda: given.step(*batch), WARM)
    return lambda: run(steps) / steps


def _side_by_side(
    sessions: Sequence[runtime.Session], batch: tuple[Tensor, ...], pool: ThreadPoolExecutor
) -> Callable[[], float]:
    """Seconds of a step of several sessions, each in a thread, that have nothing to do with each other."""
    runs = [timed(each, batch, STEPS) for each in sessions]
    return lambda: max(pool.map(lambda run: run(), runs))


@contextmanager
def _ddp(case: str, keep_heap: bool) -> Iterator[Callable[[], float]]:
    """Seconds of a step in two processes under DistributedDataParallel over gloo, the heap kept as here."""
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        heap = "kept" if keep_heap else "as it is"
        with apart("ddp.py", [(str(rank), store, case, heap) for rank in range(2)]) as run:
            yield lambda: run(STEPS) / STEPS


def rows() -> Iterator[str]:
    """The table of a step on two logical devices, each kernel in one thread.

    The ideal is a step of half the batch on one device; it adds no gradients. Two such steps at a time say what of it
    the machine and the interpreter leave.
    """
    yield (
        "| model | executor | step, ms | speed-up | of the ideal's | at least | time against DDP | at most "
        "| heap kept: step, ms | of the ideal's | time against DDP |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    # Kept last: what glibc has by itself, it does not come back to.
    taken = {heap: {case: _taken(case, heap) for case in CASES} for heap in (False, True)}
    for case in CASES:
        one, ideal, *_, ddp = taken[False][case].values()
        kept = taken[True][case]
        for name, mine in taken[False][case].items():
            ours = kept[_one_of(kept, name)]
            least, most = (0.9, 0.65) if name.startswith("auto") else (None, None)
            yield (
                f"| {case} | {name} | {statistics.median(mine) * 1e3:.2f} | {ratio(one, mine):.2f} "
                f"| {limited(f'{ratio(ideal, mine):.2f}', at_least=least)} | {least or ''} "
                f"| {limited(f'{ratio(mine, ddp):.2f}', at_most=most)} | {most or ''} "
                f"| {statistics.median(ours) * 1e3:.2f} | {ratio(list(kept.values())[1], ours):.2f} "
                f"| {ratio(ours, list(kept.values())[-1]):.2f} |"
            )


def _one_of(names: Iterable[str], name: str) -> str:
    """The same, whatever ``auto`` has chosen."""
    return next(other for other in names if other.partition(":")[0] == name.partition(":")[0])


def _taken(case: str, keep_heap: bool) -> dict[str, list[float]]:
    """Seconds of steps on one device, of half the batch there, by each executor, of two halves apart, and under DDP."""
    make, batch = CASES[case]
    with ExitStack() as stack:
        sessions = {
            "one thread, one device": session(make, batch, 1, "serial", keep_heap),
            "one thread, half the batch": session(make, batch // 2, 1, "serial", keep_heap),
            **{name: session(make, batch, 2, name, keep_heap) for name in ("auto", "serial", "threads")},
        }
        for made, _ in sessions.values():
            stack.enter_context(made)
        runs = {name: timed(*each, STEPS) for name, each in sessions.items()}
        halves = [stack.enter_context(session(make, batch // 2, 1, "serial", keep_heap)[0]) for _ in range(2)]
        given = sessions["one thread, half the batch"][1]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        runs["two threads, half the batch each, apart"] = _side_by_side(halves, given, pool)
        runs["DDP over gloo, 2 processes"] = stack.enter_context(_ddp(case, keep_heap))
        taken = in_turn(runs, ROUNDS)
        chosen = sessions["auto"][0].executor
    return {f"auto: {chosen}" if name == "auto" else name: seconds for name, seconds in taken.items()}


def small_rows() -> Iterator[str]:
    """The table of steps that are too short for two threads: what is chosen against one thread, the same plan."""
    yield "| model | chosen | one thread, ms | chosen, ms | chosen / one thread | at most |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for case, (make, batch) in SMALL.items():
        (chosen, given), (serial, _) = session(make, batch, 2, "auto"), session(make, batch, 2, "serial")
        with chosen, serial:
            runs = {"serial": timed(serial, given, 10 * STEPS), "auto": timed(chosen, given, 10 * STEPS)}
            taken = in_turn(runs, ROUNDS)
        one, ours = statistics.median(taken["serial"]), statistics.median(taken["auto"])
        over = limited(f"{ratio(taken['auto'], taken['serial']):.2f}", at_most=1.1)
        yield f"| {case} | {chosen.executor} | {one * 1e3:.3f} | {ours * 1e3:.3f} | {over} | 1.1 |"
