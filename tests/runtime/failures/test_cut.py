"""Where memory runs out, contiguous modules are to be moved: the cut that helps most for what it copies."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import models
import pytest
import torch
from graphir.runtime.failures.cut import Cut, cheapest_cut
from graphir.runtime.failures.faults import fault
from runnable import forward_plan, step_of, trained
from torch import nn

import graphir
from graphir import passes
from graphir.ir.device import gpu
from graphir.ir.plan import Plan


def layers(count: int = 8, width: int = 128, batch: int = 64) -> models.Example:
    """Equal linear layers, an activation after each."""
    torch.manual_seed(0)
    made = [layer for _ in range(count) for layer in (nn.Linear(width, width), nn.ReLU())]
    x = torch.randn(batch, width)
    return models.Example(nn.Sequential(*made), (x,), (torch.zeros(batch, width),), nn.functional.mse_loss)


def at_the_peak(plan: Plan, device: str = "gpu:0") -> str:
    """The remedy where memory runs out at the device's predicted peak."""
    at = graphir.memory(plan).peak_position(device)
    failing = next(i for i in plan.instructions[at:] if i.op >= 0 and i.lane == f"{device}.compute")
    return fault(plan, failing, 0, MemoryError(), dims=plan.dims).fix


def cut_of(plan: Plan, room: int | None = None) -> Cut | None:
    predicted = graphir.memory(plan)
    room = predicted.peak["gpu:0"] if room is None else room
    return cheapest_cut(plan, gpu(0), [], predicted, room)


def cut(plan: Plan, room: int | None = None) -> Cut:
    found = cut_of(plan, room)
    assert found is not None
    return found


def test_equal_layers_are_cut_in_the_middle() -> None:
    found = cut(passes.emit(trained(layers)))
    assert found.modules == ("[8:16]",)
    assert found.copied == 2 * 64 * 128 * 4  # an activation there, its gradient back
    assert found.after < 0.6 * found.before


def test_containers_that_move_as_a_whole_are_named_once() -> None:
    modules = cut(passes.emit(trained(models.gpt, layers=6))).modules
    assert modules[-2:] == ("norm", "head")
    assert re.fullmatch(r"layers\[\d:6\]", modules[-3])


def test_a_cut_is_where_little_crosses() -> None:
    """Between the wide stem and the narrow rest, though the halves are not equal."""
    torch.manual_seed(0)
    widths = [64, 64, 64, 64, 64, 2, 64, 64, 64]
    made = [nn.Linear(a, b) for a, b in pairwise(widths)]
    x = torch.randn(8, 64)
    example = models.Example(nn.Sequential(*made), (x,), (torch.zeros(8, 64),), nn.functional.mse_loss)
    found = cut(passes.emit(step_of(example)))
    assert found.modules == ("[5:8]",) and found.copied == 2 * 8 * 2 * 4


def test_a_shared_weight_crosses_and_is_counted() -> None:
    """The head of this model shares the weight of its embedding."""
    example = models.gpt(layers=2)
    found = cut(passes.emit(step_of(example)))
    weight = example.model.get_parameter("token.weight")
    assert found.copied >= 2 * weight.numel() * 4


def test_cuts_that_leave_too_much_are_taken_only_where_there_are_no_others() -> None:
    plan = passes.emit(trained(models.resnet, blocks=6, channels=8))
    free, tight = cut(plan), cut(plan, room=graphir.memory(plan).peak["gpu:0"] * 2 // 3)
    assert tight.after <= graphir.memory(plan).peak["gpu:0"] * 2 // 3
    assert tight.after <= free.after
    assert cut(plan, room=0).after > 0


def test_where_nothing_helps_nothing_is_named() -> None:
    plan = forward_plan("input x : f32[64] @gpu:0\n y : f32[64] @gpu:0 = aten.neg(x)", "x", output="y")
    assert cut_of(plan) is None
    assert "shift_modules" not in at_the_peak(plan)


def test_a_model_whose_parameters_are_all_its_own_has_no_cut() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.w + x @ self.v).tanh()

    x = torch.randn(64, 8)
    plan = passes.emit(step_of(models.Example(Alone(), (x,), (x,), nn.functional.mse_loss)))
    assert cut_of(plan) is None
    assert "give a smaller batch" in at_the_peak(plan)


def test_one_more_device_takes_what_no_other_has_room_for() -> None:
    plan = passes.emit(passes.replicate(trained(layers), devices=[0, 1]))
    call = r"shift_modules\(program, \{'\[\d+:16\]': \{0: 2\}\}\)"
    assert re.search(f"{call}, with gpu:2 bound to memory of its own", at_the_peak(plan))
    spread = passes.shift_modules(passes.replicate(trained(layers), devices=[0, 1]), {"[14:16]": {0: 2}})
    relieved = at_the_peak(passes.emit(passes.inject_copies(spread)))
    assert re.search(call.replace("16", "14") + r" \(predicted", relieved)


@pytest.mark.parametrize(
    "make",
    [
        layers,
        lambda: models.gpt(layers=4, width=32, length=16, batch=4),
        lambda: models.resnet(blocks=6, channels=16, image=16),
    ],
    ids=["mlp", "gpt", "resnet"],
)
def test_the_call_that_is_named_does_what_is_predicted(make: Callable[[], models.Example]) -> None:
    program = trained(make)
    plan = passes.emit(program)
    said = at_the_peak(plan)
    call = re.search(r"shift_modules\(program, \{.*?\}\)", said)
    assert call is not None and "gpu:1 bound to memory of its own" in said
    moved = eval(call[0], {"shift_modules": passes.shift_modules, "program": program})
    placed = passes.emit(passes.inject_copies(moved))
    predicted, found = cut(plan), graphir.memory(placed)
    assert found.peak["gpu:0"] == pytest.approx(predicted.after, rel=0.15)
    assert max(found.peak["gpu:0"], found.peak["gpu:1"]) < predicted.before
    assert graphir.traffic(placed).nbytes == pytest.approx(predicted.copied, rel=0.25)
