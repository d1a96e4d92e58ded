"""A captured step computes the bits of eager PyTorch: at the captured batch size and at others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from direct import matches_eager

from graphir.capturing.capture import capture
from graphir.ir.program import Program
from graphir.ir.verify import verify

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True),
    "foreach sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, maximize=True, foreach=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=1e-3, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, betas=(0.8, 0.99), eps=1e-6, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "dampened sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1e-3),
    "fused dampened sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "foreach adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, maximize=True, foreach=True),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, weight_decay=1e-3, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, weight_decay=1e-3),
    "centered rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, alpha=0.9, momentum=0.9, centered=True),
    "foreach rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, maximize=True, foreach=True),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, fused=True),
}

EXAMPLES: dict[str, Callable[[], models.Example]] = {
    "mlp": models.mlp,
    "mlp of one": lambda: models.mlp(batch=1),
    "resnet": lambda: models.resnet(blocks=3),
    "resnet with dropout": lambda: models.resnet(blocks=1, dropout=0.3),
    "gpt": models.gpt,
    "gpt with dropout": lambda: models.gpt(layers=1, dropout=0.2),
}


def captured(example: models.Example, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> Program:
    optimizer = make(example.model.parameters()) if make else None
    return capture(example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)


@pytest.mark.parametrize("name", EXAMPLES)
def test_three_batch_sizes_have_the_bits_of_eager(name: str) -> None:
    example = EXAMPLES[name]()
    program = captured(example, OPTIMIZERS["nesterov"])
    assert program.covers.fixed == ""
    verify(program)
    matches_eager(program, example, OPTIMIZERS["nesterov"], batches=(2, 5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_the_bits_of_torch(name: str) -> None:
    example = models.mlp()
    program = captured(example, OPTIMIZERS[name])
    verify(program)
    matches_eager(program, example, OPTIMIZERS[name], steps=3)


def test_channels_last_has_the_bits_of_eager() -> None:
    example = models.resnet(blocks=1, dropout=0.3)
    example.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    example = example._replace(inputs=(example.inputs[0].to(memory_format=torch.channels_last),))
    program = captured(example, OPTIMIZERS["fused sgd"])
    matches_eager(program, example, OPTIMIZERS["fused sgd"])
