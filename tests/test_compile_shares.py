"""``graphir.compile(shares=)``: batches that are divided unequally, as somebody says or as balance chooses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from eager import ShareByShare, assert_same_bits, rows_by
from runnable import short_searches
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir import Topology
from graphir.errors import PassError, RecaptureWarning

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 40)


class Scaled(nn.Module):
    """Layers, with an attribute for which a step is captured anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x) * self.scale
        return found


def model_of() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(count))


def compiled(count: int = 16, model: nn.Module | None = None, **options: Any) -> graphir.Compiled:
    model, x = model or model_of(), rows(count)
    session = {"binding": "cpu", "threads": 1}
    return graphir.compile(
        model, (x,), targets=(x,), **{"loss": F.mse_loss, "optimizer": sgd(model), "session": session, **options}
    )


def slower_second() -> Topology:
    """The machine of all figures, its cards so slow that launches take no time, the second one four times as slow."""
    named = Topology.named("h200x8")
    devices = {}
    for device, speed in named.devices.items():
        slower = 1e-6 * (0.25 if device == "gpu:1" else 1)
        rates = {dtype: slower * rate for dtype, rate in speed.flops_per_second.items()}
        update = {"flops_per_second": rates, "bytes_per_second": slower * speed.bytes_per_second}
        devices[device] = speed if device == "cpu:0" else speed.model_copy(update=update)
    return named.model_copy(update={"name": "unlike", "devices": devices})


PLACED: dict[str, Any] = {"limits": {"gpu:0": "1 GiB", "gpu:1": "1 GiB"}, "topology": slower_second()}


@pytest.mark.parametrize("options", [{}, {**PLACED, "passes": "share_storage"}], ids=["plain", "placed"])
def test_steps_have_the_bits_of_eager_share_by_share(options: dict[str, Any]) -> None:
    eager = ShareByShare(model_of(), F.mse_loss, sgd, 2)
    with compiled(devices=[0, 1], shares=[6, 2], **options) as step:
        assert step.plan.program.shares == (3, 1)
        for count in (16, 10, 7, 1):
            x = rows(count)
            parts = x.split(rows_by((3, 1), count))
            expected = eager.step_on([((part,), (part,), {}) for part in parts])
            assert_same_bits({"loss": step.step(x, x)}, {"loss": expected}, f"{count} rows")
        assert_same_bits(step.state_dict(), eager.models[0].state_dict(), "state")
        assert len(step.plans) == 1


def test_chosen_shares_stay_for_later_captures() -> None:
    """A later capture with fewer rows than shares is taken by the first replica alone."""
    model = model_of()
    with compiled(32, model, devices=[0, 1], shares="auto", **PLACED) as step:
        assert step.balanced is not None
        shares = step.balanced.shares
        assert shares == step.plan.program.shares and 3 <= shares[0] / shares[1] <= 5
        eager = ShareByShare(model_of(), F.mse_loss, sgd, 2)
        for count, scale, sizes in ((32, 1.0, rows_by(shares, 32)), (20, 2.0, rows_by(shares, 20)), (2, 3.0, [2])):
            for each in (model, *eager.models):
                each.scale = scale
            x = rows(count)
            with pytest.warns(RecaptureWarning) if scale > 1 else nullcontext():
                found = step.step(x, x)
            expected = eager.step_on([((part,), (part,), {}) for part in x.split(sizes)])
            assert_same_bits({"loss": found}, {"loss": expected}, f"{count} rows")


class Fixed(nn.Module):
    """A step of fixed sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.view(8, 8))
        return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": [3, 1, 1]}, "replicate: shares: 3 shares for 2 devices"),
        ({"shares": [3, 0]}, "replicate: shares: a share cannot be 0"),
        ({"shares": [-3, 1]}, "replicate: shares: a share cannot be -3"),
        ({"shares": [0.75, 0.25]}, r"replicate: shares: a share cannot be 0\.75"),
        ({"shares": "even"}, "replicate: shares: 'even' is not a list of shares"),
        ({"shares": [100, 1]}, r"divides the 16 rows of 2 replicas as \[16, 0\], and the last gets none"),
        (
            {"shares": "auto"},
            "shares='auto' is of a placement, and nothing is placed without limits\n  fix  give limits",
        ),
        (
            {"shares": "auto", "devices": [0], **PLACED},
            "has one replica, which takes all of the batch\n  fix  replicate",
        ),
        ({"shares": [3, 1], "model": Fixed()}, "every replica .* takes the same sizes, so that shares cannot differ: "),
        ({"shares": "auto", "model": Fixed(), **PLACED}, "takes the same sizes, so that shares cannot differ: "),
    ],
)
def test_shares_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=message):
        compiled(**{"devices": [0, 1], **options})
