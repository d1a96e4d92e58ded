"""Shares that the caller has made: outputs and gradients of the module on each, by eager replicas and by plans."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir.parallel import UserScattered

CALLS: list[int] = []
"""The rows of each call of a forward, those that are captured included."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        CALLS.append(len(given["x"]))
        return {"y": self.fc(given["x"]).tanh() * given["by"], "name": given["name"], "none": None}


class Overridden(UserScattered):
    """Eager replicas in every call."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


def share(rows: int) -> dict[str, Any]:
    return {"x": torch.randn(rows, 4, requires_grad=True), "by": torch.rand(rows, 1), "name": "train"}


@pytest.mark.parametrize("wrap", [UserScattered, Overridden])
@pytest.mark.parametrize("rows", [(5, 2, 3), (1, 6, 1), (4, 2), (3,)])
def test_each_replica_has_its_share(wrap: Callable[..., UserScattered], rows: tuple[int, ...]) -> None:
    module = Net()
    model = wrap(module, [0, 1, 2], binding="cpu")
    for _ in range(2):
        shares = [share(n) for n in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphir.EagerWarning)
            output = model(shares)
        expected = torch.cat([module(given)["y"] for given in shares])
        assert torch.equal(output["y"], expected) and output["name"] == ["train"] * len(rows) and output["none"] is None
        wanted = [module.fc.weight, *(given["x"] for given in shares)]
        theirs = torch.autograd.grad(expected.square().sum(), wanted)
        ours = torch.autograd.grad(output["y"].square().sum(), wanted)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_plans_of_one_capture_run_shares_of_any_size() -> None:
    module = Net()
    model = UserScattered(module, [0, 1], binding="cpu")
    model([share(3), share(4)])
    for rows in ((3, 4), (4, 3), (2, 7)):
        shares = [share(n) for n in rows]
        model(shares)  # records the step once at sizes that no call had before
        CALLS.clear()
        output = model(shares)["y"]
        assert not CALLS and torch.equal(output, torch.cat([module(given)["y"] for given in shares]))


def test_shares_that_are_no_parts_of_one_batch_run_eagerly() -> None:
    module = Net()
    model = UserScattered(module, [0, 1], binding="cpu")
    shares = [share(3), {**share(2), "name": "other"}]
    output = model(shares)
    assert torch.equal(output["y"], torch.cat([module(given)["y"] for given in shares]))
    assert output["name"] == ["train", "other"]


def test_shares_without_rows_may_be_skipped() -> None:
    shares = [share(0), share(3), share(0)]
    for idle, called in (("call", [0, 0, 3]), ("skip", [3])):
        CALLS.clear()
        assert len(Overridden(Net(), [0, 1, 2], binding="cpu", idle=idle)(shares)["y"]) == 3
        assert sorted(CALLS) == called


@pytest.mark.parametrize("given", [(torch.ones(2, 4),), ([torch.ones(2, 4)], 1), ()])
def test_it_takes_a_list_of_shares(given: tuple[Any, ...]) -> None:
    with pytest.raises(graphir.ReplicationError, match=r"not a list of shares(.|\n)*fix  call it with a list"):
        UserScattered(nn.Linear(4, 4), [0, 1], binding="cpu")(*given)


@pytest.mark.parametrize(
    ("shares", "complaint"), [([], "0 shares for 2 devices"), ([torch.ones(1, 4)] * 3, "3 shares for 2 dev")]
)
def test_there_are_shares_for_devices(shares: list[Tensor], complaint: str) -> None:
    with pytest.raises(graphir.ReplicationError, match=complaint):
        UserScattered(nn.Linear(4, 4), [0, 1], binding="cpu")(shares)


def test_one_device_and_none() -> None:
    module = nn.Linear(4, 3)
    x = torch.randn(5, 4)
    for ids in ([0], None):
        model = pickle.loads(pickle.dumps(UserScattered(module, ids, binding="cpu")))
        assert torch.equal(model([x]), module(x))
    with pytest.raises(graphir.ReplicationError, match="2 shares for 1 device"):
        model([x, x])


def test_gradients_of_gradients_are_those_of_the_shares() -> None:
    def penalty(output: Tensor, x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return grad.square().sum()

    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model = UserScattered(module, [0, 1], binding="cpu")
    first, second = torch.randn(5, 4, requires_grad=True), torch.randn(1, 4, requires_grad=True)
    for x in (first, second):
        ours = torch.autograd.grad(penalty(model([first, second]), x), module.parameters(), allow_unused=True)
        theirs = torch.autograd.grad(penalty(module(x), x), module.parameters())
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(ours, theirs, strict=True))
