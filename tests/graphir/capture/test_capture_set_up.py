"""Modules that set themselves up in their first step are captured where the second step does the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from direct import matches_eager
from models import Example
from torch import Tensor, nn

import graphir
from graphir.errors import CaptureError


class SetUp(nn.Module):
    """Runs *first* in each step, and scales by what that returns."""

    def __init__(self, first: Callable[[SetUp], float]) -> None:
        super().__init__()
        self.first = first
        self.inner = nn.Linear(3, 2)
        self._seen: list[int] = []
        self._ready = False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.first(self)


def hang_up_hooks(module: SetUp) -> float:
    """As transformers does where a model is to return its hidden states."""
    if not module._ready:
        module.inner.register_forward_hook(lambda module, args, output: None)
        module._ready = True
    return 1.0


def note_once(module: SetUp) -> float:
    module._seen[:] = [1]
    return 1.0


def otherwise_at_first(module: SetUp) -> float:
    before, module._ready = module._ready, True
    return 1.0 if before else 2.0


def count_to_two(module: SetUp) -> float:
    module._seen = [*module._seen, 1][:2]
    return 1.0


def in_public(module: SetUp) -> float:
    module.shown = True
    return 1.0


def keep_tensor(module: SetUp) -> float:
    module._kept = torch.zeros(2)
    return 1.0


def example(first: Callable[[SetUp], float]) -> Example:
    return Example(SetUp(first), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())


@pytest.mark.parametrize("first", [hang_up_hooks, note_once])
def test_what_only_the_first_step_changes_is_put_back(first: Callable[[SetUp], float]) -> None:
    made = example(first)
    program = graphir.capture(made.model, made.inputs, loss=made.loss)
    assert program.fixed == ""
    assert not made.model._ready and made.model._seen == []
    assert not made.model.inner._forward_hooks
    matches_eager(program, made, batches=(6,))


@pytest.mark.parametrize(
    ("first", "attribute"),
    [(otherwise_at_first, "'_ready'"), (count_to_two, "'_seen'"), (in_public, "'shown'"), (keep_tensor, "'_kept'")],
    ids=["otherwise", "again", "public", "tensor"],
)
def test_a_second_step_that_differs_is_refused(first: Callable[[SetUp], float], attribute: str) -> None:
    made = example(first)
    with pytest.raises(
        CaptureError, match=f"the step changes .*{attribute}.*\n.*the model, at .*\n.*fix +keep it in a buffer"
    ):
        graphir.capture(made.model, made.inputs, loss=made.loss)
    assert not made.model._ready and made.model._seen == []
