"""passes.balance where much of a model has no parameters: layers and calls of functions are placed by themselves."""

from __future__ import annotations

from typing import Any

import models
import parking
import pytest
import torch
import torch.nn.functional as F
from graphir.passes.choice.step import Step
from graphir.passes.choice.tails import with_tails
from graphir.passes.choice.units import Units
from runnable import batch_of, captured, sgd
from torch import nn

import graphir
from graphir import Program, passes
from graphir.errors import PassError

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = graphir.Topology.named("cpu")
DEPTH = 10


class Functional(nn.Module):
    """A convolution, and behind it functions alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        for _ in range(DEPTH):
            x = torch.tanh(x)
        return x.mean((2, 3))


class Tail(nn.Module):
    """Functions in a module of their own, which has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = F.silu(x)
        return x.mean((2, 3))


class Head(nn.Module):
    """Functions, one or two of which read a parameter of the model's own, and behind them a layer."""

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, :1].expand(-1, 8, -1, -1) * self.scale
        for i in range(DEPTH):
            x = torch.tanh(x) * self.scale if self.twice and i == DEPTH // 2 else torch.tanh(x)
        return self.linear(x.mean((2, 3)))


def pools() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *[nn.MaxPool2d(3, 1, 1) for _ in range(DEPTH)])


def tail() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Tail())


