"""The largest batch that keeps within limits: each row's plan does, and at the next larger batch none is found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import by_hand
import pytest
import torch
from graphir.passes.choice.balancing import Balancing
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.refusals import Refused
from graphir.passes.choice.search import Found
from runnable import sgd
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import passes, runtime
from graphir.analysis.topology import Speed
from graphir.errors import PassError
from graphir.ir.covers import Covers
from graphir.ir.guard import parse_guard
from graphir.ir.program import Program

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::graphir.PassWarning")]

H200 = graphir.Topology.named("h200x8")
EVALUATIONS = 10
OPTIONS = ("recompute", "share_storage")


def largest(program: Program, limits: Any, **options: Any) -> graphir.LargestBatch:
    return graphir.largest_batch(program, limits, topology=H200, evaluations=EVALUATIONS, **options)


def at(program: Program, batch: int) -> Program:
    return program.with_(dims=dict.fromkeys(program.dims, batch))


def held(program: Program, batch: int) -> int:
    """What a program on one device holds there at a batch."""
    return by_hand.held(at(program, batch))["gpu:0"]


class Case(NamedTuple):
    program: Program
    limits: dict[str, int]
    found: graphir.LargestBatch

    def row(self, allowed: str) -> Any:
        return next(row for row in self.found.rows if row.allowed == allowed)


@pytest.fixture(scope="module")
def program() -> Program:
    return by_hand.blocks("mlp", 3)


@pytest.fixture(scope="module")
def case(program: Program) -> Case:
    limits = {"gpu:0": held(program, 300)}
    return Case(program, limits, largest(program, limits, options=OPTIONS))


def test_there_is_a_row_for_each_option_and_for_all(case: Case) -> None:
    assert [row.allowed for row in case.found.rows] == ["as it is", "recompute", "share_storage", "all"]
    assert case.found.best is max(case.found.rows, key=lambda row: row.batch)


def test_each_plan_keeps_within_the_limits(case: Case) -> None:
    for row in case.found.rows:
        balanced = row.balanced
        assert balanced.program.dims == {"batch": row.batch}
        plan = passes.emit(passes.Pipeline(balanced.then)(balanced.program))
        peaks = graphir.memory(plan, threads=1, profile=None).peak
        assert {device: peaks.get(device, 0) for device in row.peaks} == dict(row.peaks)
        assert all(peaks.get(device, 0) <= limit for device, limit in case.limits.items())
        assert row.seconds == balanced.after and row.rows_per_second == row.batch / row.seconds
        assert graphir.certify(at(case.program, row.batch), plan.program).holds


def test_the_next_larger_batch_is_refused(case: Case) -> None:
    for row in case.found.rows:
        options = {"as it is": (), "all": OPTIONS}.get(row.allowed, [row.allowed])
        assert row.beyond.startswith(f"{row.batch + 1:,} rows: gpu:")
        with pytest.raises(PassError, match="no placement within the limits was found"):
            passes.balance(
                at(case.program, row.batch + 1), case.limits, topology=H200, evaluations=EVALUATIONS, options=options
            )


def test_as_it_is_the_batch_is_the_largest_that_one_plan_holds(case: Case) -> None:
    row = case.row("as it is")
    assert row.batch == 300 and held(case.program, 301) > case.limits["gpu:0"] == row.peaks["gpu:0"]


def test_options_make_room(case: Case) -> None:
    assert case.row("recompute").batch > 1.4 * case.row("as it is").batch
    assert case.row("all").batch >= max(row.batch for row in case.found.rows)


def test_another_device_makes_room(case: Case) -> None:
    plain, shifted = largest(case.program, {**case.limits, "gpu:1": case.limits["gpu:0"]}, options=["shift"]).rows
    assert shifted.batch > 1.4 * plain.batch and shifted.peaks["gpu:1"] > 0.5 * shifted.peaks["gpu:0"]


def test_what_a_recompute_by_hand_takes_is_found(case: Case) -> None:
    """Of every run of blocks."""
    most = case.row("recompute").batch
    for first in range(3):
        for last in range(first + 1, 4):
            hand = passes.recompute(case.program, f"[{first}:{last}]")
            assert held(hand, most + 1) > case.limits["gpu:0"]


def test_it_prints_as_a_table_and_reads_as_json(case: Case) -> None:
    text = str(case.found).splitlines()
    assert text[0] == "on h200x8, by its makers' figures:"
    assert text[1].startswith("the largest batch of 'sequential' within gpu:0 ")
    assert text[1].endswith(f": {case.found.best.batch:,} rows")
    assert text[2].split() == ["batch", "step", "rows", "a", "second", "peak", "gpu:0"]
    assert text[3].split()[:4] == ["as", "it", "is", "300"]
    assert text[7].startswith("  as it is: 301 rows: gpu:0 lacks ")
    read = json.loads(case.found.to_json())
    assert [row["batch"] for row in read["rows"]] == [row.batch for row in case.found.rows]
    assert read["limits"] == case.limits and read["unit"] == 1
    assert passes.Pipeline(read["rows"][-1]["pipeline"])(at(case.program, case.found.rows[-1].batch))


def test_equal_numbers_give_equal_results_in_a_few_balances(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run, batches = Balancing.run, []

    def counted(self: Balancing) -> passes.Balanced:
        batches.append(self.program.dims["batch"])
        return run(self)

    monkeypatch.setattr(Balancing, "run", counted)
    again = largest(case.program, case.limits, options=["recompute"])
    assert json.loads(again.to_json())["rows"][1] == json.loads(case.found.to_json())["rows"][1]
    assert batches[:4] == [1, 301, 300, 600] and len(batches) <= 8


def test_what_is_known_to_fit_is_not_refused(program: Program) -> None:
    known = passes.recompute(program, "[0:2]").history[-1]
    limits = by_hand.held(passes.recompute(program, "[0:2]"))
    asked = passes.build(passes.Balance, limits=limits, topology=H200, options=(), evaluations=5).asked(
        program, None, 1
    )
    with pytest.raises(Refused):
        Balancing(asked).run()
    found = Balancing(asked._replace(known=known)).run()
    assert found.pipeline == known
    assert "  by hand: the passes of a placement of another batch" in str(found).splitlines()


def test_programs_without_plans_say_so(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphir.passes.choice.balancing._MOST_EMITTED", 10)
    found = largest(program, {"gpu:0": held(program, 100)}, options=["recompute"])
    assert found.best.batch > 100
    assert "  peaks and steps are reckoned by groups: the program has too many operators for plans" in str(found)


def test_measured_steps_of_all_replicas_and_micro_batches_keep_within_the_limits() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
    x, y = torch.randn(4, 8), torch.randint(4, (4,))
    program = graphir.capture(
        model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=sgd(model.parameters()), accumulate=2
    )
    program = passes.replicate(program, devices=[0, 1], shares=[3, 1])
    limits = {"gpu:0": "120 KiB", "gpu:1": "60 KiB"}
    row = largest(program, limits, options=[]).best
    assert row.balanced is not None and row.batch % 8 == 0 and row.batch > 8
    plan = passes.emit(passes.Pipeline(row.balanced.then)(row.balanced.program))
    inputs = torch.randn(row.batch, 8), torch.randint(4, (row.batch,))
    with runtime.Session(plan, program.state, binding="cpu", executor="threads") as session:
        with session.measured():
            session.step(*inputs)
        for found in session.report().devices:
            assert found.peak <= row.balanced.limits.get(found.device, math.inf)


def test_guards_bound_the_search(program: Program) -> None:
    limits = {"gpu:0": held(program, 100)}
    guarded = at(program, 50).with_(
        covers=Covers(tuple([parse_guard(text, "another branch") for text in ("batch<=90", "batch%4==2", "batch>=10")]))
    )
    (row,) = largest(guarded, limits, options=[]).rows
    assert row.batch == 90 and row.beyond == "batch=91 does not meet batch<=90: another branch"
    tight = program.with_(covers=Covers((parse_guard("batch%16==0", "another branch"),)))
    (row,) = largest(tight, limits, options=[]).rows
    assert row.batch == 96 and row.beyond.startswith("112 rows: gpu:0 lacks ")


def test_modules_on_the_host_are_a_row_where_limits_name_it(program: Program) -> None:
    limits = {"gpu:0": held(program, 4), "cpu:0": 8 * held(program, 64)}
    found = largest(program, limits, options=["shift", "recompute"])
    plain, shift, _, every = [row.batch for row in found.rows]
    assert plain < 64 < shift <= every
    assert "peak gpu:0" in str(found) and "peak cpu:0" in str(found)


def test_a_row_that_cannot_says_why(program: Program) -> None:
    found = largest(program, {"gpu:0": held(program, 100)}, options=["shift"])
    row = found.rows[1]
    assert row.balanced is None and row.batch == 0
    assert row.beyond == "limits and devices name no device beside gpu:0"
    assert str(found).splitlines()[4].split() == ["shift", "-", "-", "-", "-"]
    least = program.with_(covers=Covers((parse_guard("batch>=64", "another branch"),)))
    alone = largest(least, {"gpu:0": held(program, 64) - 1}, options=["recompute"])
    assert [row.batch > 0 for row in alone.rows] == [False, True]
    assert alone.rows[0].beyond.startswith("64 rows: gpu:0 lacks 1 B of ")


def test_rows_are_those_of_all_parts() -> None:
    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2)
            return first * second

    program = graphir.capture(Halves(), (torch.randn(6, 4),))
    found = largest(program, {"gpu:0": held(program, 20)}, options=[])
    assert found.unit == 2 and found.rows[0].batch == 40


def fixed() -> Program:
    class Rooted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) / len(x) ** 0.5

    return graphir.capture(Rooted(), (torch.randn(6, 4),))


def unnamed() -> graphir.Topology:
    """A machine of which nobody says how much memory it has."""
    fast = Speed(flops_per_second={"f32": 1e12, "f64": 1e12}, bytes_per_second=1e12)
    return graphir.Topology(name="unnamed", devices={"gpu:0": fast, "cpu:0": fast}, links=())


@pytest.mark.parametrize(
    ("make", "options", "message", "fix"),
    [
        (lambda p: passes.emit(p), {}, "largest_batch takes a Program, not Plan", "give the program"),
        (lambda p: fixed(), {}, "no size of 'rooted' follows 'batch'; sizes are fixed: ", "capture the model so that"),
        (lambda p: passes.inject_copies(passes.shift_modules(p, {"1": 1})), {}, "balance", ""),
        (lambda p: p, {"limits": {}}, "balance: limits names no device", "give the most"),
        (lambda p: p, {"limits": {"gpu:9": 5}}, "balance: limits names gpu:9, which topology 'h200x8'", ""),
        (lambda p: p, {"limits": {"gpu:0": "5 XB"}}, "'5 XB' is not a number of bytes", "write a whole number"),
        (lambda p: p, {"options": ["bark"]}, "options.0: Input should be 'shift'", ""),
        (lambda p: p, {"threads": 0}, "largest_batch: threads=0: a kernel needs", ""),
        (lambda p: p, {"profile": 3}, "largest_batch: profile is a int", ""),
        (
            lambda p: p,
            {"limits": {"cpu": "1 GiB"}, "topology": unnamed()},
            "the program is on gpu:0, which has no limit, and topology 'unnamed' does not say how much memory it has",
            "give limits {'gpu:0': …} too, or the device of the topology its 'memory'",
        ),
        (
            lambda p: p,
            {"limits": {"gpu:0": 9000}, "options": ["recompute"]},
            "largest_batch: not even a batch of 1 is within the limits: no placement within the limits was found: "
            "gpu:0 lacks ",
            "limits={'gpu:0': ",
        ),
        (
            lambda p: p,
            {"options": ["park", "shares"]},
            "largest_batch: options have 'shares', and every batch is divided by the program's own shares",
            "leave 'shares' out; ",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    program: Program, make: Callable[[Program], Any], options: dict[str, Any], message: str, fix: str
) -> None:
    given = {"limits": {"gpu:0": 10**6}, "topology": H200, "evaluations": 10, **options}
    with pytest.raises(PassError) as refusal:
        graphir.largest_batch(make(program), **given)
    assert message in refusal.value.what and fix in (refusal.value.fix or "")
    if "recompute" in given.get("options", ()):
        assert refusal.value.at  # the operator that runs where the device is the fullest


def test_ctrl_c_ends_all_searches(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []

    def interrupted(outcomes: Outcomes, *args: Any, **options: Any) -> Found:
        searched.append(outcomes)
        choice = outcomes.problem.now()
        return Found(choice, outcomes(choice), 1, (), interrupted=True)

    monkeypatch.setattr("graphir.passes.choice.attempts.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        largest(program, {"gpu:0": held(program, 100)})
    assert len(searched) == 1
