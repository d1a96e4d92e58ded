"""One of two processes under DistributedDataParallel: ``python tests/bench/ddp.py RANK STORE CASE HEAP``."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from gloo import join, serve_steps
from graphir.runtime.machine.heap import kept_heap
from parallel import CASES, WARM
from stepping import eager_step, momentum_sgd


def main(rank: int, store: str, case: str, heap: str) -> None:
    """Serve steps on this process's half of the batch, each kernel in one thread; the heap is ``kept`` or not."""
    keeping = kept_heap() if heap == "kept" else nullcontext()
    keeping.__enter__()  # until the process ends
    join(rank, store)
    make, batch = CASES[case]
    example = make(batch // 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(example.model)
    step = eager_step(example._replace(model=wrapped), momentum_sgd(example.model, fused=True))

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    serve_steps(run, WARM)


main(int(sys.argv[1]), *sys.argv[2:])