def dropouts() -> nn.Module:
    layers = [layer for _ in range(DEPTH // 2) for layer in (nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


def once() -> nn.Module:
    return Head(twice=False)


def inside() -> nn.Module:
    return nn.Sequential(Head(twice=False))


NETS = {
    "pools": pools,
    "functional": Functional,
    "tail": tail,
    "dropouts": dropouts,
    "head": Head,
    "once": once,
    "inside": inside,
}


def example(name: str, size: int = 32) -> models.Example:
    torch.manual_seed(0)
    model = NETS[name]()
    x = torch.randn(4, 3, size, size)
    with torch.no_grad():
        y = torch.randn_like(model(x))
    return models.Example(model, (x,), (y,), F.mse_loss)


def trained(name: str, size: int = 32, **options: object) -> Program:
    one = example(name, size)
    return captured(one, sgd(one.model.parameters()), **options)


def need(program: Program) -> int:
    return max(graphir.memory(passes.emit(program), threads=1, profile=None).peak.values())


def balanced_of(program: Program, share: float = 0.75, **options: Any) -> passes.Balanced:
    limits = dict.fromkeys(["gpu:0", "gpu:1"], int(share * need(program)))
    return passes.balance(program, limits, topology=CPU, **{"options": ["shift"], "evaluations": 400, **options})


@pytest.mark.parametrize("name", NETS)
def test_what_has_no_parameters_moves_and_bits_are_equal(name: str) -> None:
    one = example(name)
    program = captured(one, sgd(one.model.parameters()))
    limits = dict.fromkeys(["gpu:0", "gpu:1"], int(0.75 * need(program)))
    balanced = balanced_of(program)
    assert balanced.pipeline
    placed = parking.placed(program, balanced.program, share=False)
    found = graphir.memory(passes.emit(placed), threads=1, profile=None).peak
    assert all(found[device] <= limits[device] for device in limits)
    again = passes.Pipeline(balanced.pipeline)(program)
    assert str(again.step) == str(balanced.program.step)
    parking.assert_runs_the_same(program, placed, [(batch_of(one), {})] * 2, ("serial", "threads"))


def test_moves_name_layers_and_results_of_functions() -> None:
    assert balanced_of(trained("pools")).pipeline == 'shift_modules{modules={"[8:11]": gpu:1, loss: gpu:1}}'
    text = balanced_of(trained("functional")).pipeline
    assert "shift_activations{activations=[" in text and "tanh_" in text


def crossing(program: Program) -> int:
    return sum(count.nbytes for count in graphir.traffic(program).copies)


@pytest.mark.parametrize("share", [0.7, 0.8])
def test_the_small_end_of_a_tail_goes_with_what_it_reads(share: float) -> None:
    program = trained("functional", size=64)
    balanced = balanced_of(program, share)
    placed = passes.inject_copies(balanced.program)
    by_hand = passes.shift_activations(program, passes.find_activations(program)[:4], shifts={0: 1})
    once = crossing(passes.inject_copies(by_hand))
    assert crossing(placed) <= 1.01 * once  # there and back, not twice
    assert sum(link.after for link in balanced.links) == pytest.approx(crossing(placed), rel=0.01)


def test_a_pin_holds_for_a_layer_without_parameters() -> None:
    program = trained("pools")
    pinned = balanced_of(program, 0.8, pin={"3": "gpu:1"})
    assert pinned.device_map["3"] == 1 and set(pinned.device_map.values()) == {0, 1}
    again = balanced_of(program, 0.8, pin=dict(pinned.device_map))
    assert again.device_map == pinned.device_map


def test_what_is_wanted_as_a_whole_stays_one() -> None:
    assert balanced_of(trained("tail")).pipeline
    with pytest.raises(PassError, match="no placement within the limits was found"):
        balanced_of(trained("tail"), whole=["1"])


@pytest.mark.parametrize("name", ["pools", "functional", "head"])
def test_replicas_and_micro_batches_have_them_too(name: str) -> None:
    one = example(name)
    whole = captured(one, sgd(one.model.parameters()))
    replicated = passes.replicate(whole, [0, 1])
    share = need(passes.inject_copies(replicated))
    limits = dict.fromkeys([f"gpu:{i}" for i in range(4)], int(0.8 * share))
    balanced = passes.balance(replicated, limits, topology="h200x8", options=["shift"], evaluations=600)
    placed = passes.inject_copies(balanced.program)
    found = graphir.memory(passes.emit(placed), threads=1, profile=None).peak
    assert all(found.get(device, 0) <= limits[device] for device in limits)
    assert graphir.certify(replicated, placed).holds
    program = captured(one, sgd(one.model.parameters()), accumulate=2)
    parts = balanced_of(program, 0.8)
    assert parts.pipeline and graphir.certify(program, passes.inject_copies(parts.program)).holds


def read(program: Program) -> Units:
    return Units(Step(program, None, 1))


@pytest.mark.parametrize("name", NETS)
def test_tails_that_save_much_are_cut_off_in_order(name: str) -> None:
    program = trained(name)
    units = read(program)
    tailed = with_tails(units)
    assert tailed is not None and tailed.cut_off
    order = dict.fromkeys([unit for op, unit in zip(program.step.ops, tailed.of_op, strict=True) if unit])
    assert [unit for unit in order if unit in tailed.at] == sorted(order, key=tailed.at.__getitem__)
    owners = [(u, t) for u, t in zip(units.of_op, tailed.of_op, strict=True) if t not in tailed.cut_off]
    assert all(u == t for u, t in owners)  # nothing else has changed
    assert all(t.piece or not t.call for t in tailed.cut_off)


def test_what_reads_a_parameter_of_the_model_itself_stays() -> None:
    program = trained("head")
    tailed = with_tails(read(program))
    assert tailed is not None
    fixed = {unit for op, unit in zip(program.step.ops, tailed.of_op, strict=True) if "scale" in op.inputs}
    assert len(fixed) == 2 and all(unit is not None and unit.stays for unit in fixed)
    assert tailed.of_state[tailed.step.number["scale"]] in fixed
    names = [unit.piece for unit in tailed.at if unit in tailed.cut_off and not unit.stays]
    assert "tanh" in names and "tanh_9" in names


def test_a_container_whose_own_parameter_stays_is_not_moved_as_a_whole() -> None:
    balanced = balanced_of(trained("inside"))
    blobs = balanced.program.step.blobs
    assert '"0.linear": gpu:1' in balanced.pipeline
    assert str(blobs["0.linear.weight"].device) == "gpu:1" and str(blobs["0.scale"].device) == "gpu:0"


def test_a_head_is_placed_as_tightly_as_one_move_by_hand_does() -> None:
    program = trained("once", size=64)
    names = passes.find_activations(program)
    by_hand = passes.inject_copies(passes.shift_activations(program, names[len(names) // 2 :], shifts={0: 1}))
    share = need(by_hand) / need(program)
    assert share < 0.8
    assert crossing(passes.inject_copies(balanced_of(program, share + 1e-6).program)) <= 1.01 * crossing(by_hand)


def test_tails_that_save_little_are_no_units() -> None:
    assert with_tails(read(captured(models.resnet(blocks=8), None))) is None
    assert with_tails(read(captured(models.gpt(layers=12), None))) is None


def test_programs_too_large_to_be_emitted_have_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphir.passes.choice.balancing._MOST_EMITTED", 0)
    program = trained("pools")
    balanced = balanced_of(program)
    assert balanced.pipeline and not balanced.exact
    placed = passes.inject_copies(balanced.program)
    assert graphir.certify(program, placed).holds
