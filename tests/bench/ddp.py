"""One of two processes under DistributedDataParallel: ``python tests/bench/ddp.py RANK STORE CASE``.

Each line of its input is a number of steps; it answers with the seconds that they took, and ends at 0.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from parallel import CASES, WARM, optimizer_of


def main(rank: int, store: str, case: str) -> None:
    """Serve steps on this process's half of the batch, each kernel in one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    make, batch = CASES[case]
    model, inputs, targets, loss = make(batch // 2)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(model)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss(wrapped(*inputs), *targets).backward()
            optimizer.step()

    while steps := int(sys.stdin.readline() or 0):
        run(WARM)
        dist.barrier()
        start = time.perf_counter()
        run(steps)
        print(time.perf_counter() - start, flush=True)
    dist.barrier()
    os._exit(0)  # gloo now and then aborts in its own clean-up


main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
