"""passes.balance of a step in micro-batches: its figures are those of the order in which they flow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations

import models
import pytest
import torch
from graphir.passes.choice.flow import Flow
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import AGAIN, KEEP, Choice, Group, Problem, Task, Value
from graphir.passes.micro_work import FORWARD, INPUT, WEIGHT
from runnable import batch_of, one_search, short_searches, trained
from torch import Tensor, nn

import graphir
from graphir import Program, passes, runtime
from graphir.analysis.topology import Link, Speed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    one_search(monkeypatch)


balance = partial(passes.balance, topology="h200x8")
_DEVICES = ("gpu:0", "gpu:1", "cpu:0")
SLOW = graphir.Topology(
    name="slow",
    devices=dict.fromkeys(_DEVICES, Speed(flops_per_second={"f32": 2e9}, bytes_per_second=2e9)),
    links=tuple([Link(source=a, destination=b, bytes_per_second=1e10) for a, b in permutations(_DEVICES, 2)]),
)
"""Where operators take longer than to issue them."""


def gpt() -> models.Example:
    return models.gpt(batch=8, layers=2, length=16, width=32, heads=2)


def limited(program: Program, share: float) -> dict[str, int]:
    need = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
    return {f"gpu:{d}": int(share * need) for d in range(2)}


def test_what_is_chosen_flows_within_the_limits_and_keeps_its_bits() -> None:
    example, program = gpt(), trained(gpt, accumulate=4)
    limits = limited(program, 0.6)
    balanced = balance(program, limits, topology=SLOW, evaluations=100)
    assert balanced.flows and balanced.then.startswith("inject_copies | pipeline{limits={gpu:0: ")
    assert f"then: {balanced.then}" in str(balanced) and balanced.then in balanced.to_json()
    flowing = passes.Pipeline(balanced.then)(balanced.program)
    plan, serial = passes.emit(flowing), passes.emit(passes.inject_copies(balanced.program))
    assert graphir.certify(program, flowing).holds
    peaks = graphir.memory(plan, threads=1, profile=None).peak
    assert all(peaks[use.device] == use.after <= limits.get(use.device, use.after) for use in balanced.devices)
    found = graphir.estimate(plan, SLOW, profile=None).seconds
    assert found == balanced.after < graphir.estimate(serial, SLOW, profile=None).seconds < balanced.before * 1.1
    assert balanced.bound <= balanced.after < balanced.before
    with (
        runtime.Session(plan, program.state, binding="cpu") as ours,
        runtime.Session(passes.emit(program), program.state, binding="cpu") as plain,
    ):
        for _ in range(2):
            assert torch.equal(ours.step(*batch_of(example)), plain.step(*batch_of(example)))


def test_one_micro_batch_does_not_flow() -> None:
    program = trained(gpt)
    balanced = balance(program, limited(program, 0.75), evaluations=200)
    assert balanced.then == "inject_copies" and not balanced.flows


def test_compile_lets_micro_batches_flow_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)
    example = gpt()
    limits = limited(trained(gpt, accumulate=4), 0.6)
    step = graphir.compile(
        example.model,
        example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=torch.optim.SGD(example.model.parameters(), lr=0.1),
        accumulate=4,
        limits=limits,
        topology="h200x8",
        passes="share_storage",
        session={"binding": "cpu"},
    )
    with step:
        assert [text.partition("{")[0] for text in step.plan.program.history][-3:] == [
            "inject_copies",
            "pipeline",
            "share_storage",
        ]
        found = graphir.memory(step.plan, profile=None).peak
        assert all(found[device] <= limits[device] for device in limits)
        first = step.step(*batch_of(example))
        assert step.step(*batch_of(example)) < first


class Found(nn.Module):
    """What tables find beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(100, 32, mode="sum") for _ in range(4)])
        self.bottom, self.top = nn.Linear(16, 32), nn.Linear(5 * 32, 1)

    def forward(self, dense: Tensor, lookups: list[Tensor]) -> Tensor:
        found = [table(rows) for table, rows in zip(self.tables, lookups, strict=True)]
        return self.top(torch.cat([self.bottom(dense), *found], 1))  # type: ignore[no-any-return]


