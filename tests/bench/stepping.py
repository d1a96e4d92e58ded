"""How long a step of a one-device plan takes against the same step in eager PyTorch."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import models
import torch
from apart import apart
from limits import limited
from timing import in_turn
from torch import nn
from zoo_rows import library

__all__ = ["CASES", "Case", "DispatchBound", "dispatch_bound", "eager_step", "momentum_sgd", "rows"]


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


class Case(NamedTuple):
    """Attributes:
    make: makes the example.
    limit: at most of eager's time.
    rounds, steps: how many rounds of how many steps.
    warm: how many steps before them are not timed: another process had the machine.
    alone: whether kernels use one thread. Others of those that a short kernel wakes sleep or don't, as the machine has
        it, for both sides.
    """

    make: Callable[[], models.Example]
    limit: float
    rounds: int
    steps: int
    warm: int = 1
    alone: bool = False


CASES: dict[str, Case] = {
    "dispatch-bound MLP, batch 8": Case(dispatch_bound, 0.45, 40, 50, warm=100),
    "dispatch-bound MLP, batch 8, one thread": Case(dispatch_bound, 0.45, 40, 50, warm=100, alone=True),
    "GPT, batch 8": Case(_gpt, 0.97, 30, 2, warm=5),
}

if importlib.util.find_spec("torchvision"):
    CASES["ResNet-18, torchvision, batch 8 of 64 x 64"] = Case(lambda: _resnet18(64), 0.97, 20, 2, warm=3)
    CASES["ResNet-18, torchvision, batch 8 of 224 x 224"] = Case(lambda: _resnet18(224), 0.97, 24, 1)


def momentum_sgd(model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    """SGD with momentum, in one call or one parameter after the other."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused, foreach=False)


def eager_step(example: models.Example, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step as PyTorch makes it."""

    def step() -> None:
        optimizer.zero_grad()
        example.loss(example.model(*example.inputs), *example.targets).backward()
        optimizer.step()

    return step


def rows() -> Iterator[str]:
    """The table of a whole training step, zero_grad to optimizer.step, against eager; and of eager against itself. Each
    side is a process of its own, once as glibc has the heap and once where it keeps it."""
    yield (
        "| model | SGD momentum | eager, ms | plan, ms | plan / eager | quartiles | at most | eager / eager "
        "| quartiles | heap kept: eager, ms | plan, ms | plan / eager | quartiles | plan, kept / not |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, case in CASES.items():
        for form in ("for-loop", "fused"):
            eager, plan, again, kept_eager, kept_plan = _taken(name, form).values()
            kept = _ratio(kept_plan, plan).partition(" |")[0]
            yield (
                f"| {name} | {form} | {_milliseconds(eager)} | {_milliseconds(plan)} "
                f"| {_ratio(plan, eager, case.limit)} | {case.limit} | {_ratio(again, eager)} "
                f"| {_milliseconds(kept_eager)} | {_milliseconds(kept_plan)} "
                f"| {_ratio(kept_plan, kept_eager)} | {kept} |"
            )


def _taken(name: str, form: str) -> dict[str, list[float]]:
    """Seconds of steps in eager PyTorch, by a plan, and in eager PyTorch once more; and where the heap is kept."""
    case = CASES[name]
    sides = [(side, name, form, heap) for heap in ("as it is", "kept") for side in ("eager", "plan")]
    with ExitStack() as stack:
        eager, plan, *kept = [stack.enter_context(apart("one_side.py", [side])) for side in sides]
        runs = dict(
            zip(("eager", "plan", "eager again", "eager, kept", "plan, kept"), (eager, plan, eager, *kept), strict=True)
        )
        return in_turn({side: partial(_step_seconds, run, case.steps) for side, run in runs.items()}, case.rounds)


def _step_seconds(run: Callable[[int], float], steps: int) -> float:
    """The mean of some."""
    return run(steps) / steps


def _milliseconds(taken: list[float]) -> str:
    return f"{statistics.median(taken) * 1e3:.3f}"


def _ratio(ours: list[float], theirs: list[float], at_most: float | None = None) -> str:
    """Two cells: the median of the ratios of each round, marked where it is too large, and their quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{limited(f'{middle:.2f}', at_most=at_most)} | {low:.2f} to {high:.2f}"
