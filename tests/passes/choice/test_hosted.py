"""Pins to the host, as Accelerate's maps have them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError

balance = partial(passes.balance, topology="h200x8")
LIMITS = {"gpu:0": "100 MiB", "gpu:1": "100 MiB"}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(4000, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
        self.head = nn.Linear(16, 4)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(self.token(i)))
        return result


BATCH = torch.arange(8), torch.arange(8) % 4


def captured(**options: Any) -> Program:
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = nn.functional.cross_entropy
    return graphir.capture(model, BATCH[:1], targets=BATCH[1:], loss=loss, optimizer=optimizer, **options)


def on_the_host(program: Program) -> set[str]:
    """The parameters there."""
    blobs = [program.step.blobs[name] for name in program.step.external_inputs]
    return {blob.name for blob in blobs if blob.role == "param" and blob.device == "cpu:0"}


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "in micro-batches"])
def test_a_map_with_modules_on_the_host_goes_in_and_out(options: dict[str, Any]) -> None:
    program = captured(**options)
    found = balance(program, LIMITS, pin={"token": "cpu", "body": 0, "head": 1}, evaluations=20)
    assert on_the_host(found.program) == {"token.weight"}
    assert found.device_map == {"token": "cpu", "body.0": 0, "body.1.0": 0, "head": 1}
    assert found.pipeline.startswith("shift_modules{modules={token: cpu:0}} | shift_modules{")
    assert passes.Pipeline(found.pipeline)(program) == found.program
    again = balance(program, LIMITS, pin=dict(found.device_map), evaluations=20)
    assert again.device_map == found.device_map
    made = passes.inject_copies(found.program)
    assert graphir.certify(program, made).holds
    with (
        runtime.Session(passes.emit(program), program.state, binding="cpu") as before,
        runtime.Session(passes.emit(made), program.state, binding="cpu") as after,
    ):
        for _ in range(2):
            assert torch.equal(before.step(*BATCH), after.step(*BATCH))


def test_what_is_pinned_to_the_host_takes_no_room_of_a_gpu() -> None:
    limits = {"gpu:0": "100 KiB", "cpu": "1 GiB"}
    with pytest.raises(PassError, match="no placement within the limits was found: gpu:0 lacks"):
        balance(captured(), {"gpu:0": "100 KiB"}, evaluations=5)
    assert on_the_host(balance(captured(), limits, pin={"token": "cpu"}, evaluations=5).program)
    with pytest.raises(PassError, match="cpu:0 lacks"):
        balance(captured(), {**limits, "cpu": "100 KiB"}, pin={"token": "cpu"}, evaluations=5)


@pytest.mark.parametrize(
    ("pin", "hosted"),
    [
        ({"": 0, "token": "cpu"}, {"token"}),
        ({"body": "cpu", "body.1": 0}, {"body.0"}),
        ({"": "cpu", "!body.1": None, "head": 1}, {"token", "body.0"}),
    ],
)
def test_closer_pins_hold(pin: dict[str, Any], hosted: set[str]) -> None:
    found = balance(captured(), LIMITS, pin=pin, evaluations=5).program
    assert {name.rpartition(".")[0] for name in on_the_host(found)} == hosted


def test_what_is_left_out_of_other_pins_stays_left_out() -> None:
    limits = {"gpu:0": "100 MiB", "gpu:1": "8 KiB"}  # one layer
    found = balance(captured(), limits, pin={"token": "cpu", "body": 1, "!body.1": None}, evaluations=20)
    assert found.device_map == {"token": "cpu", "body.0": 1, "body.1.0": 0, "head": 0}


def test_pins_to_the_host_that_cannot_hold_are_refused() -> None:
    program = captured()
    with pytest.raises(PassError) as refused:
        balance(program, LIMITS, pin={"": "cpu", "body": 0, "body.1": "cpu"}, evaluations=5)
    assert str(refused.value) == (
        "balance: 'body.1' is pinned to cpu:0, and 'body', which it is in, is not\n"
        "  fix  move it before: shift_modules(program, {'body.1': 'cpu'})"
    )
    with pytest.raises(PassError, match="'token' is pinned to cpu:0, and options do not allow to shift it from gpu:0"):
        balance(program, LIMITS, pin={"token": "cpu"}, options=["park"], evaluations=5)
    moved = passes.shift_modules(program, {"token": "cpu"})
    assert not balance(moved, LIMITS, pin={"token": "cpu"}, options=["park"], evaluations=5).pipeline


def test_a_table_goes_to_the_host_by_itself_where_limits_name_it() -> None:
    program, limits = captured(), {"gpu:0": "100 KiB", "cpu": "1 GiB"}
    found = balance(program, limits, evaluations=5)
    assert on_the_host(found.program) == {"token.weight"}
    assert found.device_map == {"token": "cpu", "body.0": 0, "body.1.0": 0, "head": 0}
    assert all(use.after <= (use.limit or use.after) for use in found.devices)
    assert str(passes.Pipeline(found.pipeline)(program).step) == str(found.program.step)
    assert "by hand: token on cpu:0" in str(found)
    with pytest.raises(PassError, match="no placement within the limits was found"):
        balance(program, limits, pin={"token": 0}, evaluations=5)
    ample = balance(program, LIMITS | {"cpu": "1 GiB"}, evaluations=5)
    assert not on_the_host(ample.program)


def mlps(width: int) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    )


def normed(width: int) -> nn.Sequential:
    layers = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*[module for layer in layers for module in layer])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("made", [mlps, normed])
def test_no_limit_of_a_gpu_is_too_small_for_what_fits_on_the_host(
    made: Callable[[int], nn.Module], devices: int
) -> None:
    model, x = made(32), torch.randn(512, 32)
    adam = torch.optim.AdamW(model.parameters())
    program = graphir.capture(model, (x,), targets=(x,), loss=nn.functional.mse_loss, optimizer=adam)
    limits = {f"gpu:{device}": "96 KiB" for device in range(devices)} | {"cpu": "1 GiB"}
    found = balance(program, limits, evaluations=20)
    assert on_the_host(found.program)
    assert all(use.after <= use.limit for use in found.devices if use.limit)