def test_what_inputs_of_a_sharded_step_are_cut_into_is_not_computed_again() -> None:
    torch.manual_seed(0)
    model = Found()
    program = graphir.capture(
        model,
        (torch.randn(32, 16), [torch.randint(0, 100, (32, 4)) for _ in range(4)]),
        targets=(torch.randn(32, 1),),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.Adagrad(model.parameters(), 0.1),
        accumulate=4,
    )
    sharded = passes.shard(program, {"tables.*": "balanced"}, devices=[0, 1])
    need = graphir.memory(passes.emit(passes.inject_copies(sharded)), threads=1, profile=None).peak
    limits = {device: 2 * need[device] for device in ("gpu:0", "gpu:1")}
    balanced = balance(sharded, limits, options=["recompute"], evaluations=30)
    assert graphir.certify(sharded, passes.inject_copies(balanced.program)).holds


def flowing(tasks: list[Task], values: list[Value]) -> Problem:
    """Two groups; a copy takes a second."""
    groups = tuple([Group(name, 0, (0, 1)) for name in "ab"])
    latency = tuple([tuple([0.0 if a == b else 1.0 for b in range(3)]) for a in range(3)])
    return Problem(
        ("gpu:0", "gpu:1", "cpu:0"),
        (None,) * 3,
        (0,) * 3,
        latency,
        ((0.0,) * 3,) * 3,
        groups,
        tuple(tasks),
        tuple(values),
        parts=2,
    )


def test_a_device_does_first_what_another_one_waits_for() -> None:
    """a0 and a1 on one device, b0 and b1 on the other, then a's gradients, of which the inputs' go first."""
    seconds = (1.0, 1.0, 1.0)

    def task(group: int, kind: int, part: int) -> Task:
        return Task(group, seconds, kind=kind, part=part)

    tasks = [
        task(0, FORWARD, 0),
        task(1, FORWARD, 0),
        task(1, INPUT, 0),
        task(1, WEIGHT, 0),
        task(0, WEIGHT, 0),
        task(0, FORWARD, 1),
        task(1, FORWARD, 1),
        task(1, INPUT, 1),
        task(1, WEIGHT, 1),
        task(0, WEIGHT, 1),
    ]
    values = [
        Value(8, made, (read,), 0, tasks[made].group)
        for made, read in ((0, 1), (1, 2), (2, 3), (2, 4), (5, 6), (6, 7), (7, 8), (7, 9))
    ]
    problem = flowing(tasks, values)
    # gpu:0  F0 F1          W0 W1      gpu:1  (copy) F0 I0 F1 I1 W0 W1, or W0 in between
    apart = Outcomes(problem)(Choice((0, 1), (KEEP, KEEP)))
    assert (apart.seconds, apart.busy) == (8.0, (4.0, 6.0, 0.0))
    together = Outcomes(problem)(Choice((0, 0), (KEEP, KEEP)))
    assert (together.seconds, together.busy) == (10.0, (10.0, 0.0, 0.0))
    assert Flow(problem).earlier == [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_a_step_takes_no_less_than_what_it_issues() -> None:
    """Tasks, a copy, and what is computed again, one after the other by one thread."""
    tasks = [Task(0, (1.0,) * 3, issued=100.0), Task(1, (1.0,) * 3, issued=100.0)]
    problem = replace(flowing(tasks, [Value(8, 0, (1,), 0, 0)]), issue=100.0)
    again = Group("b", 0, (0, 1), (KEEP, AGAIN), again=(1.0,) * 3, again_at=1, again_issued=400.0)
    problem = replace(problem, groups=(problem.groups[0], again))
    outcomes = Outcomes(problem)
    assert outcomes(Choice((0, 0), (KEEP, KEEP))).seconds == 200
    assert outcomes(Choice((0, 1), (KEEP, KEEP))).seconds == 300
    assert outcomes(Choice((0, 1), (KEEP, AGAIN))).seconds == 700
