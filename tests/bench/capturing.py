"""How long a warm capture takes, beside what PyTorch itself takes for the same step on fake tensors."""

from __future__ import annotations

import functools
import gc
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import models
import torch
import torch.nn.functional as F
from limits import limited
from timing import seconds
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from zoo_rows import library

import graphir

__all__ = ["rows"]

RECORDINGS = 4
"""How often a capture runs a step whose only dimension is the batch."""


class Case(NamedTuple):
    """A step: how its model and its inputs and targets are made, and its loss."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    targets: Callable[[], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    adamw: bool = False
    at_most: float | None = None


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(64, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0]).flatten(0, 1)  # type: ignore[no-any-return]


def _cases() -> Iterator[tuple[str, Case]]:
    def images() -> tuple[Tensor, ...]:
        return (torch.randn(2, 3, 224, 224),)

    def classes() -> tuple[Tensor, ...]:
        return (torch.randint(1000, (2,)),)

    def tokens() -> tuple[Tensor, ...]:
        return (torch.randint(32000, (2, 64)),)

    def next_token(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    yield (
        "MLP, 3 layers",
        Case(lambda: models.mlp().model, lambda: models.mlp().inputs, lambda: models.mlp().targets, models.mlp().loss),
    )
    yield "ResNet-50", Case(models.ResNet50, images, classes, F.cross_entropy, at_most=1)
    if importlib.util.find_spec("torchvision"):
        vision = library("torchvision").models
        yield "ResNet-18, torchvision", Case(vision.resnet18, images, classes, F.cross_entropy)
        yield "ViT-B/16, torchvision", Case(vision.vit_b_16, images, classes, F.cross_entropy)
    if importlib.util.find_spec("transformers"):
        nlp = library("transformers")
        yield (
            "GPT-2 small, transformers",
            Case(lambda: nlp.GPT2LMHeadModel(nlp.GPT2Config(use_cache=False)), tokens, tokens, next_token, True, 1),
        )
        yield "T5-small, transformers", Case(
            lambda: _Translator(nlp.T5ForConditionalGeneration(nlp.T5Config(use_cache=False))),
            lambda: (*tokens(), *tokens()), tokens, next_token, True,
        )  # fmt: skip
    yield "LSTM, 2 layers, 16 tokens", Case(
        Tagger, lambda: (torch.randn(4, 16, 64),), lambda: (torch.randint(10, (4, 16)),),
        lambda out, y: F.cross_entropy(out, y.flatten()), True,
    )  # fmt: skip


class _Translator(nn.Module):
    """T5 on a source and on what was translated before, without its option of several kinds of outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, target: Tensor) -> Any:
        return self.model(input_ids=source, decoder_input_ids=target)


def rows(runs: int = 3) -> Iterator[str]:
    """The table of warm captures, and the fastest of the step under a plain FakeTensorMode and of ``make_fx`` on it."""
    yield (
        "| model | operators | capture, s | fastest | ms an operator | a recording | at most, s | a witness, s "
        "| FakeTensorMode, s | make_fx, s |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    with torch.backends.mkldnn.flags(enabled=False):  # the fused kernel of LSTM is refused
        for name, case in _cases():
            yield _row(name, case, runs)


def _row(name: str, case: Case, runs: int) -> str:
    model = case.model()
    make = torch.optim.AdamW if case.adamw else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.1, **({} if case.adamw else {"momentum": 0.9}))
    inputs, targets = case.inputs(), case.targets()
    programs: list[graphir.Program] = []

    def ours() -> None:
        programs[:] = [graphir.capture(model, inputs, targets=targets, loss=case.loss, optimizer=optimizer)]

    mode = FakeTensorMode()

    @functools.cache
    def without_data() -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
        return case.model(), case.inputs(), case.targets()

    def floor() -> None:
        with mode:
            fake, fake_inputs, fake_targets = without_data()
            case.loss(fake(*fake_inputs), *fake_targets).backward()

    traced_model = case.model()  # of its own: functional_call leaves its marks on an LSTM

    def step(params: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        out = case.loss(functional_call(traced_model, dict(params), inputs), *targets)
        return torch.autograd.grad(out, [p for p in params.values() if p.requires_grad], allow_unused=True)

    def traced() -> None:
        make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(dict(traced_model.named_parameters()))

    times: dict[Callable[[], None], list[float]] = {call: [] for call in (ours, floor, traced) if _works(call)}
    for _ in range(runs):
        for call, taken in times.items():
            if call is ours:
                programs.clear()  # its weights are not to be freed while the next are copied
            gc.collect()
            taken.append(seconds(call))
    operators, best = len(programs[0].step.ops), min(times[ours])
    fastest = limited(f"{best:.3f}", at_most=case.at_most)
    peers = [f"{min(times[peer]):.3f}" if peer in times else "fails" for peer in (floor, traced)]
    further = min(seconds(functools.partial(_witness, programs[0], 40 + run)) for run in range(runs))
    return (
        f"| {name} | {operators:,} | {statistics.median(times[ours]):.3f} | {fastest} | {best / operators * 1e3:.2f} "
        f"| {best / operators / RECORDINGS * 1e3:.2f} | {case.at_most or ''} | {further:.3f} "
        f"| {' | '.join(peers)} |"
    )


def _witness(program: graphir.Program, batch: int) -> None:
    """Record the step at a size that it was not recorded at, and compare it with the program."""
    assert program.witness is not None
    program.witness({"batch": batch})


def _works(call: Callable[[], None]) -> bool:
    """Run it once; torch's fake tensors can't follow every model."""
    try:
        call()
    except (DataDependentOutputException, AssertionError, RuntimeError):
        return False
    return True
