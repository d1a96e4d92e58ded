"""How long a step of a one-device plan takes against the same step in eager PyTorch."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import models
import torch
from apart import apart
from timing import in_turn, warmed
from torch import nn
from zoo_rows import library

import graphir
from graphir import passes, runtime

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
    """The table of a whole training step, zero_grad to optimizer.step, against eager; and of eager against itself."""
    yield (
        "| model | SGD momentum | eager, ms | plan, ms | plan / eager | quartiles | at most | eager / eager "
        "| quartiles | plan / eager beside it | quartiles |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, case in CASES.items():
        for form in ("for-loop", "fused"):
            threads = torch.get_num_threads()
            if case.alone:
                torch.set_num_threads(1)
            try:
                taken = _taken(name, form)
            finally:
                torch.set_num_threads(threads)
            plan, eager, again, beside = taken.values()
            yield (
                f"| {name} | {form} | {statistics.median(eager) * 1e3:.3f} | {statistics.median(plan) * 1e3:.3f} "
                f"| {_ratio(plan, eager)} | {case.limit} | {_ratio(again, eager)} | {_ratio(plan, beside)} |"
            )


def _taken(name: str, form: str) -> dict[str, list[float]]:
    """Seconds of steps by a plan, twice in eager PyTorch in a process of its own, and in eager PyTorch here."""
    case = CASES[name]
    example = case.make()
    optimizer = momentum_sgd(example.model, fused=form == "fused")
    program = graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    plan = passes.emit(passes.share_storage(program))
    with (
        runtime.Session(plan, program.state, binding="cpu") as session,
        apart("eager_steps.py", [(name, form)]) as eager,
    ):
        sides = {
            "plan": _timed(lambda: session.step(*example.inputs, *example.targets), case),
            "eager": lambda: eager(case.steps) / case.steps,
            "eager again": lambda: eager(case.steps) / case.steps,
            "eager beside the plan": _timed(eager_step(example, optimizer), case),
        }
        return in_turn(sides, case.rounds)


def _timed(step: Callable[[], object], case: Case) -> Callable[[], float]:
    """Seconds of a step, the mean of some."""
    timed = warmed(step, case.warm)
    return lambda: timed(case.steps) / case.steps


def _ratio(ours: list[float], theirs: list[float]) -> str:
    """Two cells: the median of the ratios of each round, and their quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.2f} | {low:.2f} to {high:.2f}"
