"""A sharded DLRM on two logical devices, against two threads that run half a batch each and exchange nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch
from limits import limited
from timing import in_turn, warmed

import graphir
from graphir import passes, runtime
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss

__all__ = ["rows"]

ROUNDS, WARM, STEPS = 12, 2, 8

BATCH = 512

CASES = {
    "MLPs of 512, 8 tables": Config(64, (512, 512, 32), (10_000,) * 8, (512, 512, 1), "dot", lookups=4, sparse=True),
    "MLPs of 256, 26 tables": Config(13, (256, 256, 16), (10_000,) * 26, (256, 256, 1), "dot", lookups=2, sparse=True),
}
"""Where the MLPs take most of the time."""


def _session(config: Config, rows: int, devices: int) -> tuple[runtime.Session, tuple[Any, ...]]:
    """A session of steps of so many rows in all, and a batch."""
    torch.manual_seed(0)
    model, share = Dlrm(config), clicks(config, rows // devices, 0)
    program = graphir.capture(
        model,
        share.inputs,
        targets=(share.target,),
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        batch_dims=batch_dims(config),
    )
    placed = program
    if devices > 1:
        placed = passes.inject_copies(passes.shard(program, {"emb_l.*": "balanced"}, list(range(devices))))
    whole = clicks(config, rows, 1)
    session = runtime.Session(passes.emit(passes.share_storage(placed)), program.state, binding="cpu", threads=1)
    return session, (*whole.inputs, whole.target)


def _timed(session: runtime.Session, batch: tuple[Any, ...]) -> Callable[[], float]:
    run = warmed(lambda: session.step(*batch), WARM)
    return lambda: run(STEPS) / STEPS


def rows() -> Iterator[str]:
    """The table, each kernel in one thread."""
    yield "| model | one device, ms | sharded on two, ms | halves apart, ms | apart / sharded | quartiles | at least |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | ---: |"
    for case, config in CASES.items():
        with ExitStack() as stack:
            one, sharded = _session(config, BATCH, 1), _session(config, BATCH, 2)
            halves = [_session(config, BATCH // 2, 1) for _ in range(2)]
            for session, _ in (one, sharded, *halves):
                stack.enter_context(session)
            pool = stack.enter_context(ThreadPoolExecutor(2))
            apart = [_timed(*half) for half in halves]
            taken = in_turn(
                {
                    "one": _timed(*one),
                    "sharded": _timed(*sharded),
                    "apart": lambda apart=apart, pool=pool: max(pool.map(lambda run: run(), apart)),
                },
                ROUNDS,
            )
        ratios = [a / b for a, b in zip(taken["apart"], taken["sharded"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        figures = " | ".join(f"{statistics.median(taken[side]) * 1e3:.2f}" for side in ("one", "sharded", "apart"))
        yield f"| {case} | {figures} | {limited(f'{middle:.2f}', at_least=0.9)} | {low:.2f} to {high:.2f} | 0.9 |"
