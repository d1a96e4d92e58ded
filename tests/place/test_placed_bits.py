"""Calls of a placed module have the bits of the module itself: outputs, gradients and buffers."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_nets import MAP, Net, deep, placed, same, trained
from runnable import short_searches
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def total(output: Any) -> Tensor:
    return output["out"].square().mean() + output["again"].sum()  # type: ignore[no-any-return]


def all_outputs(model: nn.Module) -> Any:
    output = model(X)
    (total(output) + output["mean"]).backward()
    return output


def some_outputs(model: nn.Module) -> Any:
    for _ in range(3):
        output = model(X)
        total(output).backward()
    return output


def two_forwards(model: nn.Module) -> Any:
    first, second = model(X), model(2 * X)
    total(second).backward()
    (total(first) + first["mean"]).backward()
    return first, second


def without_gradients(model: nn.Module) -> Any:
    with torch.no_grad():
        first = model(X)
    model.eval()
    with torch.inference_mode():
        second = model(X)
    model.train()
    return first, second


def graph_kept(model: nn.Module) -> Any:
    output = model(X)
    loss = total(output) + output["mean"]
    loss.backward(retain_graph=True)
    loss.backward()
    return output


def gradients_of_inputs(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    output = model(x)
    (total(output) + output["mean"]).backward()
    return x.grad


def by_name(model: nn.Module) -> Any:
    output = model(x=X, scale=torch.tensor(2.0))
    output.sum().backward()
    return output


def fewer_rows(model: nn.Module) -> Any:
    output = model(X[:5])
    (total(output) + output["mean"]).backward()
    return output


def output_overwritten(model: nn.Module) -> Any:
    output = model(X)
    output["again"].add_(1.0)
    (total(output) + output["mean"]).backward()
    return output


def autocast(model: nn.Module) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(X)
        loss = total(output)
    loss.backward()
    return output


def doubled(model: nn.Module) -> Any:
    model.double()
    output = model(X.double())
    (total(output) + output["mean"]).backward()
    return output


def frozen(model: nn.Module) -> Any:
    model.first.requires_grad_(False)
    return all_outputs(model)


def replaced(model: nn.Module) -> Any:
    torch.manual_seed(4)
    model.second = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    return all_outputs(model)


def accumulated(model: nn.Module) -> Any:
    all_outputs(model)
    return all_outputs(model)


def hooks_on_parameters(model: nn.Module) -> Any:
    model.last.weight.register_hook(lambda grad: 2 * grad)
    return all_outputs(model)


LOOPS: list[Callable[[nn.Module], Any]] = [
    all_outputs,
    some_outputs,
    two_forwards,
    without_gradients,
    graph_kept,
    gradients_of_inputs,
    by_name,
    fewer_rows,
    output_overwritten,
    autocast,
    accumulated,
    hooks_on_parameters,
]
FOLLOWED: list[Callable[[nn.Module], Any]] = [doubled, frozen, replaced]


def compared(loop: Callable[[nn.Module], Any]) -> list[warnings.WarningMessage]:
    """The warnings of a loop over a placed net, whose bits are those of the net itself."""
    torch.manual_seed(0)
    eager = Net()
    model = copy.deepcopy(eager)
    graphir.place(model, (X,), device_map=MAP)
    expected = loop(eager)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = loop(model)
    for ours, theirs in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, Tensor) else ours == theirs
    assert same(model, eager)
    return said


@pytest.mark.parametrize("loop", LOOPS)
def test_bits(loop: Callable[[nn.Module], Any]) -> None:
    assert not compared(loop)


@pytest.mark.parametrize("loop", FOLLOWED)
def test_a_model_that_has_changed_is_captured_anew(loop: Callable[[nn.Module], Any]) -> None:
    (said,) = compared(loop)
    assert issubclass(said.category, graphir.RecaptureWarning)


def test_a_second_backward_needs_the_graph_to_be_kept() -> None:
    model = graphir.place(deep(), (X,))
    loss = model(X).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    eager = Net(norm=False)
    model = copy.deepcopy(eager)
    graphir.place(model, (X,), device_map=MAP)

    def penalised(net: nn.Module) -> Tensor:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(total(net(x)), x, create_graph=True)
        gradient.square().sum().backward()
        return gradient

    assert torch.equal(penalised(model), penalised(eager))
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_draws_follow_torchs_generator_on_any_devices() -> None:
    torch.manual_seed(0)
    one = Net(dropout=0.5)
    two = copy.deepcopy(one)
    graphir.place(one, (X,))
    graphir.place(two, (X,), device_map=MAP)
    found = []
    for model in (one, two, two):
        torch.manual_seed(7)
        with torch.no_grad():
            found.append(model(X)["out"])
    with torch.no_grad():
        other = two(X)["out"]
    assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2]) and not torch.equal(found[2], other)


def test_an_input_that_was_overwritten_is_told_as_torch_does() -> None:
    model = graphir.place(deep(), (X,))
    x = X.clone()
    loss = model(x).sum()
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_that_was_overwritten_is_told_as_torch_does() -> None:
    model: Any = graphir.place(deep(), (X,))
    loss = model(X).sum()
    with torch.no_grad():
        model[2].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [("park",), ("recompute",)])
def test_what_is_parked_or_recomputed_has_the_same_bits(options: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    eager = deep(layers=8)
    model, alone = copy.deepcopy(eager), copy.deepcopy(eager)
    x = torch.randn(512, 8)
    graphir.place(alone, (x,))
    peak = alone.placement.memory().peak["gpu:0"]
    graphir.place(model, (x,), limits={0: int(0.8 * peak)}, options=options, topology="h200x8")
    assert model.placement.memory().peak["gpu:0"] <= 0.8 * peak
    assert trained(model, rows=512) == trained(eager, rows=512) and same(model, eager)


def test_two_devices_within_limits() -> None:
    torch.manual_seed(0)
    eager = deep(layers=8)
    model = placed(copy.deepcopy(eager), (X,), optimizer="AdamW")
    assert len(model.placement.plans[0].devices) == 2
    assert trained(model) == trained(eager) and same(model, eager)


class Compares(nn.Module):
    """Asks whether its arguments are one tensor, as nn.MultiheadAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        out = self.last(self.first(query).relu())
        return out * 3 + key if key is query else out * 2 + key  # type: ignore[no-any-return]


def test_one_tensor_as_two_arguments_stays_one() -> None:
    torch.manual_seed(0)
    model = Compares()
    plain = copy.deepcopy(model)
    graphir.place(model, (X, X), device_map={"first": 0, "last": 1}, binding="cpu")
    for alike in (True, False, True):
        found = []
        for net in (model, plain):
            x = X.clone().requires_grad_()
            net.zero_grad()
            out = net(x, x if alike else x * 1)
            out.square().sum().backward()
            found.append((out, x.grad, *(param.grad for param in net.parameters())))
        assert all(map(torch.equal, *found)), alike


def test_a_compiled_model_inside_is_placed_too() -> None:
    """graphir.compile has a hook on the model, which a copy keeps and a pickle does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
    plain = copy.deepcopy(model)
    with graphir.compile(model[0], (X,), session={"binding": "cpu"}), warnings.catch_warnings():
        warnings.simplefilter("error")
        placed_ones = (model, copy.deepcopy(model))
        for net in placed_ones:
            graphir.place(net, (X,), device_map={"0": 0, "1": 1}, binding="cpu")
            assert torch.equal(net(X), plain(X))
        assert b"graphir" not in pickle.dumps(copy.deepcopy(plain)) and b"behind" not in pickle.dumps(model[0])
