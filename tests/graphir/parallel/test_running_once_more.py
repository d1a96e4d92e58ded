"""A backward that runs the replicas once more: on what the forward had, whatever was changed since, or it says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor, nn

import graphir

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error::graphir.errors.EagerWarning"),  # where no test asks for eager replicas
]


class Two(nn.Module):
    """Two outputs, so that a gradient for one is none that the first call's plans expect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.zeros(3))
        self.shift: Tensor
        self.scale = 2.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.fc(x) * self.scale + self.shift)
        return torch.relu(hidden), torch.tanh(hidden + x.sum(1, keepdim=True))


def batch(rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def slopes(wrap: Callable[..., Any], between: Callable[[Two, Tensor], None], **options: bool) -> list[Tensor]:
    model, x = Two(), batch()
    first, _ = wrap(model, [0, 1], binding="cpu")(x)
    between(model, x)
    params = [param for param in model.parameters() if param.requires_grad]
    return list(torch.autograd.grad(first, params, torch.ones(6, 3), **options))


def overwrites_the_input(model: Two, x: Tensor) -> None:
    x.fill_(-1)


def freezes(model: Two, x: Tensor) -> None:
    model.fc.bias.requires_grad_(False)


def evaluates(model: Two, x: Tensor) -> None:
    model.eval()


def runs_again(model: Two, x: Tensor) -> None:
    graphir.DataParallel(model, [0, 1], binding="cpu")(batch(8))


def hooks(model: Two, x: Tensor) -> None:
    model.fc.register_forward_hook(lambda *_: pytest.fail("the forward had no hook"))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("between", [overwrites_the_input, freezes, evaluates, runs_again, hooks])
def test_it_runs_on_what_the_forward_had(between: Callable[[Two, Tensor], None], create_graph: bool) -> None:
    ours = slopes(graphir.DataParallel, between, create_graph=create_graph)
    theirs = slopes(EagerOnly, between, create_graph=create_graph)
    assert all(map(torch.equal, ours, theirs))


def test_a_parameter_that_was_frozen_since_stays_frozen() -> None:
    model = Two()
    first, _ = graphir.DataParallel(model, [0, 1], binding="cpu")(batch())
    freezes(model, batch())
    first.sum().backward()
    assert not model.fc.bias.requires_grad and model.fc.weight.requires_grad


def rescales(model: Two, x: Tensor) -> None:
    model.scale = 3.0


def replaces(model: Two, x: Tensor) -> None:
    model.fc = nn.Linear(4, 3)


def becomes(model: Two, x: Tensor) -> None:
    class Other(Two):
        pass

    model.__class__ = Other


def fills(model: Two, x: Tensor) -> None:
    model.shift.fill_(1)


WRITTEN = "modified by an inplace operation: a parameter or buffer that is read once more"
OTHER = (
    "the module's attributes, parameters or buffers are other ones than in the forward\n"
    "  in   a backward that runs the replicas once more: for gradients of gradients, or of some outputs only\n"
    "  fix  change the module after the backward"
)


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (rescales, OTHER),
        (replaces, OTHER),
        (becomes, OTHER),
        (fills, WRITTEN),
    ],
)
def test_a_module_that_has_changed_is_told(between: Callable[[Two, Tensor], None], told: str) -> None:
    with pytest.raises(RuntimeError, match=told) as raised:
        slopes(graphir.DataParallel, between)
    assert isinstance(raised.value, graphir.ReplicationError)


def test_an_input_that_is_overwritten_before_a_planned_backward() -> None:
    def slope(wrap: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), batch()
        made = wrap(model, [0, 1], binding="cpu")(x)
        x.zero_()
        return torch.autograd.grad(made, model[0].weight, torch.ones(6, 3))[0]

    assert torch.equal(slope(graphir.DataParallel), slope(EagerOnly))


def test_gradients_of_gradients_reach_an_input_that_requires_them() -> None:
    def slope(wrap: Callable[..., Any]) -> Tensor:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), batch().requires_grad_()
        (first,) = torch.autograd.grad(wrap(model, [0, 1], binding="cpu")(x), x, torch.ones(6, 3), create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(slope(graphir.DataParallel), slope(EagerOnly))


def test_a_module_that_overwrites_its_input_does_so_each_time() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.mul_(2)).tanh()

    def found(wrap: Callable[..., Any]) -> list[Tensor]:
        model = Doubling()
        made = wrap(model, [0, 1], binding="cpu")(batch())
        ask = partial(torch.autograd.grad, made, model.fc.weight, torch.ones(6, 3), retain_graph=True)
        return [ask(create_graph=create_graph)[0] for create_graph in (True, True, False)]

    assert all(map(torch.equal, found(graphir.DataParallel), found(EagerOnly)))


@pytest.mark.parametrize("create_graph", [False, True])
def test_where_each_backward_runs_them_once_more_the_forward_does_not_run_as_a_plan(create_graph: bool) -> None:
    """Of two outputs the first and the second in turn, or gradients of gradients."""
    model = Two()
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    why = "its backward runs them once more each time, for gradients of gradients or for other outputs"
    with pytest.warns(graphir.errors.EagerWarning, match=why):
        for i in range(6):
            output = replicas(batch())[0 if create_graph else i % 2]
            torch.autograd.grad(output.sum(), model.fc.weight, create_graph=create_graph)
    assert "Differentiated" not in output.grad_fn.name()
