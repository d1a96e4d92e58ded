"""Modules that no capture covers run their own code inside of the plans, and the rest of the model is placed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_nets import tight
from runnable import short_searches
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir.errors import CaptureError, EagerWarning


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
MAP = {"0": 0, "1": 1, "2": 1, "3": 0}


class Tanh(torch.autograd.Function):
    """Another library's kernels, with a gradient of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.from_numpy(x.detach().numpy().copy()).tanh_()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class Outside(nn.Module):
    """A kernel of another library, between parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.randn(16)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return Tanh.apply(x * self.scale)  # type: ignore[no-any-return]


class Address(Outside):
    """What a kernel of Triton asks of its operands."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.data_ptr() and self.scale.data_ptr()
        return x.relu() * self.scale


class Branches(Outside):
    """Its code depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if x.sum() > 0 else x - self.scale


class Counts(Outside):
    """Another thing again: numbers that a tensor has, and random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(Tanh.apply(x), 0.5, self.training) * x.abs().max().item()


class Several(Outside):
    """Takes a dict, and returns a part of an argument, a number of a whole batch, and things that are no tensors."""

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        x = given["x"]
        mean = Tanh.apply(x).mean()
        return {"view": x[:, :8].clone(), "mean": mean, "none": None, "name": given["name"], "first": x.argmax(1)}


class Parts(nn.Module):
    """A net with :class:`Several` in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), Several(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner({"x": self.first(x), "name": "two"})
        assert found["none"] is None and found["name"] == "two"
        return self.last(found["view"]) * found["mean"] + found["first"][:, None]  # type: ignore[no-any-return]


def net(inner: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), inner(), nn.Linear(16, 16), nn.Linear(16, 4))


def trained(model: nn.Module, x: Tensor = X) -> list[Tensor | None]:
    """The output of a call, and the gradients of its input and of all parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("inner", [Outside, Address, Branches])
def test_bits_are_those_of_the_model(inner: type[nn.Module]) -> None:
    model = net(inner)
    expected = trained(model)
    with pytest.warns(EagerWarning, match=r"'1' of Sequential runs its own code inside of the plans"):
        graphir.place(model, (X,), device_map=MAP)
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(trained(model), expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert {str(device) for plan in model.placement.plans for device in plan.devices} == {"gpu:0", "gpu:1"}
    if inner is Branches:  # the other branch, by the same plans
        plain = net(inner)
        assert same(trained(model, -X), trained(plain, -X))
    with torch.no_grad():
        assert torch.equal(model(X), expected[0])


def test_several_outputs_and_other_sizes() -> None:
    torch.manual_seed(0)
    model = Parts()
    plain = copy.deepcopy(model)
    with pytest.warns(EagerWarning, match="'inner' of Parts"):
        graphir.place(model, (X,), device_map={"first": 0, "inner": 1, "last": 1})
    for size in (6, 3):
        x = torch.randn(size, 8)
        assert same(trained(model, x), trained(plain, x))


def test_a_call_is_sized_anew() -> None:
    model = net(Outside)
    plain = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(model, (X,), device_map=MAP, batch_dims=0)
    for size in (6, 3, 9):
        x = torch.randn(size, 8)
        assert same(trained(model, x), trained(plain, x))


def test_what_is_drawn_is_drawn_again() -> None:
    def run(device_map: dict[str, int]) -> list[Tensor | None]:
        model = net(Counts)
        with pytest.warns(EagerWarning):
            graphir.place(model, (X,), device_map=device_map)
        torch.manual_seed(1)
        found = trained(model)
        assert not torch.equal(found[0], trained(model)[0])
        return found

    one, two = run({"": 0}), run(MAP)
    assert same(one, two)


def test_the_backward_has_the_forward_s_mask() -> None:
    model = nn.Sequential(Counts(), nn.Linear(16, 16, bias=False))
    torch.nn.init.eye_(model[1].weight)
    with pytest.warns(EagerWarning):
        graphir.place(model, (torch.ones(4, 16),))
    x = torch.rand(4, 16, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert 0 < (y == 0).sum() < y.numel() and torch.equal(x.grad == 0, y == 0)


def test_modules_of_one_class_are_found_at_once() -> None:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), Outside())]
    model = nn.Sequential(nn.Linear(8, 16), *layers)
    plain = copy.deepcopy(model)
    limits = tight(copy.deepcopy(model), (X,), optimizer="AdamW")
    with pytest.warns(EagerWarning, match=r"'2' of Sequential and 3 modules like it") as told:
        graphir.place(model, (X,), limits=limits, optimizer="AdamW", topology="cpu")
    assert len([w for w in told if w.category is EagerWarning]) == 1
    assert same(trained(model), trained(plain))
    held = model.placement.memory()
    assert all(held.peak.get(device, 0) <= most for device, most in held.limits.items())
    assert "scratch of placed.Outside_" in str(held)


def test_autocast_is_that_of_the_call() -> None:
    model = net(Branches)
    plain = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(model, (X,), device_map=MAP)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        assert torch.equal(model(X), plain(X))


class Norm(nn.BatchNorm1d):
    """A norm whose code depends on data, too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() != 0 else x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long()) * x.sum().item()


class Shaped(nn.Module):
    """How many rows it returns depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return Tanh.apply(x[x[:, 0] >= 0])  # type: ignore[no-any-return]


class Most(nn.Module):
    """Its own code has most of the parameters around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Tanh.apply(self.inner(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (lambda: Norm(16), "cannot be an operator: it overwrites an argument, a parameter, a buffer"),
        (Sparse, "cannot be an operator: a gradient of it has no strides"),
        (Most, r"^.numpy\(\) reads numbers out of a tensor, so the step depends on data\n"),
    ],
)
def test_refused(inner: Callable[[], nn.Module], why: str) -> None:
    model = net(inner)
    before = dict(vars(model[1]))
    with pytest.raises(CaptureError, match=why):
        graphir.place(model, (X,))
    assert vars(model[1]) == before and not hasattr(model, "placement")


def test_other_shapes_than_those_of_zeros_run_the_model_s_own_code() -> None:
    model = net(Shaped)
    plain = copy.deepcopy(model)
    with pytest.warns(EagerWarning, match="'1' of Sequential"):
        graphir.place(model, (X,), device_map=MAP)
    with pytest.warns(EagerWarning, match="a plan has failed where this has not"):
        assert same(trained(model), trained(plain))
