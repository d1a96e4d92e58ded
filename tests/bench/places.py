"""A placed module against the module itself: seconds of a call and its backward, the bytes that these take, and what
training scripts compute."""

from __future__ import annotations

import copy
import os
import tempfile
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import models
import scripts
import torch
from allocations import measured_peak
from limits import limited
from test_zoo import ROWS, batch_of, model_of
from timing import alternate
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir
from graphir.errors import GraphirError

__all__ = ["memory_rows", "rows"]

PAIRS: Final = 41
CASES: Final = {"MLP of 17 modules, batch 8": (100, 1.1), "GPT, batch 8": (3, 1.02)}
"""By model, how many calls are timed at a time, and the most that ours may take."""

WARMING: Final = 3
"""Calls until plans are those that last: the first backward says which outputs get gradients, and runs the model's own
code, in which models of transformers put hooks on their modules."""

ZOO: Final = 20
NEAR: Final = 2.0
"""How many models of the zoo are measured, and by how many per cent less than predicted they may take."""


def rows() -> Iterator[str]:
    """The three tables."""
    yield "| model | eager, µs | placed, µs | placed / eager | quartiles | at most |"
    yield "| --- | ---: | ---: | ---: | --- | ---: |"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for (name, (calls, most)), (model, x) in zip(CASES.items(), _models(), strict=True):
            yield _timed(name, model, x, calls, most)
        yield ""
        yield from memory_rows()
        yield ""
        yield from scripts.rows()
    finally:
        torch.set_num_threads(threads)


def _models() -> Iterator[tuple[nn.Module, Tensor]]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.ReLU())]
    yield nn.Sequential(*layers, nn.Linear(32, 4)), torch.randn(8, 32)
    example = models.gpt(8, vocabulary=512, length=64, width=128, heads=4, layers=4)
    yield example.model, example.inputs[0]


def _timed(name: str, model: nn.Module, x: Tensor, calls: int, most: float) -> str:
    placed = graphir.place(copy.deepcopy(model), (x,))
    gradient = torch.randn_like(model(x))

    def step(net: nn.Module) -> None:
        net(x).backward(gradient)
        for parameter in net.parameters():
            parameter.grad = None

    for net in (model, placed):
        for _ in range(calls):
            step(net)
    found = alternate(lambda: step(placed), lambda: step(model), pairs=PAIRS, inner=calls)
    shown = limited(f"{found.ratio:.2f}", at_most=most)
    quartiles = f"{found.low:.2f} to {found.high:.2f}"
    return f"| {name} | {found.theirs * 1e6:,.0f} | {found.ours * 1e6:,.0f} | {shown} | {quartiles} | {most} |"


def memory_rows() -> Iterator[str]:
    """Bytes that a call and its backward take, beside the model, its arguments and the gradients of its outputs."""
    yield "| model | forward, bytes | of predicted, % | forward and backward, bytes | of predicted, % |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    names = list(ROWS)
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        for name in names[:: len(names) // ZOO][:ZOO]:
            yield _measured(name)


def _measured(name: str) -> str:
    row = ROWS[name]
    args, _, kwargs = batch_of(row, row.size, 0)
    try:
        model = graphir.place(model_of(row), args, kwargs)
    except GraphirError as e:
        return f"| {name} | {e.what} | | | |"
    cells = []
    for measured, predicted in _bytes(model, args, kwargs):
        part, known = 100 * measured / predicted, "scratch" not in str(model.placement.memory())
        shown = limited(f"{part:.1f}", at_most=100 if known else None, at_least=100 - NEAR)
        cells += [f"{measured:,}", shown if known else f"{shown}, scratch unknown"]
    return f"| {name} | {' | '.join(cells)} |"


def _bytes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """What is measured and predicted of a forward, and of a forward and its backward."""
    for _ in range(WARMING):
        given = graded(model(*args, **kwargs))
        gradients = [torch.randn_like(tensor) for tensor in given]
        torch.autograd.backward(given, gradients)
    del given
    model.zero_grad()
    for plan in model.placement.plans[:2]:
        graphir.profile(plan)
    held = model.placement.memory()
    beside = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    beside += sum(p.nbytes for p in model.parameters() if p.requires_grad)
    given_bytes = sum(t.nbytes for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
    kept: list[Any] = []
    forward = measured_peak(lambda: kept.append(model(*args, **kwargs)))
    yield forward, held.phases["forward"]["gpu:0"] - beside - given_bytes
    kept.clear()

    def both() -> None:
        kept.append(model(*args, **kwargs))
        torch.autograd.backward(graded(kept[0]), gradients)

    backward = held.phases["backward"]["gpu:0"] - beside - sum(t.nbytes for t in gradients)
    saved = model.placement.plans[1].step
    blobs = model.placement.plans[0].step
    backward -= sum(
        blobs.blobs[name].nbytes(model.placement.plans[1].dims)
        for name in blobs.external_inputs
        if blobs.blobs[name].role == "input" and name in saved.external_inputs
    )
    yield measured_peak(both), max(backward, held.phases["forward"]["gpu:0"] - beside - given_bytes)


def graded(output: Any) -> list[Tensor]:
    """The tensors that need a gradient."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
