"""Which executor runs a plan on the host, and why."""

import re

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.executors import choice
from graphir.runtime.machine import calibration
from runnable import captured, forward_plan, sgd

import graphir
from graphir import passes
from graphir.analysis.cost import Rates
from graphir.analysis.execution import INTERPRETER_SECONDS, THREADS
from graphir.analysis.profiles import Machine, Measured, Profile
from graphir.analysis.topology import Host, Link, Speed, Topology
from graphir.errors import GraphirError, SessionError
from graphir.ir.device import gpu

SLOW, FAST = Rates({"f32": 1e9}, 1e7, 1e-6), Rates({"f32": 1e15}, 1e15, 1e-9)
"""On one of these machines the smallest operator takes 20 µs and more, on the other one none does."""


def replicas(count=2):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    return passes.emit(passes.replicate(program, range(count))), program.state


CHAIN = """
    input x : f32[64,64] @gpu:0
    a : f32[64,64] @gpu:0 = aten.mm(x, x)
    a_gpu_1 : f32[64,64] @gpu:1 = Copy(a)
    b : f32[64,64] @gpu:1 = aten.mm(a_gpu_1, a_gpu_1)
    b_gpu_0 : f32[64,64] @gpu:0 = Copy(b)
    c : f32[64,64] @gpu:0 = aten.mm(b_gpu_0, b_gpu_0)
"""


@pytest.fixture
def machine(monkeypatch):
    def of(cores, rates):
        for module in (choice, calibration):
            monkeypatch.setattr(module, "cores", lambda: cores)
        monkeypatch.setattr(calibration, "host_rates", lambda threads: rates)

    return of


@pytest.mark.parametrize(
    ("cores", "threads", "rates", "executor", "reason"),
    [
        pytest.param(2, 1, SLOW, "threads", r"predicted for a step: serial \S+ ms, threads \S+ ms$", id="long"),
        pytest.param(2, 1, FAST, "serial", r"predicted for a step: serial \S+ ms, threads \S+ ms$", id="short"),
        pytest.param(1, 1, SLOW, "serial", "too few cores for two kernels at a time: 1, with threads=1", id="one core"),
        pytest.param(
            2, 2, SLOW, "serial", "too few cores for two kernels at a time: 2, with threads=2", id="taken cores"
        ),
        pytest.param(4, 2, SLOW, "threads", "predicted", id="enough cores"),
    ],
)
def test_threads_are_chosen_where_they_pay(machine, cores, threads, rates, executor, reason):
    machine(cores, rates)
    plan, state = replicas()
    with Session(plan, state, threads=threads) as session:
        assert session.executor == executor
    assert re.match(reason, choice.choose(plan, "auto", {}, threads).reason)


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_an_executor_that_is_asked_for_is_taken(machine, executor):
    machine(1, FAST)
    plan, state = replicas()
    with Session(plan, state, executor=executor) as session:
        assert session.executor == executor


def test_devices_that_wait_for_each_other_run_in_one_thread(machine):
    machine(2, SLOW)
    with Session(forward_plan(CHAIN, "x", output="c"), {}) as session:
        assert session.executor == "serial"


def test_one_device_takes_one_thread_and_no_measurement(monkeypatch):
    monkeypatch.setattr(choice, "host_topology", None)
    plan, state = replicas(1)
    with Session(plan, state) as session:
        assert session.executor == "serial"


def test_elsewhere_the_reference_runs():
    plan, _ = replicas()
    for kind, executor in (("meta", "reference"), ("cuda", "cuda")):
        assert choice.choose(plan, "auto", {gpu(0): torch.device(kind)}, 1).executor == executor


def test_a_prediction_adds_what_follows_and_overlaps_what_does_not():
    plan = forward_plan(
        """
        input x : f32[1000] @gpu:0
        input y : f32[1000] @gpu:1
        a : f32[1000] @gpu:0 = aten.neg(x)
        b : f32[1000] @gpu:0 = aten.neg(a)
        c : f32[1000] @gpu:1 = aten.neg(y)
        """,
        "x",
        "y",
        output="b",
    )
    each = 8000 / 1e6 + 0.5
    locked = INTERPRETER_SECONDS
    two, one = (host(Rates({"f32": 1.0}, 1e6, 0.5), cores) for cores in (2, 1))
    assert choice.predict(plan, two, None, 1) == pytest.approx(
        {"serial": 3 * each, "threads": 2 * each + locked}, rel=1e-9
    )
    assert choice.predict(plan, one, None, 1)["threads"] == pytest.approx(3 * each + locked)


def host(rates, cores):
    """A topology of two devices that share so many cores."""
    speed = Speed(
        flops_per_second=rates.flops_per_second,
        bytes_per_second=rates.bytes_per_second,
        seconds_per_call=rates.seconds_per_call,
    )
    pairs = (("gpu:0", "gpu:1"), ("gpu:1", "gpu:0"))
    links = [Link(source=a, destination=b, bytes_per_second=rates.bytes_per_second) for a, b in pairs]
    return Topology(name="two", devices={"gpu:0": speed, "gpu:1": speed}, links=links, host=Host(cores=cores))


def test_a_thread_that_waits_is_woken():
    predicted = choice.predict(forward_plan(CHAIN, "x", output="c"), host(SLOW, 2), None, 1)
    assert predicted["threads"] == pytest.approx(predicted["serial"] + 2 * THREADS.wake, rel=1e-9)


def test_a_profile_goes_before_rates():
    plan = forward_plan(CHAIN, "x", output="c")
    key = Profile.key(plan.step.ops[0], plan.step.blobs, plan.dims, 1)
    profile = Profile(Machine("a", "b", "c"), {key: Measured(0, 0, 2.0)})
    assert choice.predict(plan, host(FAST, 2), profile, 1)["serial"] == pytest.approx(6.0, rel=1e-6)


def test_an_executor_that_is_gone_is_refused_with_the_one_to_use():
    plan, state = replicas()
    gone = r"'segments'.*\n(.|\n)*use 'threads', which gives the same bits: 'segments' is gone$"
    with pytest.raises(SessionError, match=rf"^executor {gone}"):
        Session(plan, state, executor="segments")
    with pytest.raises(GraphirError, match=rf"^no executor {gone}"):
        graphir.estimate(plan, executor="segments")


def test_the_machine_is_measured_once_and_left_as_it_was():
    before = torch.get_num_threads()
    rates = calibration.host_rates(1)
    assert min(*rates.flops_per_second.values(), *rates[1:]) > 0
    assert rates.seconds_per_view < rates.seconds_per_call
    assert calibration.host_rates(1) is rates
    assert torch.get_num_threads() == before
