"""How long a step of a one-device plan takes against the same step in eager PyTorch."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

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


class _Case(NamedTuple):
    """Attributes:
    make: makes the example.
    limit: at most of eager's time.
    rounds, steps: how many rounds of how many steps.
    alone: whether kernels use one thread. Others of those that a short kernel wakes sleep or don't, as the machine has
        it, for both sides.
    """

    make: Callable[[], models.Example]
    limit: float
    rounds: int
    steps: int
    alone: bool = False


CASES: dict[str, _Case] = {
    "dispatch-bound MLP, batch 8": _Case(dispatch_bound, 0.45, 40, 50),
    "dispatch-bound MLP, batch 8, one thread": _Case(dispatch_bound, 0.45, 40, 50, alone=True),
    "GPT, batch 8": _Case(_gpt, 0.97, 30, 2),
}

if importlib.util.find_spec("torchvision"):
    CASES["ResNet-18, torchvision, batch 8 of 64 x 64"] = _Case(lambda: _resnet18(64), 0.97, 20, 2)
    CASES["ResNet-18, torchvision, batch 8 of 224 x 224"] = _Case(lambda: _resnet18(224), 0.97, 12, 1)


def rows() -> Iterator[str]:
    """The table of a whole training step, zero_grad to optimizer.step, against eager; and of eager against itself."""
    yield (
        "| model | SGD momentum | eager, ms | plan, ms | plan / eager | quartiles | at most | eager / eager "
        "| quartiles |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, case in CASES.items():
        for label, fused in (("for-loop", False), ("fused", True)):
            threads = torch.get_num_threads()
            if case.alone:
                torch.set_num_threads(1)
            try:
                taken = _taken(case, fused)
            finally:
                torch.set_num_threads(threads)
            eager, plan = (statistics.median(taken[key]) * 1e3 for key in ("eager", "plan"))
            yield (
                f"| {name} | {label} | {eager:.3f} | {plan:.3f} | {_ratio(taken['plan'], taken['eager'])} "
                f"| {case.limit} | {_ratio(taken['eager again'], taken['eager'])} |"
            )


def _taken(case: _Case, fused: bool) -> dict[str, list[float]]:
    """Seconds of steps in eager PyTorch, by a plan, and in eager PyTorch again."""
    example = case.make()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.01, momentum=0.9, fused=fused, foreach=False)
    program = graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )

    def theirs() -> None:
        optimizer.zero_grad()
        example.loss(example.model(*example.inputs), *example.targets).backward()
        optimizer.step()

    plan = passes.emit(passes.share_storage(program))
    with runtime.Session(plan, program.state, binding="cpu") as session:

        def ours() -> None:
            session.step(*example.inputs, *example.targets)

        eager, again = _timed(theirs, case.steps), _timed(theirs, case.steps)
        return in_turn({"eager": eager, "plan": _timed(ours, case.steps), "eager again": again}, case.rounds)


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
