"""Programs of several micro-batches, and what is to hold of them in another order."""

from __future__ import annotations

from typing import Any

import models
import runnable
import torch
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program

__all__ = ["assert_same", "captured", "captured_gpt", "captured_mlp", "captured_resnet", "mlp", "steps"]


def captured(example: models.Example, parts: int, **options: Any) -> Program:
    return runnable.step_of(example, accumulate=parts, **options)


def captured_gpt(layers: int = 4, *, dropout: float = 0.0, batch: int = 8) -> Program:
    """Four micro-batches of a GPT whose head shares the embedding's weight."""
    return runnable.trained(models.gpt, 4, batch=batch, layers=layers, dropout=dropout)


def captured_mlp(parts: int = 4) -> Program:
    return runnable.trained(mlp, parts)


def captured_resnet() -> Program:
    return runnable.trained(models.resnet, 4, batch=16)


def mlp(batch: int = 32, width: int = 48, layers: int = 6) -> models.Example:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)])
    return models.Example(model, (torch.randn(batch, width),), (torch.randn(batch, width),), nn.functional.mse_loss)


def assert_same(before: Program, after: Program) -> None:
    assert sorted(map(str, after.step.ops)) == sorted(map(str, before.step.ops))
    assert graphir.certify(before, after).holds
    assert not runtime.check(passes.emit(passes.share_storage(after)))


def steps(program: Program, executor: str, inputs: tuple[torch.Tensor, ...]) -> tuple[list[Any], dict[str, Any]]:
    plan = passes.emit(passes.share_storage(program))
    with runtime.Session(plan, program.state, binding="cpu", executor=executor, threads=1) as session:
        return [session.step(*inputs) for _ in range(2)], session.state()
