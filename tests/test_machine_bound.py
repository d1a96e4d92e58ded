"""The machine at hand, where devices are bound to its cards or to its host one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from graphir.runtime.machine.here import here
from pretended import MACHINES, pretended
from runnable import short_searches
from torch import nn
from torch.nn import functional as F

import graphir
from graphir.errors import SessionError

pytestmark = pytest.mark.usefixtures("one_thread", "short")

HOST: Mapping[Any, str] = {"gpu:0": "cpu", 1: "cpu"}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 5)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two unlike cards without peers, as torch would count them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pretended(MACHINES["24 and 12 GB over PCIe"]):
        yield


def compiled(limits: Any, binding: Any) -> graphir.compile:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(4, 8)
    options: dict[str, Any] = {"loss": F.mse_loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    return graphir.compile(model, (x,), targets=(x,), limits=limits, session={"binding": binding}, **options)


@pytest.mark.parametrize("limits", ["auto", {0: "1 GiB", 1: "1 GiB"}])
def test_what_is_bound_and_not_needed_is_left_out(limits: Any) -> None:
    with compiled(limits, HOST) as step:
        assert step.balanced is not None and {"gpu:0", "gpu:1"} <= set(step.balanced.limits)
        assert step.plan.devices == ("gpu:0", "cpu:0")
        x = torch.ones(4, 8)
        assert torch.isfinite(step.step(x, x))
    with pytest.raises(SessionError, match="the plan has no device 7"):
        compiled({0: "1 GiB"}, {0: "cpu", 7: "cpu"})


def test_a_host_beside_cards_is_the_host(cards: None) -> None:
    with compiled("auto", HOST) as step:
        assert step.balanced is not None and step.balanced.machine.startswith("this host (")


def test_all_cards_are_there_by_any_name(cards: None) -> None:
    assert here(["gpu:0"], binding="cuda") == here(["gpu:0"])


def test_the_memory_of_the_host_is_there_once(cards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphir.runtime.machine.here.free_memory", lambda: 100 << 30)
    found = here(["gpu:0", "gpu:1", "gpu:2"], binding={0: "cuda:0", 1: "cpu", 2: "cpu"})
    free = {device: speed.free for device, speed in found.devices.items()}
    assert free["gpu:1"] == free["gpu:2"] == 50 << 30
    assert free["cpu:0"] == (100 << 30) // 20
