"""What a step is predicted to take, and what that consists of."""

import datetime
import json
from itertools import permutations
from pathlib import Path

import models
import pytest
from runnable import captured, sgd, spread
from small import program_of

import graphir
from graphir import passes
from graphir.analysis.estimate import estimated
from graphir.analysis.execution import ONE_THREAD, STREAMS, THREADS, IssueSeconds
from graphir.analysis.profiles import Machine, Measured, Profile
from graphir.analysis.topology import Host, Link, Speed, Topology
from graphir.errors import GraphirError

SPEED = Speed(flops_per_second={"f32": 1.0}, bytes_per_second=8.0, seconds_per_call=1.0)
"""An operator that reads and writes a byte each takes a second and a quarter."""

GPUS = ("gpu:0", "gpu:1", "gpu:2")


def topology(**changes):
    links = [Link(source=a, destination=b, bytes_per_second=4.0, latency=2.0) for a in GPUS for b in GPUS if a != b]
    return Topology(**{"name": "slow", "devices": dict.fromkeys(GPUS, SPEED), "links": links, **changes})


FORK = """
    input x : f32[2] @gpu:0
    a : f32[2] @gpu:0 = aten.neg(x) {module=first}
    a_gpu_1 : f32[2] @gpu:1 = Copy(a)
    b : f32[2] @gpu:1 = aten.neg(a_gpu_1) {module=second}
    c : f32[2] @gpu:0 = aten.exp(a) {module=third}
    output b
    output c
"""


AT_ONCE = STREAMS._replace(issue=None)


def predicted(body=FORK, execution=AT_ONCE, **changes):
    plan = passes.emit(program_of(body))
    return estimated(plan, topology(**changes), execution, {})


def test_a_step_takes_what_its_longest_path_does():
    found = predicted()
    assert found.seconds == 3.0 + 4.0 + 3.0
    assert [(u.lane, u.busy, u.idle, u.share) for u in found.lanes] == [
        ("gpu:0.compute", 6.0, 4.0, 0.6),
        ("gpu:1.compute", 3.0, 7.0, 0.3),
        ("gpu:1.copy_in", 4.0, 6.0, 0.4),
    ]
    assert [tuple(u) for u in found.links] == [("gpu:0", "gpu:1", 1, 8, 4.0)]
    assert [(s.blob, s.start, s.seconds, s.cause, s.event) for s in found.path] == [
        ("a", 0.0, 3.0, "start", ""),
        ("a_gpu_1", 3.0, 4.0, "event", "a by gpu:0.compute"),
        ("b", 7.0, 3.0, "event", "a_gpu_1 by gpu:1.copy_in"),
    ]
    assert [tuple(m) for m in found.modules] == [("copies", 1, 4.0), ("first", 1, 3.0), ("second", 1, 3.0)]
    assert {s.source: (s.instructions, s.seconds) for s in found.sources} == {"roofline": (3, 9.0), "link": (1, 4.0)}
    assert [(o.blob, o.seconds, o.source) for o in found.operators] == [
        ("a", 3.0, "roofline"),
        ("a_gpu_1", 4.0, "link"),
        ("b", 3.0, "roofline"),
        ("c", 3.0, "roofline"),
    ]


def test_one_thread_executes_all():
    found = predicted(execution=ONE_THREAD)
    assert found.seconds == 13.0
    assert [s.cause for s in found.path] == ["start", "worker", "worker", "worker"]


def test_what_the_host_issues_begins_no_earlier():
    dear = IssueSeconds(kernel=20.0, copy=20.0, record=0.0, wait=0.0, switch=0.0, view=0.0, replay=0.0)
    found = predicted(execution=STREAMS._replace(issue=dear))
    assert found.seconds == 4 * 20.0 + 3.0
    assert [(s.kind, s.blob, s.seconds) for s in found.path] == [
        ("issue", "4 instructions", 80.0),
        ("run", "c", 3.0),
    ]
    assert found.modules[0].module == "issuing"


def test_a_collective_brings_each_other_operand_over_its_link():
    found = predicted(
        """
        input x : f32[2] @gpu:0
        input y : f32[2] @gpu:1
        y_gpu_0 : f32[2] @gpu:0 = Copy(y)
        [a : f32[2] @gpu:0, b : f32[2] @gpu:1] = AllReduce([x, y])
        c : f32[2] @gpu:0 = aten.neg(y_gpu_0)
        output a
        output b
        output c
        """
    )
    reduced = 1.0 + (16 + 8) / 8 + 4.0
    assert {(u.source, u.destination): (u.copies, u.nbytes, u.seconds) for u in found.links} == {
        ("gpu:1", "gpu:0"): (2, 16, 8.0),
        ("gpu:0", "gpu:1"): (1, 8, 4.0),
    }
    assert found.seconds >= 4.0 + reduced


