"""One process of DistributedDataParallel on a card each: ``python gpu_ddp.py WORLD STORE BACKEND RANK``; the first one
prints the median seconds of a step."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from gpu_card import Card, Pretended
from gpu_cases import Case, Way, eager
from gpu_devices import DDP_ROWS, DDP_STEPS, DDP_WARM, example
from torch.nn.parallel import DistributedDataParallel

__all__ = ["step_seconds"]


def step_seconds(card: Card, rank: int, world: int, store: str, backend: str) -> float:
    """The median seconds of a step that ends on all cards."""
    if not card.pretended:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    share = example(DDP_ROWS, card.pretended)
    wrapped = DistributedDataParallel(share.model.to(card.place))
    step = eager(card, Case(wrapped, *share[1:]), Way(False, True), shared=True).step
    found = []
    for _ in range(DDP_WARM + DDP_STEPS):
        dist.barrier()
        start = time.perf_counter()
        step()
        card.settle()
        found.append(time.perf_counter() - start)
    return statistics.median(found[DDP_WARM:])


def main() -> None:
    """Say how long a step takes, and end at once: gloo now and then aborts in its own clean-up."""
    world, store, backend, rank = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    seconds = step_seconds(Pretended() if backend == "gloo" else Card(), rank, world, store, backend)
    if rank == 0:
        print(seconds, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
