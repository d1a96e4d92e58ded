"""Nothing is baked in unseen: data that the step reads from elsewhere is a constant in ``state``, or is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from torch import Tensor, nn

from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.errors import CaptureError
from graphir.ir.program import Program

GLOBAL = torch.tensor([1.0, 2.0, 3.0, 4.0])


class Reader(nn.Module):
    """Reads data from all the places where models keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.attribute = torch.tensor([2.0, 0.5, 1.0, 3.0])
        self.listed = [torch.ones(4), torch.tensor([0.5, 1.0, 1.5, 2.0])]
        self.by_name = {"bias": torch.full((4,), 0.25)}
        self.array = torch.tensor([1.0, 0.0, 1.0, 1.0]).numpy()

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) * self.attribute + self.listed[1] - self.by_name["bias"]
        return h * GLOBAL + torch.from_numpy(self.array) * torch.tensor([1.0, 2.0, 0.0, 1.0])


def constants(program: Program) -> dict[str, Tensor]:
    return {name: program.state[name] for name, blob in program.step.blobs.items() if blob.role == "constant"}


def first_loss(program: Program, *batch: Tensor) -> Tensor:
    with runtime.Session(passes.emit(program), program.state) as session:
        return session.step(*batch)  # type: ignore[no-any-return]


def test_data_from_elsewhere_is_a_constant_in_state() -> None:
    torch.manual_seed(0)
    model = Reader()
    x = torch.randn(3, 4)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])

    def loss(out: Tensor) -> Tensor:
        return (out * weights).sum()

    program = capture(model, (x,), loss=loss)
    found = constants(program)
    named = {"attribute": model.attribute, "listed.1": model.listed[1], "by_name.bias": model.by_name["bias"]}
    assert {name: found[name].tolist() for name in named} == {name: t.tolist() for name, t in named.items()}
    others = [found[name].tolist() for name in found if name not in named]
    assert others == [GLOBAL.tolist(), model.array.tolist(), [1.0, 2.0, 0.0, 1.0], weights.tolist()]
    assert_same_bits({"loss": first_loss(program, x)}, {"loss": loss(model(x))}, "the step")


def test_data_of_an_inner_module_is_called_after_its_place() -> None:
    program = capture(nn.Sequential(Reader()), (torch.randn(3, 4),))
    assert {"0.attribute", "0.listed.1", "0.by_name.bias"} < set(constants(program))


CHANGES: dict[str, tuple[str, Callable[[Reader], Any]]] = {
    "attribute": ("attribute", lambda m: m.attribute.mul_(2)),
    "list": ("listed.1", lambda m: m.listed[1].mul_(2)),
    "dict": ("by_name.bias", lambda m: m.by_name["bias"].mul_(2)),
    "array": ("constant_1", lambda m: m.array.__imul__(2)),
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_later_change_is_followed_by_eager_and_by_the_constant_where_it_is_made_there_too(place: str) -> None:
    name, change = CHANGES[place]
    torch.manual_seed(0)
    model, x = Reader(), torch.randn(3, 4)
    program = capture(model, (x,), loss=lambda out: out.sum())
    before = model(x).sum()
    change(model)
    after = model(x).sum()
    assert before != after
    assert_same_bits({"loss": first_loss(program, x)}, {"loss": before}, "the step")
    changed = program.with_(state={**program.state, name: program.state[name] * 2})
    assert_same_bits({"loss": first_loss(changed, x)}, {"loss": after}, "the step")


def test_parameters_and_buffers_are_state_even_where_a_closure_holds_them() -> None:
    model = nn.BatchNorm1d(4)
    mean = model.running_mean
    assert mean is not None
    program = capture(model, (torch.randn(3, 4),), loss=lambda out: (out * mean).sum())
    assert not constants(program)
    weight = model.weight
    program = capture(model, (torch.randn(3, 4),), loss=lambda out: (out * weight).sum())
    assert not constants(program)


def test_parameters_of_the_loss_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, out: Tensor) -> Tensor:
            return out.sum() * self.scale

    with pytest.raises(CaptureError, match="register the tensor as a parameter of the model"):
        capture(nn.Linear(4, 4), (torch.randn(3, 4),), loss=Scaled())


def test_an_argument_that_a_closure_holds_too_is_refused() -> None:
    x = torch.randn(3, 4)
    text = "the step reads argument 'input' also from another place"
    with pytest.raises(CaptureError, match=re.escape(text)) as error:
        capture(nn.Linear(4, 4), (x,), loss=lambda out: F.mse_loss(out, x))
    assert "targets= to the loss" in error.value.fix


def test_random_choices_of_fixed_shape_and_copies_of_tensors_are_captured() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc(x)
            chosen = torch.multinomial(torch.softmax(h.detach(), 1), 2)
            return h.gather(1, chosen) * h.detach().sum().clone()

    program = capture(Choosing(), (torch.randn(3, 4),), loss=lambda out: out.sum())
    assert not program.covers.fixed and not constants(program)
    assert [op.seed for op in program.step.ops if op.type.startswith("aten.multinomial")] == [0]
