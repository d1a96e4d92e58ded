"""What a person would try: balance finds what it keeps, rules out nothing of it, and is never slower."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import by_hand
import pytest
import torch
from by_hand import Kind
from graphir.passes.balance import Balance
from graphir.passes.base import build
from graphir.passes.choice.annealing import Line
from graphir.passes.choice.balancing import Balancing
from graphir.passes.choice.chains import Chain
from graphir.passes.choice.few import Few
from graphir.passes.choice.holding import Holding
from graphir.passes.choice.levels import Levels
from graphir.passes.choice.problem import Choice
from graphir.passes.choice.proven import proven
from graphir.passes.choice.step import Step
from runnable import short_searches
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import Program, passes
from graphir.errors import PassError
from graphir.ir.device import Device, gpu

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::graphir.PassWarning")]

H200 = graphir.Topology.named("h200x8")
OPTIONS = ("shift", "park", "recompute", "share_storage")


def seconds(program: Program) -> float:
    return graphir.estimate(passes.emit(passes.inject_copies(program)), H200, profile=None, threads=1).seconds


@pytest.mark.parametrize(
    ("kind", "count", "accumulate", "devices", "what"),
    [
        ("convolutional", 4, 1, 1, "[1:5]"),
        ("convolutional", 2, 1, 2, "[0:2]"),  # faster than a cut, which keeps within the limits, too
        ("convolutional", 3, 4, 1, "[2:4]"),
        ("mlp", 2, 1, 1, "[0]"),
        ("mlp", 8, 1, 2, "[0:7]"),
        ("mlp", 4, 4, 1, "[1:2]"),
        ("transformer", 2, 2, 2, "[0:1]"),
        ("transformer", 3, 1, 2, "0.up"),  # its result, which another module reads
        ("transformer", 4, 1, 1, "2.up"),
        ("transformer", 3, 2, 1, "[0:2]"),
    ],
)
def test_what_a_recompute_keeps_is_found_and_no_slower(
    kind: Kind, count: int, accumulate: int, devices: int, what: str
) -> None:
    program = by_hand.blocks(kind, count, accumulate)
    hand = passes.recompute(program, what)
    limit = int(1.05 * by_hand.held(hand)["gpu:0"])
    limits = {f"gpu:{d}": limit for d in range(devices)}
    found = passes.balance(program, limits, topology=H200, evaluations=300)
    assert all(use.after <= limits.get(use.device, math.inf) for use in found.devices)
    assert found.after <= 1.0001 * seconds(hand)


def test_what_is_parked_and_back_late_is_found() -> None:
    """By default copies back begin early enough to be there in time, which saves nothing where layers are short."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    program = graphir.capture(nn.Sequential(*layers), (torch.empty(512, 64),), backward=True)
    late = by_hand.held(passes.park(program, "[0:8]", "cpu", ahead=2))["gpu:0"]
    assert late < 0.9 * by_hand.held(program)["gpu:0"] <= by_hand.held(passes.park(program, "[0:8]", "cpu"))["gpu:0"]
    found = passes.balance(program, {"gpu:0": late}, topology=H200, options=["park"], evaluations=20)
    plan = passes.emit(passes.Pipeline(found.then)(found.program))
    assert graphir.memory(plan, profile=None, threads=1).peak["gpu:0"] <= late and "ahead=2" in found.pipeline
    assert graphir.certify(program, plan.program).holds


def test_no_placement_of_a_few_modules_is_faster() -> None:
    rng = Random(8)
    program = by_hand.units(rng, 3)
    every = [(by_hand.held(one), one) for one in by_hand.every_placement(program, 3)]
    spread = [peaks for peaks, _ in every if len(peaks) == 2 and max(peaks.values()) < 0.9 * every[0][0]["gpu:0"]]
    limits = {device: int(1.02 * nbytes) for device, nbytes in rng.choice(spread).items()}
    keeping = [one for peaks, one in every if all(peaks.get(device, 0) <= limits[device] for device in limits)]
    found = passes.balance(program, limits, topology=H200, evaluations=2000)
    assert found.after <= 1.01 * min(map(seconds, keeping))


def test_nothing_is_ruled_out_that_a_plan_keeps() -> None:
    rng = Random(0)
    for _ in range(3):
        program = by_hand.units(rng, 4)
        for _ in range(12):
            wheres = [by_hand.Where(rng.randrange(2), rng.choice(["kept", "parked", "recomputed"])) for _ in range(4)]
            one = by_hand.placed(program, wheres)
            assert one is not None
            peaks = graphir.memory(
                passes.emit(passes.share_storage(passes.inject_copies(one))), threads=1, profile=None
            )
            limits = {Device.parse(device): peaks.peak.get(device, 1) for device in ("gpu:0", "gpu:1")}
            assert proven(program, limits, [gpu(0), gpu(1)], OPTIONS) == 1.0


