"""The fast path of data parallelism against the module on its shares: in turn, and at a time with nothing exchanged."""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import models
import torch
from eager_only import EagerOnly
from limits import limited
from parallel import CASES
from timing import in_turn, ratio, warmed
from torch import Tensor, nn

import graphir

__all__ = ["rows"]

ROUNDS, WARM, CALLS = 12, 2, 8
"""In each round, how many calls are made, and how many before them."""
REPLICAS = 2
IN_TURN, APART, PATH = "both shares in turn, one thread", "two threads, a share each, apart", "the fast path"
EAGER = "eager replicas, a thread each, backward in one"


def rows() -> Iterator[str]:
    """The table of a call with its backward and the sum of the gradients, each kernel in one thread."""
    yield (
        "| model | cores | run | ms | speed-up | at least | of two threads apart | at least "
        "| over shares in turn | at most |"
    )
    yield "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case, (make, batch) in CASES.items():
            for cores in (2, 1):
                with _on_cores(cores):
                    yield from _rows(case, cores, _taken(make(batch)))
    finally:
        torch.set_num_threads(threads)


def _rows(case: str, cores: int, taken: dict[str, list[float]]) -> Iterator[str]:
    turn, apart = taken[IN_TURN], taken[APART]
    reached = ratio(turn, apart) >= 1.8
    for name, mine in taken.items():
        two, one = name == PATH and cores == 2, name == PATH and cores == 1
        speed = 1.6 if two and reached else None
        yield (
            f"| {case} | {cores} | {name} | {statistics.median(mine) * 1e3:.2f} "
            f"| {limited(f'{ratio(turn, mine):.2f}', at_least=speed)} | {speed or ''} "
            f"| {limited(f'{ratio(apart, mine):.2f}', at_least=0.9 if two else None)} | {0.9 if two else ''} "
            f"| {limited(f'{ratio(mine, turn):.2f}', at_most=1.1 if one else None)} | {1.1 if one else ''} |"
        )


def _taken(example: models.Example) -> dict[str, list[float]]:
    """Seconds of a call in each way."""
    model, (x,) = example.model, example.inputs
    grad = torch.randn_like(model(x))
    path = graphir.DataParallel(model, range(REPLICAS), binding="cpu")
    eager = EagerOnly(model, range(REPLICAS), binding="cpu")
    shares, grads = x.chunk(REPLICAS), grad.chunk(REPLICAS)
    copies = [copy.deepcopy(model) for _ in range(REPLICAS)]
    with ThreadPoolExecutor(REPLICAS, initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def at_a_time() -> None:
            list(pool.map(_call, copies, shares, grads))

        return in_turn(
            {
                IN_TURN: _timed(model, lambda: [_call(model, *pair) for pair in zip(shares, grads, strict=True)]),
                APART: _timed(copies, at_a_time),
                PATH: _timed(model, lambda: path(x).backward(grad)),
                EAGER: _timed(model, lambda: eager(x).backward(grad)),
            },
            ROUNDS,
        )


def _call(module: nn.Module, x: Tensor, grad: Tensor) -> None:
    module(x).backward(grad)


def _timed(held: nn.Module | Sequence[nn.Module], call: Callable[[], object]) -> Callable[[], float]:
    """Seconds of a call that starts without gradients."""
    params = [p for m in ([held] if isinstance(held, nn.Module) else held) for p in m.parameters()]

    def whole() -> None:
        for param in params:
            param.grad = None
        call()

    run = warmed(whole, WARM)
    return lambda: run(CALLS) / CALLS


@contextmanager
def _on_cores(count: int) -> Iterator[None]:
    """While this is active, threads of this process that begin run on so many cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
