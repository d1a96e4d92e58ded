"""How long a step of a one-device plan takes against the same step in eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import models
import torch
from timing import alternate
from torch import nn

import graphir
from graphir import passes, runtime

__all__ = ["rows"]


class DispatchBound(nn.Module):
    """Eight narrow layers: the time goes into calling operators, not into computing."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _mlp() -> models.Example:
    model = DispatchBound()
    return models.Example(model, (torch.randn(8, 64),), (torch.randn(8, 64),), nn.functional.mse_loss)


def _residual() -> models.Example:
    return models.resnet(batch=32, blocks=4, channels=32, image=16, classes=10)


CASES = (
    ("dispatch-bound MLP, batch 8", _mlp, 0.6, 40, 20),
    ("residual net, batch 32", _residual, 1.0, 20, 2),
)


def rows() -> Iterator[str]:
    """The table of a whole training step, zero_grad to optimizer.step, against eager."""
    yield "| model | optimizer | eager, ms | plan, ms | plan / eager | quartiles | at most |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, make, limit, pairs, inner in CASES:
        for label, fused in (("SGD momentum, for-loop", False), ("SGD momentum, fused", True)):
            example = make()
            optimizer = torch.optim.SGD(example.model.parameters(), lr=0.01, momentum=0.9, fused=fused, foreach=False)
            program = graphir.capture(
                example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
            )
            plan = passes.emit(passes.share_storage(program))
            with runtime.Session(plan, program.state, binding="cpu") as session:

                def ours(session: runtime.Session = session, example: models.Example = example) -> None:
                    session.step(*example.inputs, *example.targets)

                def theirs(optimizer: torch.optim.Optimizer = optimizer, example: models.Example = example) -> None:
                    optimizer.zero_grad()
                    example.loss(example.model(*example.inputs), *example.targets).backward()
                    optimizer.step()

                r = alternate(ours, theirs, pairs=pairs, inner=inner)
            yield (
                f"| {name} | {label} | {r.theirs * 1e3:.3f} | {r.ours * 1e3:.3f} | {r.ratio:.2f} "
                f"| {r.low:.2f} to {r.high:.2f} | {limit} |"
            )
