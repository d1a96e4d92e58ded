"""What a person would try for replicas: cuts that are alike in each, with what is stored otherwise behind them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

import by_hand
import pytest
import torch
from graphir.passes.balance import Balance
from graphir.passes.base import build
from graphir.passes.choice.balancing import Balancing
from graphir.passes.choice.chains import Chain, chains, goes, is_alike, partners, said
from graphir.passes.choice.drafts import Way
from graphir.passes.choice.few import Few
from graphir.passes.choice.holding import Holding
from graphir.passes.choice.step import Step
from torch import nn

import graphir
from graphir import Program, passes
from graphir.errors import PassError
from graphir.ir.device import CPU, gpu

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::graphir.PassWarning")]

H200 = graphir.Topology.named("h200x8")
PLACES = ("gpu:0", "gpu:1", "gpu:2", "gpu:3")
PARTNERS: Mapping[int, Any] = {1: {0: 2, 1: 2}, 2: {0: 2, 1: 3}}


def replicas(seed: int, kind: by_hand.Kind = "mlp", count: int = 3) -> Program:
    return passes.replicate(by_hand.unlike(kind, Random(seed), count), [0, 1])


def seconds(program: Program) -> float:
    return graphir.estimate(passes.emit(passes.inject_copies(program)), H200, profile=None, threads=1).seconds


def balanced(program: Program, limits: Mapping[str, int], **options: Any) -> Any:
    found = passes.balance(program, limits, topology=H200, **{"evaluations": 20, **options})
    assert all(use.after <= limits.get(use.device, use.after) for use in found.devices)
    return found


def test_chains_are_alike_in_each_replica() -> None:
    a, b, c, d, e = map(gpu, range(5))
    equal = lambda _: 0  # noqa: E731
    assert chains([a], [a, b, c], equal) == [Chain(((a, b, c),))]
    assert chains([a, b], [a, b, c, d], equal) == [Chain(((a, c), (b, d)))]
    assert chains([a, b], [c], equal) == [Chain(((a, c), (b, c)))]
    assert chains([a, b], [c, d, e], equal) == [Chain(((a, c, e), (b, d, e)))]
    assert chains([a, b], [a, b], equal) == []  # an exchange of parts changes nothing between equals
    assert Chain(((a, b), (b, a))) in chains([a, b], [a, b], equal, equal=False)
    small = chains([a, b], [a, b], lambda device: device == a)
    assert Chain(((a, b), (b, b))) in small and Chain(((a, b), (b, a))) not in small
    (chain,) = chains([a, b], [c, d], equal)
    assert chain.devices == (a, b, c, d) and chain.is_apart
    assert [goes(chain.behind(0), device) for device in chain.devices] == [c, d, None, None]
    assert [goes(chain.behind(1), device) for device in chain.devices] == [None, None, a, b]
    to = partners([a, b], [a, b, c, d])
    assert to is not None and said(to) == "gpu:2 and gpu:3"
    assert partners([a, b], [a, b, c]) == c and partners([a, b], [a, b]) is None


def test_replicas_are_alike_where_each_has_a_gpu_of_its_own() -> None:
    program = replicas(0)
    assert is_alike(program, [gpu(0), gpu(1)])
    assert not is_alike(passes.shift_modules(program, {"2": {0: 2, 1: 3}}), [gpu(0), gpu(1), gpu(2), gpu(3)])
    one = by_hand.unlike("mlp", Random(0), 3)
    assert is_alike(one, [gpu(0)])
    assert not is_alike(passes.shift_modules(one, {"2": 1}), [gpu(0), gpu(1)])
    assert not is_alike(passes.shard(one, {"0": 0}, [0, 1]), [gpu(0), gpu(1)])


@pytest.mark.parametrize(("kind", "further"), [("mlp", 1), ("transformer", 2)])
def test_a_cut_of_replicas_is_reckoned_byte_for_byte(kind: by_hand.Kind, further: int) -> None:
    program = replicas(10, kind)
    holding = Holding(Step(program, None, 1))
    for at in ((0, 0, 0), (0, 1, 1), (0, 0, 1), (1, 0, 1)):
        placed = holding.placed({str(i): part for i, part in enumerate(at)}, [[0, 1], [2, 1 + further]], 2 + further)
        moves = {f"[{i}]": PARTNERS[further] for i, part in enumerate(at) if part}
        held = by_hand.held(passes.shift_modules(program, moves) if moves else program)
        assert placed.peaks.tolist() == [held.get(f"gpu:{device}", 0) for device in range(2 + further)]


def test_what_replicas_recompute_and_park_is_reckoned_for_each() -> None:
    program = replicas(1, "transformer", 2)
    limits = {f"gpu:{device}": by_hand.held(program)["gpu:0"] // 2 for device in range(4)}
    asked = build(Balance, limits=limits, topology=H200).asked(program, None, 1)
    hands = Balancing(asked).hands
    reckoning, (chain,) = hands.reckoning, hands.chains()
    found = [one for some in Few(reckoning, ["0", "1"], chain, ["keep", "again", "park"]).reckoned() for one in some]
    assert len({(one.cut.moves, one.ways) for one in found}) == 36
    for over, hoped, spent, cut, ways in found:
        most = reckoning.limits(cut, {})
        for nbytes, hopes in ((over, False), (hoped, True)):
            assert nbytes == (reckoning.peaks(cut, ways, hopes=hopes) - most).clip(0).sum()
        assert spent == pytest.approx(reckoning.cost(cut, ways))


@pytest.mark.parametrize(("further", "again"), [(1, []), (2, []), (2, ["[2]"])])
def test_replicas_compute_side_by_side_but_on_one_device(further: int, again: list[str]) -> None:
    program = replicas(0, "convolutional")
    asked = build(Balance, limits=dict.fromkeys(PLACES[: 2 + further], "1 GiB"), topology=H200).asked(program, None, 1)
    hands = Balancing(asked).hands
    (chain,) = hands.chains()
    cut = hands.reckoning.cut_into({"0": 0, "1": 0, "2": 1}, chain)
    hand = passes.shift_modules(program, {"[2]": PARTNERS[further]})
    hand = passes.recompute(hand, again) if again else hand
    ways = [Way((("2",),))] if again else []
    assert hands.reckoning.cost(cut, ways) == pytest.approx(seconds(hand), rel=0.05)


@pytest.mark.parametrize(
    ("seed", "kind", "further", "moved", "again"),
    [
        (5, "transformer", 2, ["[0]", "[2]"], ["[0]"]),
        (1, "mlp", 1, ["[1]", "[2]"], ["[0]"]),
        (3, "mlp", 1, ["[1]", "[2]"], ["[1]"]),
    ],
)
def test_no_cut_that_is_alike_in_replicas_is_missed(
    seed: int, kind: by_hand.Kind, further: int, moved: list[str], again: list[str]
) -> None:
    program = replicas(seed, kind)
    hand = passes.shift_modules(program, dict.fromkeys(moved, PARTNERS[further]))
    hand = passes.recompute(hand, again) if again else hand
    limits = {device: int(1.02 * nbytes) for device, nbytes in by_hand.held(hand).items()}
    assert balanced(program, limits).after <= 1.01 * seconds(hand)


def test_the_cheapest_cut_is_the_cheapest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphir.passes.choice.cuts._EVERY", 0)  # part by part, however few there are
    rng, compared = Random(3), 0
    for program, devices in [
        (by_hand.unlike("transformer", rng, 3), 3),
        (by_hand.unlike("mlp", rng, 5, accumulate=2), 4),
        (passes.replicate(by_hand.unlike("mlp", rng, 4), [0, 1]), 6),
    ]:
        whole = by_hand.held(program)["gpu:0"]
        limits = {f"gpu:{device}": int(0.3 * rng.uniform(0.8, 1.2) * whole) for device in range(devices)}
        asked = build(Balance, limits=limits, topology=H200).asked(program, None, 1)
        hands = Balancing(asked).hands
        cuts, chain = hands.cuts, hands.chains()[0]
        for level in map(tuple, hands.levels.depths()[:2]):
            single = [way for way in hands.ways() if way.to is None and max(map(len, way.units)) == 1]
            for way in [Way(), *single]:
                assert cuts.is_exact(level, chain, way)
                searching = cuts.cheapest(level, chain, way)
                with pytest.raises(StopIteration) as found:
                    while True:
                        next(searching)
                ends = product(range(1, len(level)), repeat=chain.parts - 1)
                every = [cuts.cut(level, chain, one) for one in ends if list(one) == sorted(set(one))]
                assert cuts.price(found.value.value, way) == min(cuts.price(cut, way) for cut in every)
                compared += len(every) > 1
    assert compared > 10


def test_the_host_has_modules_of_all_replicas() -> None:
    model, x = nn.Sequential(nn.Linear(32, 4096), nn.ReLU(), nn.Linear(4096, 32)), torch.randn(64, 32)
    adam = torch.optim.AdamW(model.parameters())
    program = graphir.capture(model, (x,), targets=(x,), loss=nn.functional.mse_loss, optimizer=adam)
    program = passes.replicate(program, [0, 1])
    limits = {"gpu:0": 3 << 20, "gpu:1": 3 << 20, "cpu": 1 << 30}
    found = balanced(program, limits, evaluations=20)
    state = [found.program.step.blobs[name] for name in found.program.step.external_inputs]
    there = {blob.name for blob in state if blob.role == "param" and blob.device == CPU}
    assert there and {name.replace("gpu_0/", "gpu_1/") for name in there if name.startswith("gpu_0/")} <= there
    made = passes.Pipeline(found.then)(found.program)
    assert graphir.certify(program, made).holds
    with pytest.raises(PassError, match="no placement within the limits was found"):
        balanced(program, {"gpu:0": 3 << 20, "gpu:1": 3 << 20}, options=["shift"], evaluations=20)
