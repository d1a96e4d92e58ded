"""passes.balance: what is chosen keeps within limits, computes the same bits, and says why; and what is refused."""

from __future__ import annotations

import ast
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import models
import parking
import pytest
import torch
from graphir.passes.choice import moves, plans
from graphir.passes.choice.bound import bound_of, lower_bound
from graphir.passes.choice.by_hand import ByHand
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import AGAIN, KEEP, Choice
from graphir.passes.choice.search import search
from instances import INSTANCES, instance
from runnable import batch_of, one_search, step_of, trained
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.analysis.topology import Link, Speed
from graphir.errors import PassError
from graphir.facade.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    one_search(monkeypatch)


CPU = graphir.Topology.named("cpu")
balance = partial(passes.balance, topology="h200x8")
"""By default for a machine that every machine can plan for."""


def need(program: Program) -> int:
    """What one device holds that has everything."""
    return graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]


def limited(program: Program, share: float, devices: int = 2) -> dict[str, int]:
    return {f"gpu:{d}": int(share * need(program)) for d in range(devices)}


def layers() -> models.Example:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])
    return models.Example(model, (torch.randn(64, 64),), (torch.randn(64, 64),), nn.functional.mse_loss)


EXAMPLES: dict[str, tuple[Callable[[], models.Example], float, int]] = {
    "resnet": (models.resnet, 0.8, 2),
    "gpt on three": (partial(models.gpt, layers=4), 0.6, 3),
    "layers": (layers, 0.75, 2),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_measured_peaks_keep_within_limits_and_bits_are_equal(name: str) -> None:
    make, share, devices = EXAMPLES[name]
    example, program = make(), trained(make)
    limits = limited(program, share, devices)
    balanced = balance(program, limits, topology=CPU, evaluations=800)
    assert all(use.after <= limits[use.device] for use in balanced.devices if use.device in limits)
    placed = parking.placed(program, balanced.program, share=False)
    plan = passes.emit(placed)
    assert runtime.check(plan) == []
    args, kwargs = batch_of(example), {}
    with runtime.Session(plan, placed.state, binding="cpu", executor="threads") as session:
        with session.measured():
            session.step(*args, **kwargs)
        for found in session.report().devices:
            if found.device in limits:
                assert found.peak <= limits[found.device]
                assert abs(found.peak - found.predicted_peak) <= 0.005 * found.peak
    parking.assert_runs_the_same(program, placed, [(args, kwargs)] * 2, ("threads", "adversarial"))


@cache
def tight() -> tuple[Program, passes.Balanced]:
    """A step, and the same one within 0.7 of what it needs on each of two devices."""
    program = trained(models.gpt, layers=4)
    return program, balance(program, limited(program, 0.7), evaluations=800)


def test_the_passes_that_it_prints_make_the_same_program() -> None:
    program, balanced = tight()
    assert balanced.pipeline
    again = passes.Pipeline(balanced.pipeline)(program)
    assert str(again.step) == str(balanced.program.step)
    assert balanced.pipeline in str(balanced)


def test_equal_seeds_and_evaluations_give_equal_programs() -> None:
    program = trained(models.resnet)
    limits = limited(program, 0.8)
    one, two = (balance(program, limits, evaluations=400, seed=3) for _ in range(2))
    assert one.pipeline == two.pipeline
    assert one.to_json() == two.to_json()


def test_what_fits_stays() -> None:
    program = trained(models.mlp)
    balanced = balance(program, {"gpu:0": 2 * need(program)}, evaluations=200)
    assert (balanced.pipeline, balanced.program) == ("", program)
    assert passes.Pipeline(balanced.pipeline)(program) == program
    assert "nothing has to move" in str(balanced)


def test_only_the_options_that_are_given_are_used() -> None:
    program = trained(models.gpt, layers=4)
    for option, name in (("shift", "shift_modules"), ("recompute", "recompute"), ("park", "park")):
        limits = {"gpu:0": int(0.9 * need(program)), "gpu:1": need(program)}
        balanced = balance(program, limits, options=[option], evaluations=400)
        used = {text.partition("{")[0] for text in balanced.program.history}
        assert used - {"shift_activations"} == {name}, option


def test_pins_hold_and_an_accelerate_map_goes_in_and_out() -> None:
    program = trained(models.gpt, layers=4)
    limits = limited(program, 0.8)
    first = balance(program, limits, evaluations=600)
    assert set(first.device_map.values()) <= {0, 1}
    again = balance(program, limits, pin=dict(first.device_map), options=["shift"], evaluations=50)
    assert again.device_map == first.device_map
    pinned = balance(program, limits, pin={"layers[0]": "gpu:1"}, evaluations=600)
    assert {place for module, place in pinned.device_map.items() if module.startswith("layers.0")} == {1}


@pytest.mark.parametrize("pin", [{"2": 1}, {"": 1}, {"0": 0, "2": 1}])
def test_pins_hold_where_everything_fits_as_it_is(pin: dict[str, int]) -> None:
    program = trained(layers)
    given = {"gpu:0": need(program), "gpu:1": 2 * need(program)}
    placed = balance(program, given, pin=pin, evaluations=50).device_map
    inside = [(module, device) for module in placed for path, device in pin.items() if path in ("", module)]
    assert inside and all(placed[module] == device for module, device in inside)


class Tied(nn.Module):
    """Embeddings with one weight, which is that of a module that runs nothing, as T5's are."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(512, 64)
        self.token, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.token.weight = self.head.weight = self.shared.weight
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.token(x))).flatten(0, 1)
        return found


@cache
def tied(*, frozen: bool = False) -> Program:
    torch.manual_seed(0)
    words, model = torch.randint(512, (8, 16)), Tied()
    model.shared.weight.requires_grad_(not frozen)
    return step_of(models.Example(model, (words,), (words.flatten(),), nn.functional.cross_entropy))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("pin", [{"token": 1}, {"shared": 1}, {"shared": 1, "token": 0}, {"shared": 0, "head": 1}])
def test_state_of_a_module_that_runs_nothing_is_where_its_group_is(pin: dict[str, int], frozen: bool) -> None:
    program = tied(frozen=frozen)
    found = balance(program, {"gpu:0": need(program), "gpu:1": need(program)}, pin=pin, evaluations=100)
    placed = found.device_map["shared"]
    assert found.program.step.blobs["shared.weight"].device == f"gpu:{placed}"
    assert placed == pin.get("shared", pin.get("token")) and all(found.device_map[m] == d for m, d in pin.items())
    again = balance(
        program, {"gpu:0": need(program), "gpu:1": need(program)}, pin=dict(found.device_map), evaluations=50
    )
    assert again.device_map == found.device_map
    graphir.certify(program, passes.inject_copies(found.program))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pin_of_state_elsewhere_is_refused_where_nothing_may_be_shifted(frozen: bool) -> None:
    program = tied(frozen=frozen)
    given = {"gpu:0": need(program), "gpu:1": need(program)}
    with pytest.raises(PassError, match="'shared' is pinned to gpu:1, and options do not allow to shift it from gpu:0"):
        balance(program, given, pin={"shared": 1}, options=["park"])


def test_a_pin_elsewhere_is_refused_where_nothing_may_be_shifted() -> None:
    program = trained(layers)
    given = {"gpu:0": need(program), "gpu:1": need(program)}
    assert set(balance(program, given, pin={"2": 0}, options=["park"], evaluations=5).device_map.values()) == {0}
    with pytest.raises(PassError, match=r"'2' is pinned to gpu:1, and options do not allow to shift it from gpu:0"):
        balance(program, given, pin={"2": 1}, options=["park"])


class Thrice(nn.Module):
    """A layer that is called three times, with another one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.shared = nn.TransformerEncoderLayer(32, 4, 128, 0.1, batch_first=True)
        self.own = nn.TransformerEncoderLayer(32, 4, 128, 0.1, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for call in range(3):
            x = self.shared(x) + (0.1 * self.own(x) if call == 1 else 0)
        return x @ self.embed.weight.t()


@pytest.mark.parametrize("replicas", [None, [0]])
def test_a_group_is_parked_of_which_another_one_computes_something_again(replicas: list[int] | None) -> None:
    torch.manual_seed(0)
    model = Thrice()
    ids = torch.randint(0, 64, (48, 12))
    program = graphir.capture(
        model,
        (ids,),
        targets=(ids,),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=torch.optim.AdamW(model.parameters()),
    )
    program = program if replicas is None else passes.replicate(program, devices=replicas)
    given = {"gpu:0": int(0.5 * need(program)), "gpu:1": int(0.5 * need(program))}
    found = 0
    for seed in range(2):
        try:
            balanced = balance(program, given, options=["park", "recompute"], evaluations=60, seed=seed)
        except PassError as e:  # so few are looked at
            assert "no placement within the limits was found" in e.what
        else:
            found += 1
            assert graphir.certify(program, passes.inject_copies(balanced.program)).holds
    assert found


def unlike(choice: Choice, other: Choice) -> bool:
    """Whether choices are of different groups, or have a tenth of these on different devices."""
    apart = sum(a != b for a, b in zip(choice.devices, other.devices, strict=False))
    return len(choice.devices) != len(other.devices) or apart >= 0.1 * len(choice.devices)


@pytest.mark.parametrize(("make", "share"), [(models.resnet, 0.8), (layers, 0.9)])
def test_where_plans_are_slower_than_their_groups_say_unlike_ones_are_planned(
    make: Callable[[], models.Example], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, estimated, made = trained(make), plans.estimated, plans.Plans.made
    limits = limited(program, share)
    monkeypatch.setattr("graphir.passes.choice.balancing._MANY", 0)  # as of a large program
    tried: dict[float, list[Choice]] = {0.5: [], 2.0: []}
    for slower, found in tried.items():

        def slowed(*args: Any, slower: float = slower) -> Any:
            found = estimated(*args)
            return replace(found, seconds=slower * found.seconds)

        def noted(self: plans.Plans, grouped: Any, choice: Choice, found: list[Choice] = found) -> plans.Emitted:
            found.append(choice)
            return made(self, grouped, choice)

        monkeypatch.setattr(plans, "estimated", slowed)
        monkeypatch.setattr(plans.Plans, "made", noted)
        balance(program, limits, evaluations=500)
    more = [(choice, tried[2.0][:number]) for number, choice in enumerate(tried[2.0]) if choice not in tried[0.5]]
    alike = [len(choice.devices) for choice, before in more if not all(unlike(choice, other) for other in before)]
    assert more and len(alike) == len(set(alike))  # of each number of groups the plain one alone may be alike


def test_modules_are_kept_whole() -> None:
    program = trained(models.gpt, layers=4)
    balanced = balance(program, limited(program, 0.8), whole=["layers.*"], options=["shift"], evaluations=600)
    for layer in range(4):
        places = {place for module, place in balanced.device_map.items() if module.startswith(f"layers.{layer}.")}
        assert len(places) == 1


def test_replicas_are_balanced_each() -> None:
    program = passes.replicate(trained(models.gpt, layers=4), [0, 1])
    share = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
    limits = {"gpu:0": int(0.8 * share), "gpu:1": int(0.8 * share)}
    balanced = balance(program, limits, devices=["gpu:2", "gpu:3"], evaluations=600)
    placed = passes.inject_copies(balanced.program)
    found = graphir.memory(passes.emit(placed), threads=1, profile=None).peak
    assert all(found.get(device, 0) <= limits[device] for device in limits)  # a replica may go away as a whole
    assert graphir.certify(program, placed).holds


def test_a_slower_device_gets_less() -> None:
    fast, slow = CPU.devices["gpu:0"], CPU.devices["gpu:1"]
    slower = slow.model_copy(
        update={
            "flops_per_second": {"f32": slow.flops_per_second["f32"] / 100},
            "bytes_per_second": slow.bytes_per_second / 100,
        }
    )
    program = trained(layers)
    limits = {"gpu:0": int(0.8 * need(program)), "gpu:1": need(program), "gpu:2": need(program)}
    devices = {"gpu:0": fast, "gpu:1": slower, "gpu:2": fast, "cpu:0": fast}
    links = tuple(link for link in CPU.links if {link.source, link.destination} <= devices.keys())
    topology = graphir.Topology(name="unequal", devices=devices, links=links)
    balanced = balance(program, limits, topology=topology, options=["shift"], evaluations=800)
    assert 1 not in balanced.device_map.values()


def test_why_says_what_else_it_would_have_cost() -> None:
    _, balanced = tight()
    moved = [group for group in balanced.groups if group.moved]
    assert moved and all(group.otherwise for group in moved)
    assert balanced.bound <= balanced.after * 1.0001
    text = str(balanced)
    for word in ("peak before", "peak after", "next best", "the gap is", "passes:"):
        assert word in text


def test_what_is_reckoned_when_asked_for_is_the_same_on_the_other_side_of_a_pickle() -> None:
    program = trained(layers)
    balanced = balance(program, limited(program, 0.8), evaluations=200)
    sent = pickle.loads(pickle.dumps(balanced))
    assert (sent.bound, sent.groups, str(sent)) == (balanced.bound, balanced.groups, str(balanced))
    assert json.loads(balanced.to_json())["bound"] == balanced.bound


def test_a_bound_is_finite_where_groups_are_reckoned_to_hold_more_than_plans() -> None:
    problem = instance(INSTANCES[0])
    tight = replace(problem, limits=tuple([None if limit is None else 1 for limit in problem.limits]))
    assert lower_bound(tight).seconds == math.inf
    assert 0 < bound_of(tight, Outcomes(tight)(tight.now()).peaks) < math.inf


@pytest.mark.parametrize(
    ("make", "shares"),
    [
        *[(layers, shares) for shares in ((0.05, 0.05), (0.2, 0.28), (0.15, 0.2, 0.25))],
        (lambda: models.resnet(blocks=4), (0.2, 0.28)),
    ],
)
def test_limits_that_work_are_told_where_the_given_ones_do_not(
    make: Callable[[], models.Example], shares: tuple[float, ...]
) -> None:
    """They are tried: the search that had found the placement within them begins anew, and may find none."""
    program = trained(make)
    limits = {f"gpu:{d}": int(share * need(program)) for d, share in enumerate(shares)}
    options: dict[str, Any] = {"options": ("shift", "park"), "evaluations": 300}
    with pytest.raises(PassError, match="no placement within the limits was found: gpu:") as refusal:
        balance(program, limits, **options)
    told = ast.literal_eval(refusal.value.fix.partition("limits=")[2].partition(" works")[0])
    assert all(told[device] >= nbytes for device, nbytes in limits.items())
    balance(program, told, **options)


LINKLESS = graphir.Topology(
    name="islands",
    devices=dict.fromkeys(["gpu:0", "gpu:1", "cpu:0"], Speed(flops_per_second={"f32": 1e12}, bytes_per_second=1e12)),
    links=(Link(source="gpu:0", destination="gpu:1", bytes_per_second=1e9),),
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {}}, "limits names no device"),
        ({"limits": {"gpu:0": "3 bananas"}}, "'3 bananas' is not a number of bytes"),
        ({"limits": {"tpu:0": 100}}, "tpu"),
        ({"limits": {"gpu:77": "1 GiB"}}, "limits names gpu:77, which topology 'h200x8' does not have"),
        ({"limits": {"gpu:0": 10**9, "gpu:1": 10**9}, "topology": LINKLESS}, "no link from gpu:1 to gpu:0"),
        ({"limits": {"gpu:0": 10**9}, "topology": "h300x8"}, "no topology has the name 'h300x8'"),
        (
            {"limits": {"gpu:0": 10**9}, "options": ["teleport"]},
            "'recompute', 'state', 'updates', 'share_storage' or 'shares'",
        ),
        ({"limits": {"gpu:0": 10**9}, "pin": {"nothing": 0}}, "no module of program"),
        ({"limits": {"gpu:0": 10**9}, "pin": {"fc1": 5}}, "pinned to gpu:5, which no limit names"),
        ({"limits": {"gpu:0": 10**9}, "whole": ["nothing.*"]}, "no module of program"),
        ({"limits": {"gpu:0": 10**9}, "evaluations": 0}, "evaluations"),
        ({"limits": {"gpu:0": 10**9}, "seconds": -1}, "seconds"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    program = trained(models.mlp)
    with pytest.raises(PassError) as refusal:
        balance(program, **{"evaluations": 10, **options})
    assert message in str(refusal.value)


def test_a_placement_with_copies_is_refused() -> None:
    program = trained(models.mlp)
    moved = passes.inject_copies(passes.shift_modules(program, {next(iter(program.module._modules)): 1}))
    with pytest.raises(PassError, match="has the copies of a placement already"):
        balance(moved, {"gpu:0": 10**9}, evaluations=10)


def test_a_model_without_modules_stays_where_it_is() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.tanh(x @ self.w)
            return x

    program = graphir.capture(Alone(), (torch.randn(256, 64),), loss=lambda y: y.sum())
    whole = need(program)
    assert balance(program, {"gpu:0": whole, "gpu:1": whole}, evaluations=10).pipeline == ""
    with pytest.raises(PassError, match="no placement within the limits was found: gpu:0 lacks"):
        balance(program, {"gpu:0": whole // 2, "gpu:1": whole}, options=["shift"], evaluations=10)


def test_what_fits_stays_where_it_is() -> None:
    """Every operator is issued by one thread; moving some to another device saves nothing where that takes longest."""
    program = trained(layers)
    balanced = balance(program, {"gpu:0": "80 GiB", "gpu:1": "80 GiB"}, evaluations=300)
    assert balanced.pipeline == "" and balanced.after == balanced.before
    assert balanced.bound > 0.9 * balanced.after


def test_a_group_on_both_sides_of_another_device() -> None:
    """Its tasks are apart, or one of them would read what a later one makes."""
    program = trained(layers)
    moved = passes.shift_modules(program, {"2": 1, "6": 1})
    balanced = balance(moved, {"gpu:0": "80 GiB", "gpu:1": "80 GiB"}, evaluations=50)
    assert balanced.after <= balanced.before and 0 < balanced.bound < math.inf


class Shared(nn.Module):
    """One layer, called eight times."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.head = nn.LayerNorm(128), nn.Linear(128, 128), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x + torch.tanh(self.fc(self.norm(x)))
        return self.head(x)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_calls_of_a_module_are_placed_one_by_one(accumulate: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8192, 128), torch.randn(8192, 4)
    example = models.Example(Shared(), (x,), (y,), nn.functional.mse_loss)
    program = step_of(example, accumulate=accumulate)
    limits = limited(program, 0.65)
    balanced = balance(program, limits, topology=CPU, options=["shift"], evaluations=600)
    placed = passes.inject_copies(balanced.program)
    plan = passes.emit(placed)
    found = graphir.memory(plan, threads=1, profile=None).peak
    assert all(found[device] <= limits[device] for device in limits)
    assert graphir.certify(program, placed).holds
    again = passes.Pipeline(balanced.pipeline)(program)
    assert str(again.step) == str(balanced.program.step)
    if accumulate == 1:
        chosen = passes.find_activations(program)
        half = passes.shift_activations(program, chosen[len(chosen) // 2 :], {0: 1})
        plain = graphir.estimate(passes.emit(passes.inject_copies(half)), CPU, profile=None, threads=1).seconds
        assert balanced.after < 1.05 * plain
    batch = batch_of(example)
    with (
        runtime.Session(plan, program.state, binding="cpu") as one,
        runtime.Session(passes.emit(program), program.state, binding="cpu") as other,
    ):
        for _ in range(2):
            assert torch.equal(one.step(*batch), other.step(*batch))


def test_what_is_parked_already_is_refused() -> None:
    program = passes.park(trained(layers), ["**.momentum_buffer"], "cpu")
    with pytest.raises(PassError, match="has something parked already"):
        balance(program, {"gpu:0": 10**9}, evaluations=10)


def test_plain_placements_are_looked_at_whatever_the_budget() -> None:
    program = trained(layers)
    limits = limited(program, 0.8)
    for budget in ({"seconds": 0.0}, {"evaluations": 1}):
        balanced = balance(program, limits, **budget)  # type: ignore[arg-type]
        assert all(use.after <= limits.get(use.device, use.after) for use in balanced.devices)


@pytest.mark.parametrize(
    "given", [g for g in INSTANCES[::4] if (g.shape, g.share) != ("u-net", 0.45)], ids=lambda given: given.name
)
def test_single_changes_do_not_help_what_is_found(given: Any) -> None:
    problem = instance(given)
    outcomes = Outcomes(problem)
    found = search(Outcomes(problem), evaluations=3000)
    assert not found.outcome.over
    for i, group in enumerate(problem.groups):
        for device in group.devices:
            for stored in {KEEP, AGAIN, *group.stored} - {device}:
                devices, kinds = list(found.choice.devices), list(found.choice.stored)
                devices[i], kinds[i] = device, stored
                other = outcomes(Choice(tuple(devices), tuple(kinds)))
                assert other.over or other.seconds >= found.outcome.seconds * 0.999


def test_interrupted_searches_hand_back_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = instance(INSTANCES[2])
    calls = iter(range(100))

    def interrupted(self: Any, *args: Any) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr("graphir.passes.choice.annealing.Line.anneal", interrupted)
    found = search(Outcomes(problem), evaluations=5000)
    assert found.outcome.over < Outcomes(problem)(problem.now()).over


def test_compile_keeps_within_limits_at_every_size() -> None:
    example = layers()
    plain = trained(layers)
    limits = limited(plain, 0.75)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    step = graphir.compile(
        example.model,
        example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=optimizer,
        limits=limits,
        topology="h200x8",
        session={"binding": "cpu"},
    )
    with step:
        assert step.balanced is not None and step.balanced.pipeline
        found = graphir.memory(step.plan, profile=None).peak
        assert all(found[device] <= limits[device] for device in limits)
        first = step.step(*example.inputs, *example.targets)
        assert step.step(*example.inputs, *example.targets) < first


def test_the_command_line_balances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = trained(layers)
    graphir.save(program, tmp_path / "program.json")
    limit = int(0.75 * need(program))
    placed = tmp_path / "placed.json"
    arguments = ["balance", str(tmp_path / "program.json"), f"--limit=gpu:0={limit}", f"--limit=gpu:1={limit}"]
    arguments.append("--topology=h200x8")
    app([*arguments, "--evaluations=300", f"--output={placed}"], standalone_mode=False)
    printed = capsys.readouterr().out
    assert "peak after" in printed and "shift_modules" in printed
    assert graphir.certify(program, passes.inject_copies(graphir.load(placed))).holds


def test_a_search_ends_where_nothing_can_be_changed() -> None:
    program = trained(models.mlp)
    balanced = balance(program, {"gpu:0": 10 * need(program)}, options=["shift"], evaluations=50)
    assert balanced.pipeline == ""


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(500, 16, mode="sum") for _ in range(2)])
        self.bottom = nn.Linear(8, 16)
        self.top = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, bags: list[torch.Tensor]) -> torch.Tensor:
        looked_up = [table(bag) for table, bag in zip(self.tables, bags, strict=True)]
        found: torch.Tensor = self.top(torch.cat([self.bottom(dense), *looked_up], 1))
        return found


@pytest.mark.parametrize("how", ["rows", "columns"])
def test_what_one_replica_alone_has_of_a_split_table_is_placed(how: str) -> None:
    torch.manual_seed(0)
    bags = [torch.randint(500, (32, 3)) for _ in range(2)]
    example = models.Example(Ranker(), (torch.randn(32, 8), bags), (torch.randn(32, 1),), nn.functional.mse_loss)
    program = passes.shard(step_of(example), {"tables.0": (how, [0, 1]), "tables.1": 1}, devices=[0, 1])
    most = max(graphir.memory(passes.emit(passes.inject_copies(program)), threads=1, profile=None).peak.values())
    for devices in (2, 4):
        for share in (2.0, 1.1):
            limits = {f"gpu:{d}": int(share * most) for d in range(devices)}
            found = balance(program, limits, evaluations=50)
            assert graphir.certify(program, passes.inject_copies(found.program)).holds


def test_what_leaves_a_device_is_moved_before_what_goes_there() -> None:
    assert list(moves._emptied_first([(0, 1), (1, 3), (3, 2)])) == [(3, 2), (1, 3), (0, 1)]
    assert list(moves._emptied_first([(0, 1), (1, 0), (2, 0)])) == [(0, 1), (1, 0), (2, 0)]


class Embedded(nn.Module):
    """Layers on three dimensions, which begin with a view of what they are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.first, self.second = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(self.token(x)).relu()).flatten(0, 1)
        return found


def test_a_placement_that_is_there_is_told_and_can_be_pinned() -> None:
    torch.manual_seed(0)
    words = torch.randint(64, (4, 8))
    program = step_of(models.Example(Embedded(), (words,), (words.flatten(),), nn.functional.cross_entropy))
    limits = {"gpu:0": 2 * need(program), "gpu:1": 2 * need(program)}
    for there in ({"second": 1}, {"token": 1}, {"first": 1, "second": 1}):
        moved = passes.shift_modules(program, there)
        as_is = balance(moved, limits, options=["park"], evaluations=5)
        assert as_is.device_map == {"token": 0, "first": 0, "second": 0, **there}
        kept = balance(moved, limits, options=["park"], pin=dict(as_is.device_map), evaluations=5)
        assert not kept.pipeline and kept.device_map == as_is.device_map
        assert balance(moved, limits, pin=dict(as_is.device_map), evaluations=50).device_map == as_is.device_map
    with pytest.raises(PassError, match="'second' is pinned to gpu:0, and options do not allow to shift it from gpu:1"):
        balance(passes.shift_modules(program, {"second": 1}), limits, options=["park"], pin={"second": 0})


@pytest.mark.parametrize("after", [1, 2])
def test_ctrl_c_while_plans_are_made_ends_with_the_best_so_far(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    program, made, calls = trained(models.gpt, layers=4), plans.Plans.made, [0]

    def interrupted(self: plans.Plans, grouped: Any, choice: Choice) -> plans.Emitted:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return made(self, grouped, choice)

    monkeypatch.setattr(plans.Plans, "made", interrupted)
    if after == 1:  # nothing within the limits is known yet
        monkeypatch.setattr(ByHand, "tried", lambda self: iter(()))
        with pytest.raises(KeyboardInterrupt):
            balance(program, limited(program, 0.7), evaluations=100)
    else:
        found = balance(program, limited(program, 0.7), evaluations=100)
        assert all(device.after <= (device.limit or math.inf) for device in found.devices)


class Listed(nn.Module):
    """Weights in a list, which the model multiplies by between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, layer in zip(self.weights, self.layers, strict=True):
            x = layer(x) @ weight
        return x


def test_a_pin_of_state_that_goes_with_what_is_pinned_elsewhere_is_refused() -> None:
    torch.manual_seed(0)
    program = step_of(models.Example(Listed(), (torch.randn(64, 64),), (torch.randn(64, 64),), nn.functional.mse_loss))
    limits = {"gpu:0": need(program), "gpu:1": need(program)}
    with pytest.raises(
        PassError, match=r"'weights' is pinned to gpu:0, but 'weights.0' goes with what uses it, on gpu:1"
    ):
        balance(program, limits, pin={"weights": 0, "layers": 1}, evaluations=50)
    both = balance(program, limits, pin={"weights": 1, "layers": 1}, evaluations=50)
    assert set(both.device_map.values()) == {1}
    apart = balance(program, limits, pin={"layers.0": 1, "layers.1": 0, "layers.2": 1}, evaluations=50)
    found = {k: place for k, place in apart.device_map.items() if k.startswith("weights")}
    assert found == {"weights.0": 1, "weights.1": 0, "weights.2": 1}
    again = balance(program, limits, pin=dict(apart.device_map), evaluations=50)
    assert again.device_map == apart.device_map
    with pytest.raises(
        PassError, match=r"'weights.1' is pinned to gpu:1, but 'weights.1' goes with what uses it, on gpu:0"
    ):
        balance(program, limits, pin={**apart.device_map, "weights.1": 1}, evaluations=50)


def test_threads_can_be_torch_s() -> None:
    program = trained(layers)
    assert balance(program, limited(program, 0.9), evaluations=20, threads=None).after > 0
