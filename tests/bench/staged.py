"""One of two processes of torch.distributed.pipelining: ``python tests/bench/staged.py RANK STORE CASE SCHEDULE``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import models
import torch
from flowing import CASES
from gloo import join, serve_steps
from stepping import momentum_sgd
from torch import Tensor, nn
from torch.distributed import pipelining

_WARM = 1


class Part(nn.Module):
    """Some of a model's layers, with what comes before the first one and behind the last one."""

    def __init__(self, model: nn.Module, first: int, last: int) -> None:
        super().__init__()
        layers = model.get_submodule("layers")
        assert isinstance(layers, nn.ModuleList)
        self.layers = layers[first:last]
        self.is_gpt = isinstance(model, models.GPT)
        if isinstance(model, models.GPT) and first == 0:
            self.token, self.position = model.token, model.position
        if isinstance(model, models.GPT) and last == len(layers):
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "token"):
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def main(rank: int, store: str, name: str, form: str) -> None:
    """Serve steps of this process's stages, each kernel in one thread."""
    join(rank, store)
    case = CASES[name]
    example = case.make()
    several = "Interleaved" in form
    count = 4 if several else 2
    mine = [stage for stage in range(count) if stage % 2 == rank]
    size = 8 // count
    parts = [Part(example.model, stage * size, (stage + 1) * size) for stage in mine]
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, stage, count, device) for stage, part in zip(mine, parts, strict=True)]
    made: Callable[..., Any] = getattr(pipelining, form)
    given = stages if several else stages[0]
    schedule = made(given, n_microbatches=case.parts, loss_fn=example.loss)
    optimizer = momentum_sgd(nn.ModuleList(parts), fused=True)
    inputs = example.inputs if rank == 0 else ()
    target = example.targets[0] if rank == 1 else None

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            if target is None:
                schedule.step(*inputs)
            else:
                schedule.step(target=target, losses=[])
            optimizer.step()

    serve_steps(run, _WARM)


main(int(sys.argv[1]), *sys.argv[2:])