def test_what_is_ruled_out_is_an_operator_or_all_state() -> None:
    program = by_hand.blocks("mlp", 2)
    matrix = 1024 * 128 * 4  # an activation of a hidden layer
    both = [gpu(0), gpu(1)]
    uneven = {gpu(0): matrix, gpu(1): 100 * matrix}
    assert proven(program, uneven, both, OPTIONS) == 1
    assert proven(program, uneven, both, ["recompute"]) == 3  # what gelu's backward reads and makes
    assert proven(program, {gpu(0): 3 * matrix, gpu(1): 1}, both, OPTIONS) > 1  # state and inputs are somewhere, too
    assert proven(program, {gpu(0): 3 * matrix}, both, OPTIONS) == 1  # the other device may hold any number


def test_placements_of_a_few_modules_are_reckoned_as_single_ones_are() -> None:
    program = by_hand.blocks("mlp", 2)
    limits = {f"gpu:{device}": by_hand.held(program)["gpu:0"] // 2 for device in range(2)}
    asked = build(Balance, limits=limits, topology=H200).asked(program, None, 1)
    reckoning = Balancing(asked).hands.reckoning
    chain = Chain(((gpu(0), gpu(1)),))
    found = [one for some in Few(reckoning, ["0", "1"], chain, ["keep", "again", "park"]).reckoned() for one in some]
    assert len({(one.cut.moves, one.ways) for one in found}) == 36
    for over, hoped, seconds, cut, ways in found:
        most = reckoning.limits(cut, {})
        for nbytes, hopes in ((over, False), (hoped, True)):
            assert nbytes == (reckoning.peaks(cut, ways, hopes=hopes) - most).clip(0).sum()
        assert seconds == pytest.approx(reckoning.cost(cut, ways))


def test_a_refusal_looks_at_no_more_than_half_as_much_again_as_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, tried = 0, Line.tried

    def counted(self: Line, choice: Choice) -> float:
        nonlocal looked
        looked += 1
        return tried(self, choice)

    monkeypatch.setattr(Line, "tried", counted)
    program = by_hand.blocks("mlp", 4)
    held = by_hand.held(program)["gpu:0"]
    limits = [{"gpu:0": int(share * held), "gpu:1": int(share * held)} for share in (0.6, 0.2)]
    passes.balance(program, limits[0], topology=H200, evaluations=800)
    choice, looked = looked, 0
    with pytest.raises(PassError) as refusal:
        passes.balance(program, limits[1], topology=H200, evaluations=800)
    assert " works (" in refusal.value.fix
    assert looked <= 1.5 * choice


@pytest.mark.parametrize("kind", by_hand.KINDS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_device_is_reckoned_byte_for_byte(kind: Kind, accumulate: int) -> None:
    program = by_hand.blocks(kind, 3, accumulate)
    step = Step(program, None, 1)
    holding, levels = Holding(step), Levels(step, H200)
    placed = holding.placed({}, [[0]], 1)
    assert placed.peaks.tolist() == [by_hand.held(program)["gpu:0"]]
    for paths in (["1"], ["1", "2"]):
        gaps = [(holding.gaps(levels.storages((path,)), together=True), [-1]) for path in paths]
        hand = passes.recompute(program, [f"[{path}]" for path in paths])
        assert holding.peaks(placed, gaps).tolist() == [by_hand.held(hand)["gpu:0"]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.stages = nn.ModuleList([nn.Sequential(*[by_hand.Residual(16, 32) for _ in range(4)]) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


def test_levels_are_blocks_and_blocks_of_blocks_each_and_together() -> None:
    model, x = Nested(), torch.randn(4, 8)
    program = graphir.capture(model, (x,), loss=lambda y: y.sum(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    levels = Levels(Step(program, None, 1), H200)
    found = [["+".join(unit) for unit in units] for units in levels.recomputed()]
    each = [f"stages.{i}.{j}" for i in range(2) for j in range(4)]
    assert each in found
    assert ["stages.0", "stages.1"] in found and ["stages.0+stages.1"] in found
    assert ["stages.0.0+stages.0.1", "stages.0.2+stages.0.3"] in found
    for level in (["stem", "stages.0", "stages.1", "loss"], ["stem", *each, "loss"]):
        assert level in levels.cuts()
    assert levels.freed(("stages.0", "stages.1")) > levels.freed(("stages.0",)) + levels.freed(("stages.1",))
    whole = Levels(Step(program, None, 1), H200, ["stages.0", "stages.1"])
    assert not any("stages.0.0" in unit for units in whole.recomputed() for unit in units)


def test_a_module_that_is_called_like_a_blob_of_a_replica_is_recomputed_as_a_module() -> None:
    program = passes.replicate(by_hand.unlike("transformer", Random(5), 3), [0, 1])
    hand = passes.recompute(program, "[0]")
    limits = dict.fromkeys(("gpu:0", "gpu:1"), by_hand.held(hand)["gpu:0"])
    found = passes.balance(program, limits, topology=H200, options=["recompute"], evaluations=1)
    assert "gpu_0" not in found.pipeline and found.after <= 1.0001 * seconds(hand)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 16, 16, 16, 16]
        layers = [(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True)) for a, b in pairwise(sizes)]
        self.image = nn.Parameter(torch.rand(1, 3, 32, 32))
        self.net = nn.Sequential(*[layer for pair in layers for layer in pair]).requires_grad_(False)

    def forward(self) -> torch.Tensor:
        found: torch.Tensor = self.net(self.image).square().mean()
        return found


def test_storage_is_shared_where_limits_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = InPlace()
    optimizer = torch.optim.SGD([model.image], 0.1)
    program = graphir.capture(model, (), loss=lambda loss: loss, optimizer=optimizer)
    cuts = [passes.inject_copies(passes.shift_modules(program, {f"net[{k}:8]": 1})) for k in range(1, 8)]
    shared, plain = ([by_hand.held(make(cut)) for cut in cuts] for make in (passes.share_storage, lambda cut: cut))
    (limits, *_) = [one for one in shared if not any(all(peaks[d] <= one[d] for d in one) for peaks in plain)]
    found = passes.balance(program, limits, topology=H200, options=["shift", "share_storage"], evaluations=300)
    assert found.then == "inject_copies | share_storage"
    known = {Device.parse(device): nbytes for device, nbytes in limits.items()}
    assert proven(program, known, [gpu(0), gpu(1)], OPTIONS) == 1  # a result may take the place of its operand
    made = passes.Pipeline(found.then)(found.program)
    assert graphir.certify(program, made).holds
    assert all(nbytes <= limits[device] for device, nbytes in by_hand.held(made).items())
    with pytest.raises(PassError, match="no placement within the limits was found"):
        passes.balance(program, limits, topology=H200, options=["shift"], evaluations=300)
    short_searches(monkeypatch, 300)
    for then in ("", "share_storage"):
        with graphir.compile(
            model, (), loss=lambda loss: loss, optimizer=optimizer, limits=limits, passes=then
        ) as step:
            peaks = graphir.memory(step.plan, profile=None).peak
            assert all(peaks.get(device, 0) <= limits[device] for device in limits)


def test_a_plan_by_hand_is_reported_as_others_are() -> None:
    program = by_hand.blocks("mlp", 3)
    limit = by_hand.held(passes.recompute(program, "[0:2]"))["gpu:0"]
    found = passes.balance(program, {"gpu:0": limit}, topology=H200, options=["recompute"], evaluations=50)
    assert "  by hand: recompute of [0:2], each\n" in str(found)
    assert found.groups == () and found.exact and found.bound <= found.after
    assert set(found.device_map.values()) == {0}
    (use,) = [use for use in found.devices if use.device == "gpu:0"]
    assert use.after == limit and use.busy_after > use.busy_before
    assert str(passes.Pipeline(found.pipeline)(program).step) == str(found.program.step)
    assert '"groups": []' in found.to_json()


def test_a_refusal_says_what_fills_a_device_and_what_is_proven() -> None:
    program = by_hand.blocks("mlp", 3)
    with pytest.raises(PassError) as refusal:
        passes.balance(program, {"gpu:0": "1 MiB"}, topology=H200, evaluations=100)
    what, at, fix = refusal.value.what, refusal.value.at, refusal.value.fix
    assert "; at its peak gpu:0 holds " in what and " of activations" in what
    assert "; one operator reads and makes 1.5 MiB there, which no option divides" in what
    assert "gelu_backward" in at
    assert " works (" in fix and "; less than 1.85 times cannot" in fix
    least = int(fix.partition("'gpu:0': ")[2].partition("}")[0])
    passes.balance(program, {"gpu:0": least}, topology=H200, evaluations=100)


def test_what_groups_rule_out_is_said_to_be_of_groups() -> None:
    """Groups are single layers here, of which none can be recomputed; blocks can."""
    with torch.device("meta"):
        model, x = nn.Sequential(*[by_hand.Residual(64, 2048) for _ in range(4)]), torch.empty(4096, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=optimizer)
    need = by_hand.held(passes.recompute(program, "[0:3]"))["gpu:0"]
    assert passes.balance(program, {"gpu:0": need}, topology=H200, evaluations=50).pipeline
    with pytest.raises(PassError, match=r"no placement of these groups is reckoned to keep less than \d"):
        passes.balance(program, {"gpu:0": need // 2}, topology=H200, options=["recompute"], evaluations=50)


@pytest.mark.parametrize(("late", "more"), [(True, 0), (False, 3)])
def test_no_more_schedules_are_tried_once_it_is_late(late: bool, more: int) -> None:
    program = by_hand.blocks("mlp", 4, accumulate=2)
    asked = build(Balance, limits={"gpu:0": "1 GiB", "gpu:1": "1 GiB"}, topology=H200).asked(program, None, 1)
    plans = Balancing(asked).plans
    cut = passes.shift_modules(program, {"[2:4]": "gpu:1"})
    judged, emitted = plans.judged(cut), plans.emitted
    plans.in_any_order(cut, judged, lambda: late)
    assert plans.emitted - emitted == more