REDUCED = """
    input x : f32[32] @gpu:0
    input y : f32[32] @gpu:1
    [a : f32[32] @gpu:0, b : f32[32] @gpu:1] = AllReduce([x, y])
    output a
    output b
    """


@pytest.mark.parametrize(("bytes_per_second", "source"), [(4.0, "roofline"), (1.0, "link")])
def test_threads_of_a_host_read_what_they_reduce_while_they_add(bytes_per_second, source):
    """An addition reads and writes 384 bytes, at 8 a second and in one call; 128 of them are on the other side."""
    links = [
        Link(source=a, destination=b, bytes_per_second=bytes_per_second, latency=2.0) for a, b in permutations(GPUS, 2)
    ]
    found = predicted(REDUCED, THREADS._replace(lock=0.0), links=links, host=Host(cores=2))
    assert [(o.seconds, o.source) for o in found.operators] == [(max(1.0 + 384 / 8, 128 / bytes_per_second), source)]
    assert [(u.copies, u.nbytes, u.seconds) for u in found.links] == [(1, 128, 128 / bytes_per_second)] * 2


def test_measured_calls_slow_each_other_down_by_what_was_measured():
    """A call of a second, which takes half as long again beside another, and one of half a second, which takes twice as
    long: each for the part of it beside which the other one runs."""
    body = [f"input x{i} : f32[{i + 2}] @gpu:{i}\na{i} : f32[{i + 2}] @gpu:{i} = aten.neg(x{i})" for i in range(2)]
    plan = passes.emit(program_of("\n".join(body)))
    keys = [Profile.key(op, plan.step.blobs, plan.dims, 1) for op in plan.step.ops]
    calls = {keys[0]: Measured(0, 0, 1.0, beside=1.5), keys[1]: Measured(0, 0, 0.5, beside=1.0)}
    profile = Profile(Machine("a", "b", "c"), calls)
    found = estimated(plan, topology(host=Host(cores=2, slowdown=3.0)), THREADS._replace(lock=0.0), {}, profile)
    assert [lane.busy for lane in found.lanes if lane.lane.endswith("compute")] == [1.25, 1.0]
    assert [operator.seconds for operator in found.operators] == [1.0, 0.5], "beside nothing else"


def test_it_prints_within_80_columns_and_as_json():
    example = models.resnet()
    plan = passes.emit(spread(captured(example, sgd(example.model.parameters()))))
    for found in (
        graphir.estimate(plan, Topology.named("h200x8")),
        graphir.estimate(plan, Topology.named("cpu"), executor="threads"),
    ):
        lines = str(found).splitlines()
        assert lines[0] == f"on {found.topology}, by its makers' figures:"
        assert lines[1].startswith("estimate of 'resnet': ")
        assert max(map(len, lines)) <= 80
        read = json.loads(found.to_json())
        assert read["machine"] == f"{found.topology}, by its makers' figures" and read["measured"] == ""
        assert read["seconds"] == found.seconds
        assert len(read["operators"]) == len(plan.step.ops)
        assert read["path"][-1]["start"] + read["path"][-1]["seconds"] == pytest.approx(found.seconds)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_the_critical_path_accounts_for_the_whole_step(executor):
    example = models.gpt()
    plan = passes.emit(spread(captured(example, sgd(example.model.parameters()))))
    found = graphir.estimate(plan, Topology.named("cpu"), executor=executor, profile=None)
    assert sum(step.seconds + step.delay for step in found.path) == pytest.approx(found.seconds)
    assert sum(module.seconds for module in found.modules) == pytest.approx(sum(step.seconds for step in found.path))
    assert sum(source.instructions for source in found.sources) == sum(i.op >= 0 for i in plan.instructions)
    for lane in found.lanes:
        assert lane.busy + lane.idle == pytest.approx(found.seconds)


