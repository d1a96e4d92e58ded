"""What an order of operators comes to on each device: what the prediction of its plan says."""

from __future__ import annotations

from collections.abc import Callable

import models
import pytest
import torch
from graphir.passes import plan_figures
from graphir.passes.list_schedule import RANKS, Rules, list_schedule
from graphir.passes.micro_work import Work
from graphir.passes.pipeline_needs import needs_of
from graphir.passes.plan_figures import PlanFigures
from graphir.passes.plan_seconds import PlanSeconds
from micro import captured, captured_gpt, captured_mlp, captured_resnet

import graphir
from graphir import passes
from graphir.analysis.profiles import Measured, Profile, machine
from graphir.analysis.scratch import is_called
from graphir.ir.program import Program


def clipped() -> Program:
    scaler = torch.amp.GradScaler("cpu")
    return captured(models.gpt(batch=8, layers=4), 4, clip_grad_norm=0.5, loss_scale=scaler)


def halves(program: Program) -> Program:
    return passes.shift_modules(program, {"layers[2:4]": 1, "norm": 1})


def parked(program: Program) -> Program:
    return passes.recompute(passes.park(halves(program), "layers[1]", "cpu"), "layers[2]")


def side_by_side(program: Program) -> Program:
    return passes.shift_modules(passes.replicate(program, [0, 1]), {"layers[2:4]": {0: 2, 1: 3}})


CASES: dict[str, Callable[[], Program]] = {
    "clipped": lambda: halves(clipped()),
    "parked and recomputed": lambda: parked(captured_gpt()),
    "replicas": lambda: side_by_side(captured_gpt()),
    "convolutions": lambda: passes.shift_modules(captured_resnet(), {"blocks": 1, "fc": 1}),
    "short": lambda: passes.shift_modules(captured_mlp(), {"[1]": 1, "[4]": 2}),
}


def figures(program: Program) -> PlanFigures:
    work = Work(program, 4)
    return PlanFigures(work, PlanSeconds(work, by_lane=False))


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_the_plan(name: str) -> None:
    program = passes.inject_copies(CASES[name]())
    work = Work(program, 4)
    threads, streams = (PlanFigures(work, PlanSeconds(work, by_lane=by_lane)) for by_lane in (False, True))
    for ranks in RANKS.values():
        found = list_schedule(work, Rules(ranks))
        assert found is not None
        ops = tuple([program.step.ops[i] for i in found.order])
        plan = passes.emit(program.with_(step=program.step.with_(ops=ops)), ahead=0)
        peaks, seconds = threads.of(found.order)
        assert peaks == dict(graphir.memory(plan).peak)
        assert seconds == pytest.approx(graphir.overlap(plan).seconds, rel=1e-9)
        assert streams.of(found.order).seconds == pytest.approx(graphir.overlap(plan, worker=str).seconds, rel=1e-9)
        assert found.seconds <= (1 + 1e-9) * seconds  # a schedule that is beaten would be a plan that is


def test_plans_that_exceed_a_limit_or_take_longer_are_given_up() -> None:
    program = passes.inject_copies(CASES["short"]())
    plans, order = figures(program), range(len(program.step.ops))
    peaks, seconds = plans.of(order)
    assert plans.unbeaten(order, peaks, seconds) == (peaks, seconds)
    assert plans.unbeaten(order, peaks, 0.999 * seconds) is None
    for device, nbytes in peaks.items():
        assert plans.unbeaten(order, {device: nbytes - 1}, seconds) is None


def test_limits_down_to_what_was_granted_make_no_difference() -> None:
    work = Work(passes.inject_copies(CASES["short"]()), 4)
    needs = needs_of(work)
    given = [2 * (need.least + base) for need, base in zip(needs, work.bytes.base, strict=True)]
    granted = [0 for _ in given]
    found = list_schedule(work, Rules(RANKS["zero_bubble"], limits=given), needs, granted=granted)
    assert all(0 < least < most for least, most in zip(granted[:2], given, strict=False))
    assert found == list_schedule(work, Rules(RANKS["zero_bubble"], limits=granted), needs)


def test_what_was_measured_goes_before_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    program = passes.inject_copies(CASES["convolutions"]())
    threads, called = torch.get_num_threads(), [op for op in program.step.ops if is_called(op)]
    keys = [Profile.key(op, program.step.blobs, program.dims, threads) for op in called]
    calls = {key: Measured(1000 * n, 64 * (n % 7), 1e-3) for n, key in enumerate(keys) if key is not None}
    measured = Profile(machine(), calls)
    monkeypatch.setattr(plan_figures, "at_hand", lambda: measured)
    expected = graphir.memory(passes.emit(program, ahead=0), profile=measured).peak
    assert figures(program).of(range(len(program.step.ops))).peaks == dict(expected)
    assert expected != graphir.memory(passes.emit(program, ahead=0), profile=None).peak
