"""Optimizer state that balance parks by itself."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import by_hand
import pytest
import torch
from graphir.passes.choice.groups import Reading, Wanted
from graphir.passes.choice.moves import placed
from graphir.passes.choice.naming import states_named
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import KEEP
from graphir.passes.choice.proven import proven
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError
from graphir.ir.device import gpu

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::graphir.PassWarning")]

H200 = graphir.Topology.named("h200x8")
KINDS = ("exp_avg", "exp_avg_sq")
PLAIN = ("shift", "park", "recompute", "share_storage")


def adam(*hidden: int, width: int = 256, batch: int = 64, device: str = "meta", **options: Any) -> Program:
    """A step of unlike blocks whose optimizer keeps two tensors of each parameter."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*[by_hand.Residual(width, size) for size in hidden])
        x = torch.randn(batch, width)
    optimizer = torch.optim.AdamW(model.parameters())
    return graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=optimizer, **options)


def seconds(program: Program) -> float:
    return graphir.estimate(passes.emit(passes.inject_copies(program)), H200, profile=None, threads=1).seconds


def parked(program: Program, *blocks: int, to: str = "cpu") -> Program:
    what = [f"[{i}].**.{kind}" for i in blocks for kind in KINDS]
    return passes.park(program, what, to) if what else program


def state_on(program: Program, device: str) -> set[str]:
    blobs = [program.step.blobs[name] for name in program.step.external_inputs]
    return {blob.name for blob in blobs if blob.role == "state" and blob.device == device and blob.shape}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_state_goes_to_the_host_where_nothing_else_fits(accumulate: int) -> None:
    program = adam(128, 512, 256, device="cpu", accumulate=accumulate)
    most = by_hand.held(parked(program, 0, 1, 2))["gpu:0"]
    limits = {"gpu:0": int(1.02 * most)}
    found = passes.balance(program, limits, topology=H200, evaluations=30)
    assert state_on(found.program, "cpu:0")
    assert str(passes.Pipeline(found.pipeline)(program).step) == str(found.program.step)
    made = passes.Pipeline(found.then)(found.program)
    certificate = graphir.certify(program, made)
    assert certificate.holds and not certificate.caveats
    assert by_hand.held(made)["gpu:0"] <= limits["gpu:0"]
    x = torch.randn(64, 256)
    with (
        runtime.Session(passes.emit(program), program.state, binding="cpu", executor="serial") as before,
        runtime.Session(passes.emit(made), program.state, binding="cpu") as after,
    ):
        for _ in range(2):
            assert torch.equal(before.step(x, x), after.step(x, x))
        trained = after.state_dict()
        assert all(torch.equal(tensor, trained[name]) for name, tensor in before.state_dict().items())


def test_state_stays_where_it_fits_and_makes_no_step_longer() -> None:
    program = adam(512, 256, 512, batch=1024)
    whole = by_hand.held(program)["gpu:0"]
    for options in (PLAIN, (*PLAIN, "state")):
        assert not passes.balance(program, {"gpu:0": whole}, topology=H200, options=options, evaluations=20).pipeline
    for share in (0.9, 0.86):
        limits = {"gpu:0": int(share * whole)}
        plain, found = (
            passes.balance(program, limits, topology=H200, options=options, evaluations=200).after
            for options in (PLAIN, (*PLAIN, "state"))
        )
        assert found <= 1.005 * plain


def test_the_best_selection_of_few_blocks_is_found() -> None:
    program = adam(256, 1024, 512, batch=1024)
    placements = [
        parked(passes.recompute(program, [f"[{i}]" for i in again]) if again else program, *away)
        for again in ([], [1], [0, 1, 2])
        for away in [[i for i in range(3) if flags[i]] for flags in product((0, 1), repeat=3)]
    ]
    every = [(by_hand.held(one)["gpu:0"], seconds(one)) for one in placements]
    least, whole = min(every)[0], every[0][0]
    for share in (0.6, 0.1):
        limit = int(least + share * (whole - least))
        best = min(took for peak, took in every if peak <= limit)
        found = passes.balance(program, {"gpu:0": limit}, topology=H200, evaluations=300)
        assert found.after <= 1.02 * best


def test_an_idle_peer_takes_state() -> None:
    program = adam(256, 256)
    limits: Mapping[str, int | str] = {
        "gpu:0": int(1.02 * by_hand.held(parked(program, 0, 1, to="gpu:1"))["gpu:0"]),
        "gpu:1": "1 GiB",
        "cpu": "1 MiB",
    }
    found = passes.balance(program, limits, topology=H200, options=["state"], evaluations=50)
    assert state_on(found.program, "gpu:1") and not state_on(found.program, "cpu:0")


