"""Outputs in containers of which torch's pytree does not know: plans return them as eager replicas do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor, nn

import graphir


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> Iterator[None]:
    """What runs eagerly without a test's asking is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphir.errors.EagerWarning)
        yield


class Parts:
    """What is made of an iterable of its parts."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self.parts = list(parts)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)


class Returns(nn.Module):
    def __init__(self, made_of: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.made_of = nn.Linear(3, 4), made_of

    def forward(self, x: Tensor) -> Any:
        return self.made_of(self.fc(x))


def tensors(output: Any) -> list[Any]:
    """The kinds of an output's containers, and its tensors."""
    if output is None or isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    return [type(output), *(found for part in parts for found in tensors(part))]


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "by itself": lambda y: Parts([y, y * 2]),
    "in a dict": lambda y: {"cache": Parts([(y, None), (y * 2, None)]), "y": y.tanh()},
    "within another": lambda y: (Parts([Parts([y]), [y * 3, Parts([])]]), y.detach()),
}


@pytest.mark.parametrize("made_of", OUTPUTS.values(), ids=OUTPUTS)
def test_they_are_those_of_eager_replicas(made_of: Callable[[Tensor], Any]) -> None:
    x = torch.randn(5, 3)
    found = []
    for data_parallel in (graphir.DataParallel, EagerOnly):
        module = Returns(made_of)
        model = data_parallel(module, device_ids=[0, 1], binding="cpu")
        for _ in range(2):
            output = tensors(model(x))
            module.zero_grad()
            made = [part for part in output if isinstance(part, Tensor) and part.requires_grad]
            sum(part.square().sum() for part in made).backward()
        found.append([*output, module.fc.weight.grad])
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours is theirs


def test_gradients_of_gradients_flow_through_them() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    found = []
    for data_parallel in (graphir.DataParallel, EagerOnly):
        model = data_parallel(Returns(lambda y: Parts([y.tanh(), y])), device_ids=[0, 1], binding="cpu")
        first, second = model(x)
        (once,) = torch.autograd.grad((first * second).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def test_what_is_used_up_by_reading_it_is_left_to_eager_replicas() -> None:
    model = graphir.DataParallel(Returns(lambda y: iter([y])), device_ids=[0, 1], binding="cpu")
    with (
        pytest.warns(graphir.EagerWarning, match="returns a list_iterator among its outputs"),
        pytest.raises(TypeError),
    ):
        model(torch.randn(4, 3))