def test_a_profile_goes_before_rates_where_it_is_given():
    plan = passes.emit(program_of(FORK))
    key = Profile.key(plan.step.ops[0], plan.step.blobs, plan.dims, 1)
    profile = Profile(Machine("a", "b", "c"), {key: Measured(0, 0, 0.5)})
    found = graphir.estimate(plan, topology(), threads=1, profile=profile)
    assert [o.source for o in found.operators] == ["profile", "link", "profile", "roofline"]


def test_the_cached_profile_is_used_on_its_own_machine_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHIR_PROFILE", str(tmp_path / "profile.json"))
    plan = passes.emit(program_of("input x : f32[64] @gpu:0\na : f32[64] @gpu:0 = aten.neg(x)\noutput a"))
    profile = graphir.profile(plan, threads=1)
    here = graphir.estimate(plan, threads=1)
    assert here.topology.startswith("this host (") and here.operators[0].source == "profile"
    assert [operator.seconds for operator in here.operators] == [call.seconds for call in profile.calls.values()]
    assert graphir.estimate(plan, threads=1, profile=None).operators[0].source == "roofline"
    assert graphir.estimate(plan, Topology.named("cpu"), threads=1).operators[0].source == "roofline"


def test_more_devices_than_cores_share_the_cores_of_the_host():
    body = "\n".join(f"input x{i} : f32[2] @gpu:{i}\na{i} : f32[2] @gpu:{i} = aten.neg(x{i})" for i in range(8))
    before = len(list(Path("/proc/self/task").glob("*")))
    found = graphir.estimate(passes.emit(program_of(body)), threads=4096)
    assert len(list(Path("/proc/self/task").glob("*"))) <= before + 64  # threads that were measured would stay
    today = datetime.date.today().isoformat()
    assert found.topology.startswith("this host (") and found.measured == today
    assert str(found).startswith(f"on {found.topology}, measured {today}:\n")


def test_threads_of_a_host_share_its_cores():
    body = "\n".join(f"input x{i} : f32[2] @gpu:{i}\na{i} : f32[2] @gpu:{i} = aten.neg(x{i})" for i in range(2))
    plan = passes.emit(program_of(body))
    seconds = {
        cores: graphir.estimate(plan, topology(host=Host(cores=cores)), executor="threads").seconds for cores in (1, 2)
    }
    assert seconds[2] == pytest.approx(3.0, rel=1e-5) and seconds[1] == pytest.approx(6.0, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda plan: graphir.estimate(plan.program), "estimate takes a Plan, not Program"),
        (lambda plan: graphir.estimate(plan, 8), "topology is a int, not a Topology"),
        (lambda plan: graphir.estimate(plan, "h300x8"), "no topology has the name 'h300x8'; did you mean 'h200x8'"),
        (lambda plan: graphir.estimate(plan, executor="thread"), "no executor 'thread'; did you mean 'threads'?"),
        (lambda plan: graphir.estimate(plan, topology(), executor="serial"), "the executor 'serial' does not run on"),
        (
            lambda plan: graphir.estimate(plan, Topology.named("cpu"), executor="cuda"),
            "executor 'cuda' does not run",
        ),
        (lambda plan: graphir.estimate(plan, profile=3), "profile is a int, not a Profile"),
        (lambda plan: graphir.estimate(plan, threads=0), "threads=0: a kernel needs at least one thread"),
        (lambda plan: graphir.estimate(plan, dims={"bach": 3}), "dims has 'bach', which no size of 'small' follows"),
        (
            lambda plan: graphir.estimate(plan, topology(links=[])),
            "topology 'slow' has no link from gpu:0 to gpu:1",
        ),
        (
            lambda plan: graphir.estimate(plan, topology(devices={"gpu:0": SPEED}, links=[])),
            "topology 'slow' has no device gpu:1",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(make, error):
    with pytest.raises(GraphirError) as raised:
        make(passes.emit(program_of(FORK)))
    assert error in raised.value.what
    assert raised.value.fix


def test_a_missing_link_names_the_copy_that_needs_it():
    with pytest.raises(GraphirError) as raised:
        graphir.estimate(passes.emit(program_of(FORK)), topology(links=[]))
    assert raised.value.at == "a_gpu_1 : f32[2] @gpu:1 = Copy(a)"
    assert raised.value.fix.startswith("add {'source': 'gpu:0', 'destination': 'gpu:1', 'bytes_per_second': …}")


def test_a_topology_may_be_given_by_its_name():
    plan = passes.emit(program_of(FORK))
    assert graphir.estimate(plan, "h200x8") == graphir.estimate(plan, Topology.named("h200x8"))
