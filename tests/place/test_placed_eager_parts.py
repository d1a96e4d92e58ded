"""Modules that no capture covers run their own code inside of the plans, and the rest of the model is placed."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy
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
        (lambda: Norm(16), "cannot be an operator: it overwrites an argument or a buffer"),
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


class Within(nn.Module):
    """A module of a kind between two layers, and another one that has most of the parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(8, 64), nn.Linear(64, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.last(self.first(x))).square()  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer whose code reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.alpha, self.table, self.aux = nn.Linear(8, 8), 1.0, torch.ones(8), None
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scale = (2.0 if self.training else 5.0) * self.alpha * (x.sum().item() > -1e9)
        return self.layer(x) * scale * self.table  # type: ignore[no-any-return]


class Rebinds(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mean = self.mean * 0.9 + x.mean(0).detach()
        return out + self.mean


class Tallies(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.alpha += 1
        return super().forward(x)


class Leaves(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.abs().mean()
        return out


class Writes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.table.mul_(0.9)
        return super().forward(x)


class Same(Layer):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.view(-1).view(x.shape)


class SetsData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) + self.mean


class Local(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.layer(x.detach()).sum().backward()
        return super().forward(x)


class Restores(Layer):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(8)
        torch.set_rng_state(state)
        return super().forward(x) * drawn


class Draws(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.from_numpy(self.numbers.random(8).astype("float32"))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Rebinds, "puts another tensor in the place of a buffer"),
        (Tallies, "changes 'alpha' of the module"),
        (Leaves, "changes 'aux' of the module"),
        (Writes, "overwrites a tensor that is neither parameter nor buffer"),
        (Same, "returns an argument, a tensor of its own, or one tensor twice, or a view of these"),
        (SetsData, "overwrites an argument or a buffer"),
        (Local, "makes gradients of its own"),
        (Restores, "two calls with the same numbers return other things"),
        (Draws, "two calls with the same numbers return other things"),
    ],
)
def test_what_changes_more_than_its_outputs_is_refused(kind: type[Layer], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        graphir.place(Within(kind()), (X,))


def pair(inner: Callable[[], nn.Module], cls: type[Within] = Within) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = cls(inner())
    twin = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(twin, (X,), device_map={"first": 0, "last": 1, "inner": 1})
    return model, twin


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def test_the_backward_is_in_the_mode_of_its_forward() -> None:
    model, twin = pair(Layer)
    for net in (model, twin):
        out = net(X)
        net.eval()
        out.sum().backward()
        assert not net.inner.training  # type: ignore[union-attr]
    assert same(gradients(twin), gradients(model))


@pytest.mark.parametrize("change", [lambda m: setattr(m.inner, "alpha", 3.0), lambda m: m.inner.table.fill_(9.0)])
def test_a_change_before_the_backward_is_told(change: Callable[[Any], Any]) -> None:
    _, twin = pair(Layer)
    out = twin(X)
    change(twin)
    with pytest.raises(RuntimeError, match=r"other ones than in the forward|modified by an inplace operation"):
        out.sum().backward()


class Routes(nn.Module):
    """Which of its layers computes, and whether anything needs a gradient, depends on data."""

    def __init__(self, stops: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.stops = nn.Linear(8, 8), nn.Linear(8, 8), stops

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return self.a(x)  # type: ignore[no-any-return]
        return self.a(x).detach() if self.stops else self.b(x)


class Beside(Within):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.last(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("stops", [False, True])
def test_gradients_that_depend_on_data_are_those_of_the_model(stops: bool) -> None:
    model, twin = pair(lambda: Routes(stops), Beside)
    told = []
    for x in (X.abs(), -X.abs(), X.abs()):
        for net in (model, twin):
            net.zero_grad()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                net(x).sum().backward()
            told += [str(w.message) for w in found]
        assert same(gradients(twin), gradients(model))
    assert len([text for text in told if "gradients of it go to other operands" in text]) == 1


def test_arguments_that_are_alike_as_text_are_told_apart() -> None:
    class Table:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __repr__(self) -> str:
            return "a table"

    class Scales(nn.Module):
        def forward(self, x: Tensor, table: Table) -> Tensor:
            return x * table.factor * (x.sum().item() > -1e9)

    class Holds(Within):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.table = Table(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.last(self.first(x)), self.table)  # type: ignore[no-any-return]

    model, twin = pair(Scales, Holds)
    assert torch.equal(twin(X), model(X))
    model.table = twin.table = Table(5.0)
    with pytest.warns(graphir.RecaptureWarning):
        assert torch.equal(twin(X), model(X))


def test_a_model_with_such_modules_is_let_go() -> None:
    model = pair(Layer)[1]
    trained(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_forward_that_was_set_on_the_module_is_refused() -> None:
    model = Within(Layer())
    model.inner.forward = model.inner.forward  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="its forward was set on the module itself"):
        graphir.place(model, (X,))


def test_an_error_of_the_backward_is_the_module_s_own() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if grad.abs().max().item() > 100:
                raise ValueError("the gradient is too large")
            return grad * 2

    class Careful(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return Stops.apply(super().forward(x))  # type: ignore[no-any-return]

    twin = pair(Careful)[1]
    twin(X).sum().backward()
    with pytest.raises(ValueError, match="the gradient is too large"):
        (twin(X).sum() * 1e9).backward()


def test_an_output_that_nobody_uses_has_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            x.sum().item()
            return self.a(x), self.b(x)

    class First(Within):
        def forward(self, x: Tensor) -> Any:
            return self.inner(self.last(self.first(x)))[0]

    model, twin = pair(Two, First)
    for net in (model, twin):
        net(X).sum().backward()
    assert same(gradients(twin), gradients(model))
    assert [p.grad is None for p in twin.inner.parameters()] == [False, False, True, True]  # type: ignore[union-attr]


def test_a_gradient_of_another_module_is_refused() -> None:
    class Borrows(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.lender[0].weight[0, 0]  # type: ignore[no-any-return,operator,index]

    model = Within(Borrows())
    model.inner.lender = [model.first]  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="goes to a tensor that is neither an argument nor its own"):
        graphir.place(model, (X,))


def test_a_list_that_the_code_fills_is_refused() -> None:
    class Collects(Layer):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            out = super().forward(x)
            losses.append(out.mean())
            return out

    class Adds(Within):
        def forward(self, x: Tensor) -> Tensor:
            losses: list[Tensor] = []
            return self.inner(self.last(self.first(x)), losses) + sum(losses)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="changes a list or dict that it is given"):
        graphir.place(Adds(Collects()), (X,))
