"""One of two processes over gloo, whose steps are timed from the same moment on."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from apart import serve
from timing import seconds

__all__ = ["join", "serve_steps"]


def join(rank: int, store: str) -> None:
    """Be one of the two, each kernel in one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def serve_steps(run: Callable[[int], None], warm: int) -> None:
    """Answer with the seconds of so many steps, after *warm* that are not timed; then end the process."""

    def timed(steps: int) -> float:
        run(warm)
        dist.barrier()
        return seconds(lambda: run(steps))

    serve(timed)
    dist.barrier()
    os._exit(0)  # gloo now and then aborts in its own clean-up
