"""Training that goes back and forth between eager PyTorch and sessions, with each optimizer, as if it never left."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from eager import assert_same_bits
from torch import Tensor, nn

import graphir
from graphir import passes, runtime

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, maximize=True),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "fused momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "fused dampened": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adamw": lambda params: torch.optim.AdamW(params, lr=0.01, maximize=True, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "fused adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "centered rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9, centered=True),
}


class Net(nn.Module):
    """A parameter of each kind: trained, frozen, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))


def cost(output: Tensor) -> Tensor:
    return output.square().mean()


def batch(step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


class Eager:
    """A model and its optimizer, with a scheduler, trained by PyTorch alone."""

    def __init__(self, make: Make, two_groups: bool = False) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = make(_groups(self.model) if two_groups else self.model.parameters())
        self.schedule()

    def schedule(self) -> None:
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def train(self, *steps: int) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            cost(self.model(batch(step))).backward()
            self.optimizer.step()
            self.scheduler.step()

    def session(self) -> runtime.Session:
        program = graphir.capture(self.model, inputs=(batch(0),), loss=cost, optimizer=self.optimizer)
        return runtime.Session(passes.emit(program), program.state)

    def train_in_session(self, *steps: int) -> None:
        """The same steps in a session; then its state takes the place of the model's and the optimizer's."""
        with self.session() as session:
            session.follow(self.optimizer)
            for step in steps:
                session.step(batch(step))
                self.scheduler.step()
            self.model.load_state_dict(session.state_dict())
            self.optimizer.load_state_dict(session.optimizer_state_dict())


def _groups(model: Net) -> Any:
    body, rest = list(model.body.parameters()), [*model.head.parameters(), *model.unused.parameters()]
    return [{"params": body, "lr": 0.05, "weight_decay": 0.1}, {"params": rest}]


def tensors_of(subject: Eager) -> dict[str, Tensor]:
    found = {f"model.{name}": tensor for name, tensor in subject.model.state_dict().items()}
    for index, entries in subject.optimizer.state_dict()["state"].items():
        found |= {f"{index}.{key}": tensor for key, tensor in entries.items() if tensor is not None}
    return found


@pytest.mark.parametrize("two_groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_back_and_forth(name: str, two_groups: bool) -> None:
    alone, traveller = Eager(OPTIMIZERS[name], two_groups), Eager(OPTIMIZERS[name], two_groups)
    traveller.train_in_session(0, 1)
    traveller.train(2)
    traveller.train_in_session(3)
    traveller.train(4, 5)
    traveller.train_in_session(6, 7)
    alone.train(*range(8))
    assert_same_bits(tensors_of(traveller), tensors_of(alone), name)
    assert traveller.optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_session_without_a_step_leaves_an_optimizer_as_new(name: str) -> None:
    alone, traveller = Eager(OPTIMIZERS[name]), Eager(OPTIMIZERS[name])
    traveller.train_in_session()
    traveller.train(0, 1)
    alone.train(0, 1)
    assert_same_bits(tensors_of(traveller), tensors_of(alone), name)


@pytest.mark.parametrize("name", ["dampened", "adam", "fused adagrad"])
def test_a_session_goes_on_from_another_session(name: str) -> None:
    alone, subject = Eager(OPTIMIZERS[name]), Eager(OPTIMIZERS[name])
    for part in ((0,), (1, 2)):
        with subject.session() as first:
            for step in part:
                first.step(batch(step))
            with runtime.Session(first.plan, first.state()) as second:
                second.step(batch(3))
                subject.model.load_state_dict(second.state_dict())
                subject.optimizer.load_state_dict(second.optimizer_state_dict())
    alone.scheduler.step = lambda: None  # type: ignore[method-assign]
    alone.train(0, 3, 1, 2, 3)
    assert_same_bits(tensors_of(subject), tensors_of(alone), name)


def test_capture_leaves_the_optimizer_as_it_was() -> None:
    subject = Eager(OPTIMIZERS["centered rmsprop"])
    subject.train(0)
    before = copy.deepcopy(subject.optimizer.state_dict())
    with subject.session() as session:
        session.step(batch(1))
    assert str(subject.optimizer.state_dict()) == str(before)
