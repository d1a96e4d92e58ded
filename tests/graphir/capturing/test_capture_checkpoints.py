"""Non-reentrant checkpoints: the exception that ends their second run keeps nothing alive."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from models import Example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphir.capturing.capture import capture
from graphir.capturing.record.values import Value

BODIES: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "that ends in a module": lambda fc, x, positions: fc(x + positions),
    "that ends in a function": lambda fc, x, positions: torch.tanh(fc(x + positions)),
}


class Positions(nn.Module):
    """Makes a tensor outside of the checkpointed function."""

    def __init__(self, body: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.out = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 2)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(4)
        h = checkpoint(lambda y: self.body(self.fc, y, positions), x, use_reentrant=False)
        return self.out(h)  # type: ignore[no-any-return]


def example(body: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> Example:
    return Example(Positions(body), (torch.randn(6, 4),), (torch.randint(2, (6,)),), F.cross_entropy)


@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_a_tensor_made_outside_of_a_checkpoint(body: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    given = example(body)
    program = capture(given.model, given.inputs, targets=given.targets, loss=given.loss)
    matches_eager(program, given, None)


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("body", BODIES.values(), ids=list(BODIES))
def test_no_tensor_of_a_recording_outlives_its_capture(body: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
    given = example(body)
    capture(given.model, given.inputs, targets=given.targets, loss=given.loss)
    gc.collect()
    assert not [value for value in gc.get_objects() if type(value) is Value and value.label == "arange"]
