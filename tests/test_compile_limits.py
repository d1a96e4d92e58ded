"""``graphir.compile(limits=)``: every plan keeps within the limits, and state stays where the first one has it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext as _nothing
from typing import Any

import pytest
import torch
from runnable import short_searches
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir import passes
from graphir.errors import PassError, RecaptureWarning, SessionError
from graphir.ir.blob import STATE_ROLES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 300)


class Layers(nn.Module):
    """Equal layers in a list, with a number that has to be captured anew."""

    def __init__(self, count: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x)) * scale
        return x


def rows(count: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count)
    return torch.randn(count, 64), torch.randn(count, 64)


def compiled(count: int = 256, **options: Any) -> graphir.Compiled:
    torch.manual_seed(0)
    model, (x, y) = Layers(), rows(count)
    return graphir.compile(
        model,
        (x,),
        **{
            "kwargs": {"scale": 1},
            "targets": (y,),
            "loss": F.mse_loss,
            "optimizer": torch.optim.AdamW(model.parameters()),
            "session": {"binding": "cpu", "threads": 1},
            **({"topology": "h200x8"} if "limits" in options else {}),
            **options,
        },
    )


def peaks(plan: graphir.Plan) -> Mapping[str, int]:
    return graphir.memory(plan, threads=1, profile=None).peak


def need(count: int = 256) -> int:
    """What one device holds of everything."""
    with compiled(count) as step:
        return peaks(step.plan)["gpu:0"]


def homes(plan: graphir.Plan) -> dict[str, str]:
    """Where the state is."""
    blobs = plan.step.blobs
    return {n: str(blobs[n].device) for n in plan.step.external_inputs if blobs[n].role in STATE_ROLES}


def assert_same(step: graphir.Compiled, plain: graphir.Compiled, x: Tensor, y: Tensor, scale: int) -> None:
    """Two compiled steps have equal losses; both are captured anew at the second number."""
    with pytest.warns(RecaptureWarning) if scale == 2 else _nothing():
        found = step.step(x, y, scale=scale)
    with pytest.warns(RecaptureWarning) if scale == 2 else _nothing():
        assert torch.equal(found, plain.step(x, y, scale=scale))


@pytest.mark.parametrize(("devices", "share"), [([0], 0.6), ([0, 1], 0.4)])
def test_later_captures_have_state_where_the_first_has_it(devices: list[int], share: float) -> None:
    limits = {f"gpu:{i}": int(share * need()) for i in range(2 * len(devices))}
    x, y = rows(256)
    with compiled(devices=devices, limits=limits) as step, compiled(devices=devices) as plain:
        assert step.balanced is not None and "shift_modules" in step.balanced.pipeline
        for scale in (1, 2, 1):
            assert_same(step, plain, x, y, scale)
        first, second = step.plans
        assert homes(first) == homes(second)
        for plan in step.plans:
            assert all(peaks(plan).get(device, 0) <= limit for device, limit in limits.items())
        again = passes.Pipeline(step.balanced.pipeline)(plain.plans[-1].program)
        assert homes(passes.emit(passes.inject_copies(again))) == homes(first)


def test_a_later_capture_that_would_fit_on_one_device_has_its_state_where_the_first_has_it() -> None:
    limits = {f"gpu:{i}": int(0.6 * need()) for i in range(2)}
    with compiled(limits=limits) as step, compiled() as plain:
        for count, scale in ((256, 1), (8, 2), (256, 1)):
            assert_same(step, plain, *rows(count), scale)
        first, second = step.plans
        assert homes(first) == homes(second) and len(set(homes(first).values())) > 1


def test_a_larger_batch_that_would_exceed_a_limit_is_captured_and_placed_anew() -> None:
    limits = {f"gpu:{i}": int(0.6 * need()) for i in range(2)}
    with compiled(limits=limits, kwargs={}) as step, compiled(kwargs={}) as plain:
        for count in (256, 100):
            assert torch.equal(step.step(*rows(count)), plain.step(*rows(count)))
        said = r"captured anew: at gpu_0/batch=320 the plan would hold .* on gpu:\d, whose limit is .* \(give smaller"
        with pytest.warns(RecaptureWarning, match=said):
            found = step.step(*rows(320))
        assert torch.equal(found, plain.step(*rows(320)))
        assert all(peaks(step.plan).get(device, 0) <= limit for device, limit in limits.items())
        for count in (320, 300, 256):
            assert torch.equal(step.step(*rows(count)), plain.step(*rows(count)))
        assert len(step.plans) == 2 and homes(step.plans[0]) == homes(step.plans[1])


def test_a_batch_for_which_no_placement_is_within_the_limits_leaves_all_as_it_was() -> None:
    limits = {f"gpu:{i}": int(0.8 * need()) for i in range(2)}
    with compiled(limits=limits, kwargs={}) as step, compiled(kwargs={}) as plain:
        before, balanced = step.plans, step.balanced
        with pytest.raises(PassError, match="no placement within the limits was found: gpu:0 lacks") as refusal:
            step.step(*rows(4096))
        assert refusal.value.where == "a later capture, whose modules stay where the first one has them"
        assert refusal.value.fix.startswith("limits={")
        assert refusal.value.fix.endswith("; or compile the model at its largest sizes first")
        assert step.plans == before and step.balanced is balanced and step.steps_done == 0
        assert torch.equal(step.step(*rows(256)), plain.step(*rows(256)))


def test_passes_behind_that_exceed_a_limit_are_refused() -> None:
    limits = {f"gpu:{i}": int(0.6 * need()) for i in range(2)}
    with pytest.raises(PassError, match=r"the plan holds .* on gpu:0, whose limit is ") as refusal:
        compiled(limits=limits, passes='shift_modules{modules={"layers": gpu:0}}')
    assert refusal.value.fix == "leave out passes that move things behind balance, or give more"
    with compiled(limits=limits, passes="share_storage") as step:
        assert all(peaks(step.plan).get(device, 0) <= limit for device, limit in limits.items())


def test_limits_are_given_to_compile_and_not_to_its_session() -> None:
    with pytest.raises(SessionError, match="a session has no option 'limits'"):
        compiled(session={"limits": {"gpu:0": 10**9}})


def test_later_plans_park_the_optimizer_state_that_the_first_one_parks() -> None:
    """The limit is one within which nothing is found without that. The second number is captured anew."""
    limits = {"gpu:0": int(0.72 * need(16))}
    x, y = rows(16)
    with compiled(16) as plain, compiled(16, limits=limits) as step:
        with pytest.raises(PassError, match="no placement within the limits"):
            passes.balance(
                plain.plan.program, limits, topology="h200x8", options=("park", "recompute", "share_storage")
            )
        for scale in (1, 2, 1):
            assert_same(step, plain, x, y, scale)
        first, second = step.plans
        parked = {name for name, home in homes(first).items() if home == "cpu:0" and "exp_avg" in name}
        assert parked and homes(first) == homes(second)
        assert all(peaks(plan)["gpu:0"] <= limits["gpu:0"] for plan in step.plans)


def test_a_later_capture_with_parked_state_that_exceeds_a_limit_is_refused() -> None:
    limits = {"gpu:0": int(0.72 * need(16))}
    with compiled(16, limits=limits, kwargs={}) as step:
        before = step.plans
        with pytest.raises(PassError, match="no placement within the limits was found: gpu:0 lacks") as refusal:
            step.step(*rows(512))
        assert refusal.value.fix.endswith("; or compile the model at its largest sizes first")
        assert step.plans == before and step.steps_done == 0
