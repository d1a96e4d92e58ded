"""Training steps as people write them, against the same functions run eagerly."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch
from limits import limited
from steps import STEPS, as_eager, replicated
from timing import seconds
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from zoo_rows import library

import graphir

__all__ = ["rows"]

REPLICATED = 18
"""How many of the steps at least two replicas stand for."""

_AT_MOST: Final = 1.25
"""How long a capture of the function may take at most, in captures of the model, the loss and the optimizer."""

_ROUNDS: Final = 5


def _llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=6, use_cache=False
    )
    ids = torch.randint(64, (4, 8))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


class _Classified(nn.Module):
    """ResNet-18 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = library("torchvision").models.resnet18(num_classes=8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.net(x), y)}


def _resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return _Classified(), {"x": torch.randn(4, 3, 32, 32), "y": torch.arange(4)}


_MODELS: Final[dict[str, Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]]] = {
    "LLaMA of 6 layers": _llama,
    "ResNet-18": _resnet,
}
_OPTIMIZERS: Final = {
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
}


def _taken(
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]],
    optimizer_of: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[float, float]:
    """The seconds of a capture of a model and its loss, and of the same step as a function in these: medians."""
    model, batch = make()
    optimizer = optimizer_of(model.parameters())

    def step(**batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    def loss_of(out: dict[str, torch.Tensor]) -> torch.Tensor:
        return out["loss"]

    pairs = []
    for _ in range(_ROUNDS + 1):  # the first warms up
        old = seconds(
            lambda: graphir.capture(model, kwargs=batch, loss=loss_of, optimizer=optimizer, clip_grad_norm=1.0)
        )
        pairs.append((old, seconds(lambda: graphir.capture(step, kwargs=batch)) / old))
    taken, ratio = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
    return taken, ratio


def _captures() -> Iterator[str]:
    """How long captures of one step take in both forms."""
    yield "| model | optimizer | the model and its loss, s | the function, in these | at most |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for name, make in _MODELS.items():
        for of, optimizer_of in _OPTIMIZERS.items():
            taken, ratio = _taken(make, optimizer_of)
            yield f"| {name} | {of} | {taken:.2f} | {limited(f'{ratio:.2f}', at_most=_AT_MOST)} | {_AT_MOST} |"


def rows() -> Iterator[str]:
    """A row a step, and how many are equal and replicated; then how long captures take."""
    yield "| step | five steps, two sizes, a short last batch | two replicas | seconds |"
    yield "| --- | --- | --- | ---: |"
    equal = spread = 0
    for name, make in STEPS.items():
        begun = time.perf_counter()
        differs, refused = as_eager(make), replicated(make)
        equal, spread = equal + (not differs), spread + (not refused)
        shown = differs or "equal to the last bit"
        yield f"| {name} | {shown} | {refused or 'equal on each share'} | {time.perf_counter() - begun:.1f} |"
    whole = limited(str(equal), at_least=len(STEPS))
    yield f"| of {len(STEPS)} | {whole} equal | {limited(str(spread), at_least=REPLICATED)} replicated | |"
    yield ""
    yield from _captures()
