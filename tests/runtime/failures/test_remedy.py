"""What is printed where memory runs out: a call that can be pasted, with limits that devices have."""

from __future__ import annotations

import re
from collections.abc import Mapping

import models
import pytest
import torch
from graphir.runtime.failures.faults import fault
from runnable import captured, sgd
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import passes
from graphir.ir.device import Device
from graphir.ir.plan import Plan
from graphir.ir.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model: nn.Module, batch: int = 64) -> Program:
    x = torch.randn(batch, 64)
    return captured(models.Example(model, (x,), (x,), F.mse_loss), sgd(model.parameters()))


def layers(batch: int = 64) -> Program:
    torch.manual_seed(0)
    return trained(nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())]), batch)


def said(plan: Plan, dims: Mapping[str, int] | None = None, shared: bool = False) -> str:
    """What to do where memory runs out at the predicted peak of ``gpu:0``."""
    sizes = {**plan.dims, **(dims or {})}
    at = graphir.memory(plan, sizes, profile=None, threads=1).peak_position("gpu:0")
    failing = next(i for i in plan.instructions[at:] if i.op >= 0 and i.lane == "gpu:0.compute")
    binding: dict[Device, torch.device] = {d: torch.device("cuda:0") for d in plan.devices} if shared else {}
    return fault(plan, failing, 0, MemoryError(), dims=sizes, binding=binding).fix


def call_of(text: str) -> str:
    found = re.search(r"balance\(program, \{.*?\}\)", text)
    assert found is not None, text
    return found[0]


def follow(text: str, program: Program) -> None:
    """Do what is printed, and see that each device keeps within the limits that are printed."""
    limits: dict[str, int] = {}

    def balance(program: Program, given: dict[str, int]) -> Program:
        limits.update(given)
        return passes.balance(program, given, topology="h200x8", evaluations=600).program

    placed = eval(call_of(text), {"balance": balance, "program": program})
    peak = graphir.memory(passes.emit(passes.inject_copies(placed)), profile=None, threads=1).peak
    assert len(limits) == 2 and all(peak.get(device, 0) <= most for device, most in limits.items())


def test_the_call_of_balance_gives_both_devices_the_room_that_the_full_one_had() -> None:
    program = layers()
    text = said(passes.emit(program))
    limits = re.search(r"\{'gpu:0': (\d+), 'gpu:1': (\d+)\}", call_of(text))
    assert limits is not None and limits[1] == limits[2]
    follow(text, program)


def test_one_more_device_takes_what_no_other_has_memory_for() -> None:
    assert re.fullmatch(
        r"give a smaller batch, or look for what to move, park and compute again: "
        r"balance\(program, \{'gpu:0': (\d+), 'gpu:1': \1\}\), with gpu:1 bound to memory of its own; .*",
        said(passes.emit(layers())),
    )
    alike = passes.emit(passes.replicate(layers(), devices=[0, 1]))
    assert ", 'gpu:2': " in call_of(said(alike))


def test_a_device_that_has_memory_to_spare_takes_part() -> None:
    program = passes.shift_modules(layers(), {"[14:16]": "gpu:1"})
    text = said(passes.emit(passes.inject_copies(program)))
    assert re.fullmatch(r"balance\(program, \{'gpu:0': (\d+), 'gpu:1': \1\}\)", call_of(text))
    assert "bound to memory" not in text


def test_the_sizes_at_which_memory_ran_out_are_those_to_capture() -> None:
    plan = passes.emit(layers())
    text = said(plan, {"batch": 1024})
    assert f"{call_of(text)}, of a program captured at batch=1024, with gpu:1 bound to memory of its own; " in text
    assert "captured at" not in said(plan)
    follow(text, layers(1024))


@pytest.mark.parametrize("shares", [None, [3, 1]])
def test_the_size_to_capture_is_the_mean_of_the_replicas_rows(shares: list[int] | None) -> None:
    plan = passes.emit(passes.replicate(layers(), devices=[0, 1], shares=shares))
    dims = passes.emit(plan.program, {"batch": 1024}).dims
    assert max(dims.values()) == (1536 if shares else 1024)
    assert ", of a program captured at batch=1024" in said(plan, dims)


def test_a_device_that_holds_more_already_keeps_it() -> None:
    program = passes.shift_modules(layers(), {"[0:14]": "gpu:1"})
    plan = passes.emit(passes.inject_copies(program))
    held = graphir.memory(plan).peak
    assert held["gpu:0"] < held["gpu:1"]
    assert f"'gpu:1': {held['gpu:1']}, 'gpu:2': " in call_of(said(plan))


def test_devices_that_share_a_memory_have_parts_of_its_room() -> None:
    plan = passes.emit(passes.replicate(layers(), devices=[0, 1, 2]))
    found = re.search(
        r"balance\(program, \{'gpu:0': (\d+), '(gpu:\d)': (\d+), '(gpu:\d)': (\d+)", said(plan, shared=True)
    )
    assert found is not None
    first, _, second, _, _ = found.groups()
    assert first == second
    assert int(first) < graphir.memory(plan, profile=None, threads=1).peak["gpu:0"] * 2


def test_without_modules_a_smaller_batch_is_all() -> None:
    class Alone(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.neg().exp()

    plan = passes.emit(graphir.capture(Alone(), (torch.randn(64, 64),)))
    assert said(plan).startswith("give a smaller batch; ")


def test_for_an_operator_that_makes_more_than_a_device_has_a_smaller_batch_is_all() -> None:
    plan = passes.emit(graphir.capture(nn.Linear(1, 4096), (torch.randn(64, 1),)))
    assert said(plan).startswith("give a smaller batch; ")
