"""One of two processes under DistributedDataParallel: ``python tests/bench/ddp.py RANK STORE CASE HEAP``."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from apart import serve
from graphir.runtime.machine.heap import kept_heap
from parallel import CASES, WARM
from stepping import eager_step, momentum_sgd
from timing import seconds


def main(rank: int, store: str, case: str, heap: str) -> None:
    """Serve steps on this process's half of the batch, each kernel in one thread; the heap is ``kept`` or not."""
    torch.set_num_threads(1)
    keeping = kept_heap() if heap == "kept" else nullcontext()
    keeping.__enter__()  # until the process ends
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    make, batch = CASES[case]
    example = make(batch // 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(example.model)
    step = eager_step(example._replace(model=wrapped), momentum_sgd(example.model, fused=True))

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    def timed(steps: int) -> float:
        run(WARM)
        dist.barrier()
        return seconds(lambda: run(steps))

    serve(timed)
    dist.barrier()
    os._exit(0)  # gloo now and then aborts in its own clean-up


main(int(sys.argv[1]), *sys.argv[2:])
