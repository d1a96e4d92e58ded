"""DataParallel with unlike shares: rows, outputs and gradients, by plans and by eager replicas."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import parallel

ROWS: list[int] = []
"""The rows of each call of a forward, those that are captured included."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, by: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        ROWS.append(len(x))
        out: Tensor = self.fc(x).tanh() * scale
        return out if by is None else out * by


class Eager(graphir.DataParallel):
    """Eager replicas in every call."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    ROWS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphir.EagerWarning)
        yield


@pytest.mark.parametrize("wrap", [graphir.DataParallel, Eager])
def test_outputs_and_gradients_are_those_of_the_whole_batch(wrap: type[graphir.DataParallel]) -> None:
    module = Net().double()
    whole = copy.deepcopy(module)
    model = wrap(module, device_ids=[0, 1], shares=[6, 2], binding="cpu")
    assert model.shares == (3, 1)
    for rows in (8, 10, 5, 3, 1):
        x, by = (torch.randn(rows, n, dtype=torch.float64, requires_grad=n == 4) for n in (4, 1))
        for net in (model, whole):
            net(x, by=by, scale=0.5).square().mean().backward()
        assert torch.allclose(model(x, by=by), whole(x, by=by), rtol=1e-12)
        for ours, theirs in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12)  # type: ignore[arg-type]


def test_rows_are_those_of_replicas_in_a_program() -> None:
    model = Eager(Net(), device_ids=[0, 1, 2], shares=[3, 1, 4], binding="cpu")
    for rows, expected in ((16, [2, 6, 8]), (10, [2, 4, 4]), (2, [1, 1]), (1, [1])):
        ROWS.clear()
        model(torch.randn(rows, 4))
        assert sorted(ROWS) == expected


def test_plans_have_the_bits_of_eager_replicas() -> None:
    module = Net()
    planned = graphir.DataParallel(module, device_ids=[0, 1], shares=[1, 3], binding="cpu")
    eager = Eager(module, device_ids=[0, 1], shares=[1, 3], binding="cpu")
    planned(torch.randn(8, 4))
    for rows in (8, 9, 30):
        x = torch.randn(rows, 4)
        found = []
        for model in (planned, eager):
            output = model(x)
            found.append([output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    ROWS.clear()
    planned(torch.randn(30, 4))
    assert not ROWS  # the module's forward is not called: the plans ran


def test_other_shares_hold_from_the_next_call_on() -> None:
    model = Eager(Net(), device_ids=[0, 1], shares=[3, 1], binding="cpu")
    model = pickle.loads(pickle.dumps(model))
    model.shares = (1, 1)
    model(torch.randn(8, 4))
    assert ROWS == [4, 4]
    assert [len(args[0]) for args in model.scatter((torch.ones(8, 4),), None, [0, 1])[0]] == [4, 4]


def test_equal_shares_are_none() -> None:
    assert graphir.DataParallel(Net(), device_ids=[0, 1], shares=[2, 2], binding="cpu").shares == ()


def test_the_function_and_its_steps_take_shares() -> None:
    places = [torch.device("cpu")] * 2
    x = torch.arange(8)
    assert [len(share) for share in parallel.scatter(x, places, shares=[3, 1])] == [6, 2]
    args, _ = parallel.scatter_kwargs((x,), {}, places, shares=(1, 7))
    assert [len(share) for (share,) in args] == [1, 7]
    graphir.data_parallel(Net(), torch.ones(8, 4), [0, 1], binding="cpu", shares=[3, 1])
    assert sorted(ROWS) == [2, 6]


@pytest.mark.parametrize(
    ("devices", "shares", "message"),
    [
        ([0, 1], [3], r"shares: 1 share for 2 devices\n  in   DataParallel\(...\)\n  fix  give each device a positive"),
        (None, [3, 1], "shares: 2 shares for 0 devices"),
        ([0, 1], [3, 0], "shares: a share cannot be 0"),
        ([0, 1], [3, -1], "shares: a share cannot be -1"),
        ([0, 1], [0.75, 0.25], r"shares: a share cannot be 0\.75"),
        ([0, 1], [True, 1], "shares: a share cannot be True"),
        ([0, 1], 3, "shares: 3 is not a list of shares"),
    ],
)
def test_bad_shares_are_refused(devices: Any, shares: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graphir.DataParallel(Net(), device_ids=devices, shares=shares, binding="cpu")
    with pytest.raises(ValueError, match=r"shares: .*\n  in   DataParallel\.scatter\n  fix"):
        parallel.scatter(torch.ones(8), [torch.device("cpu")] * len(devices or []), shares=shares)


def test_shares_that_the_caller_makes_have_no_ratio() -> None:
    with pytest.raises(TypeError, match=r"UserScattered splits nothing, so that shares= says nothing\n.*\n  fix  give"):
        parallel.UserScattered(Net(), [0, 1], binding="cpu", shares=[3, 1])