def test_updates_run_on_the_host_for_those_who_ask() -> None:
    program = adam(256, 512)
    there = passes.park(program, [f"**.{kind}" for kind in KINDS], "cpu", update_there=True)
    limit = by_hand.held(there)["gpu:0"]
    with pytest.raises(PassError, match="let updates run on the host, with the bits of its kernels"):
        passes.balance(program, {"gpu:0": limit}, topology=H200, options=["state"], evaluations=20)
    found = passes.balance(program, {"gpu:0": limit}, topology=H200, options=["updates"], evaluations=20)
    assert "update_there=true" in found.pipeline
    assert "optimizer state of [0:2] on cpu:0, updated there" in str(found)
    assert str(passes.Pipeline(found.pipeline)(program).step) == str(found.program.step)
    assert "on the host instead of a gpu" in graphir.certify(program, passes.inject_copies(found.program)).caveats[0]


def test_nothing_is_ruled_out_because_of_state_that_may_go() -> None:
    program = adam(128, 512, 256)
    options = (*PLAIN, "state")
    for blocks in ((0,), (1, 2), (0, 1, 2)):
        peak = by_hand.held(parked(program, *blocks))["gpu:0"]
        assert proven(program, {gpu(0): peak}, [gpu(0)], options) == 1
    there = passes.park(program, [f"**.{kind}" for kind in KINDS], "cpu", update_there=True)
    least = {gpu(0): by_hand.held(there)["gpu:0"]}
    assert proven(program, least, [gpu(0)], (*PLAIN, "updates")) == 1
    assert proven(program, least, [gpu(0)], PLAIN) > 1
    assert proven(program, {gpu(0): least[gpu(0)] // 2}, [gpu(0)], options) > 1


def test_a_group_is_reckoned_as_its_plan_is() -> None:
    program = adam(128, 512, 128, 256)
    wanted = Wanted({gpu(0): 1}, (gpu(0),), ("state",), {}, {})
    grouped = Reading(program, wanted, H200, None, 1).grouped(48)
    outcomes, now = Outcomes(grouped.problem), grouped.problem.now()
    for away in (("1.up",), ("0.up", "1.down"), ("1.up", "1.down", "3.up", "3.down")):
        state = tuple([grouped.problem.host if group.name in away else KEEP for group in grouped.problem.groups])
        choice = now._replace(state=state)
        made = placed(program, grouped, choice)
        assert state_on(made, "cpu:0") == {
            f"{name}.{of}.{kind}" for name in away for of in ("weight", "bias") for kind in KINDS
        }
        held = by_hand.held(made)["gpu:0"]
        assert outcomes(choice).peaks[0] == pytest.approx(held, rel=0.02)
        if len(away) > 1:  # one host thread issues the copies, which the groups here do not count
            assert outcomes(choice).seconds > outcomes(now).seconds


def test_state_is_named_by_the_modules_that_own_it() -> None:
    program = adam(16, 16, 16, width=8)
    every = sorted(state_on(program, "gpu:0"))
    assert states_named(program, every) == [f"**.{kind}" for kind in KINDS]
    first = [name for name in every if name.startswith(("0.", "1."))]
    assert states_named(program, first) == [f"[0:2].**.{kind}" for kind in KINDS]
    one = [name for name in every if name.startswith("2.up.")]
    assert states_named(program, one) == [f"2.up.**.{kind}" for kind in KINDS]
    assert states_named(program, ["1.up.weight.exp_avg"]) == ["1.up.weight.exp_avg"]
    replicated = passes.replicate(program, [0, 1])
    mine = [name for name in sorted(state_on(replicated, "gpu:0")) if name.startswith("gpu_0/2.")]
    assert sorted(states_named(replicated, mine)) == mine


def test_what_is_parked_has_to_fit_into_the_memory_of_the_host() -> None:
    program = adam(256, 512)
    limit = int(1.02 * by_hand.held(parked(program, 0, 1))["gpu:0"])
    devices = dict(H200.devices)
    devices["cpu:0"] = devices["cpu:0"].model_copy(update={"memory": 1 << 20})
    small = H200.model_copy(update={"devices": devices})
    with pytest.raises(PassError, match=r"no placement within the limits was found: .*(gpu:0|cpu:0) lacks"):
        passes.balance(program, {"gpu:0": limit}, topology=small, options=["state"], evaluations=20)
    with pytest.raises(PassError) as refused:
        passes.balance(program, {"gpu:0": limit, "cpu": "2 MiB"}, topology=small, evaluations=20)
    assert str(refused.value) == (
        "balance: limits lets cpu:0 hold 2.0 MiB, and topology 'h200x8' has 1.0 MiB there\n"
        "  fix  give cpu:0 1048576 at most, or give a topology whose host has more"
    )
