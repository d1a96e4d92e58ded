"""How long a step of a one-device plan takes against the same step in eager PyTorch."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator

import models
import torch
from timing import in_turn, seconds
from torch import nn
from zoo_rows import library

import graphir
from graphir import passes, runtime

__all__ = ["DispatchBound", "dispatch_bound", "rows"]


class DispatchBound(nn.Module):
    """Eight narrow layers: the time goes into calling operators, not into computing."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def dispatch_bound() -> models.Example:
    """Eight narrow layers, at batch 8."""
    return models.Example(DispatchBound(), (torch.randn(8, 64),), (torch.randn(8, 64),), nn.functional.mse_loss)


def _gpt() -> models.Example:
    return models.gpt(batch=8, length=64, width=128, heads=4, layers=4, vocabulary=256)


def _resnet18(image: int) -> models.Example:
    model = library("torchvision").models.resnet18()
    return models.Example(
        model, (torch.randn(8, 3, image, image),), (torch.randint(1000, (8,)),), nn.functional.cross_entropy
    )


CASES: dict[str, tuple[Callable[[], models.Example], float, int, int]] = {
    "dispatch-bound MLP, batch 8": (dispatch_bound, 0.45, 40, 50),
    "GPT, batch 8": (_gpt, 0.97, 30, 2),
}
"""What makes an example; at most of eager's time; how many rounds of how many steps."""

if importlib.util.find_spec("torchvision"):
    CASES["ResNet-18, torchvision, batch 8 of 64 x 64"] = lambda: _resnet18(64), 0.97, 20, 2
    CASES["ResNet-18, torchvision, batch 8 of 224 x 224"] = lambda: _resnet18(224), 0.97, 12, 1


def rows() -> Iterator[str]:
    """The table of a whole training step, zero_grad to optimizer.step, against eager; and of eager against itself."""
    yield (
        "| model | SGD momentum | eager, ms | plan, ms | plan / eager | quartiles | at most | eager / eager "
        "| quartiles |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, (make, limit, rounds, steps) in CASES.items():
        for label, fused in (("for-loop", False), ("fused", True)):
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

                taken = in_turn(
                    {
                        "eager": _timed(theirs, steps),
                        "plan": _timed(ours, steps),
                        "eager again": _timed(theirs, steps),
                    },
                    rounds,
                )
            eager, plan_ = (statistics.median(taken[key]) * 1e3 for key in ("eager", "plan"))
            yield (
                f"| {name} | {label} | {eager:.3f} | {plan_:.3f} | {_ratio(taken['plan'], taken['eager'])} | {limit} "
                f"| {_ratio(taken['eager again'], taken['eager'])} |"
            )


def _timed(run: Callable[[], None], steps: int) -> Callable[[], float]:
    """Seconds of a step, the mean of some."""

    def repeat() -> None:
        for _ in range(steps):
            run()

    return lambda: seconds(repeat) / steps


def _ratio(ours: list[float], theirs: list[float]) -> str:
    """Two cells: the median of the ratios of each round, and their quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.2f} | {low:.2f} to {high:.2f}"
