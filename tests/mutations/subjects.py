"""The programs that are mutated: of the zoo, laden and placed; what each of their steps is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from zoo_rows import Batch, Row
from zoo_text import TEXT
from zoo_timm import TIMM
from zoo_vision import VISION
from zoo_written import WRITTEN

import graphir
from graphir import passes
from graphir.ir.program import Program
from mutations.laden import LOADS, Laden, laden_loss

__all__ = ["FORWARD", "ROWS", "SPREAD", "Sort", "Subject", "subjects", "zoo_batch", "zoo_names", "zoo_program"]

Sort: TypeAlias = Literal["training", "spread", "forward"]

_ZOO: Mapping[str, Row] = {**WRITTEN, **VISION, **TIMM, **TEXT}

ROWS = (
    *(name for name in WRITTEN if name != "transformer"),
    "vgg",
    "vision transformer",
    "timm convmixer",
    "timm mixer",
    "timm resmlp",
    "rnn",
)
"""Rows of the zoo whose training steps are mutated, laden with two things each: those with few operators."""

SPREAD = (
    *("vae", "dlrm", "autoencoder", "u-net", "wavenet", "diffusion", "rnn", "vgg", "permuted", "timm convmixer"),
    *("capsules", "gan", "mixture of experts", "siamese", "vision transformer", "timm mixer", "timm resmlp"),
    *("squeezenet", "bloom", "timm pit", "transformer", "alexnet", "fcn", "timm focalnet"),
)
"""Rows that are mutated on two replicas too, the second half of each shifted."""

FORWARD = (
    *("vae", "gan", "siamese", "mixture of experts", "capsules", "rnn", "u-net", "permuted", "dlrm", "wavenet"),
    *("swin", "bert", "llama", "vit", "squeezenet", "mobilenet v2", "timm pit", "bloom", "timm nest"),
)
"""Rows whose outputs alone are mutated too, without loss."""

_LOADED = 2


class Subject:
    """A program to mutate, and what its steps are given.

    Args:
        name: of it.
        sort: training, spread, forward.
        make: makes the program.
        batch: the arguments of a step, by how many rows and which step.
        sizes: of two batches.
    """

    def __init__(
        self,
        name: str,
        sort: Sort,
        make: Callable[[], Program],
        batch: Callable[[int, int], tuple[tuple[Any, ...], Mapping[str, Any]]],
        sizes: tuple[int, int],
    ) -> None:
        self.name, self.sort, self.make, self.batch, self.sizes = name, sort, make, batch, sizes

    @cached_property
    def program(self) -> Program:
        """The program, made once."""
        return self.make()


def subjects() -> Iterator[Subject]:
    """Every subject that is captured; none is made yet."""
    for number, name in enumerate(ROWS):
        loads = [LOADS[(number * _LOADED + k) % len(LOADS)] for k in range(_LOADED)]
        yield _subject(name, name, tuple(loads))
    for number, name in enumerate(SPREAD):
        yield _spread(name, (LOADS[number % len(LOADS)],))
    for name in FORWARD:
        yield _subject(f"{name}, forward", name, (), "forward")


def zoo_names() -> tuple[str, ...]:
    """Every row of the zoo."""
    return tuple(_ZOO)


def zoo_batch(name: str, size: int, step: int) -> Batch:
    """The data of a step of a row."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + step)
        return _ZOO[name].data(size)


def zoo_program(name: str, loads: tuple[str, ...] = (), trained: bool = True) -> Program:
    """A row's step, with two groups of parameters, or its outputs."""
    row = _ZOO[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = row.model().train()
        model = Laden(model, loads).train() if loads else model
    batch = zoo_batch(name, row.size, 0)
    options: dict[str, Any] = {"kwargs": batch.kwargs, "batch_dims": row.batch_dims}
    if trained:
        options |= {"loss": laden_loss(row.loss) if loads else row.loss, "targets": batch.targets}
        options |= {"optimizer": _optimizer(model, len(name))}
    elif row.batch_dims is not None:
        del options["batch_dims"]
    return graphir.capture(model, batch.inputs, **options)


def _optimizer(model: nn.Module, kind: int) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": params[::2], "lr": 0.03}, {"params": params[1::2], "lr": 0.01}]
    if kind % 3 == 0:
        return torch.optim.AdamW(groups, fused=True)
    return torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-3)


def _given(name: str, trained: bool) -> Callable[[int, int], tuple[tuple[Any, ...], Mapping[str, Any]]]:
    def batch(size: int, step: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        found = zoo_batch(name, size, step)
        return (*found.inputs, *(found.targets if trained else ())), found.kwargs

    return batch


def _subject(title: str, name: str, loads: tuple[str, ...], sort: Sort = "training") -> Subject:
    size, trained = _ZOO[name].size, sort != "forward"
    return Subject(title, sort, lambda: zoo_program(name, loads, trained), _given(name, trained), (size, size + 1))


def _spread(name: str, loads: tuple[str, ...]) -> Subject:
    def make() -> Program:
        program = passes.replicate(zoo_program(name, loads), [0, 1])
        activations = passes.find_activations(program)
        shifted = passes.shift_activations(program, activations[len(activations) // 2 :], shifts={0: 2, 1: 3})
        return passes.inject_copies(shifted)

    size = _ZOO[name].size
    return Subject(f"{name}, spread", "spread", make, _given(name, trained=True), (2 * size, 2 * size + 1))
