"""Measured steps and their report."""

import itertools
import json

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.observing.measurement import Ledger, Measurement
from graphir.runtime.observing.report import report
from runnable import captured, forward_plan, setting_of, sgd, spread

import graphir
from graphir import passes
from graphir.analysis.schedule import Interval
from graphir.errors import RunError, SessionError

TWO_DEVICES = """
    param w : f32[256] @gpu:0
    input x : f32[256] @gpu:0
    a : f32[256] @gpu:0 = aten.mul.Tensor(x, w) {module=net.scale}
    a_gpu_1 : f32[256] @gpu:1 = Copy(a)
    b : f32[256] @gpu:1 = aten.exp(a_gpu_1) {module=net.exp}
    b_gpu_0 : f32[256] @gpu:0 = Copy(b)
    c : f32[256] @gpu:0 = aten.neg(b_gpu_0) {module=net.neg}
"""
STATE = {"w": torch.ones(256)}
KB = 1024


class Ticks:
    """A clock that says 0, 1, 2, …, for tests that know the times."""

    def __init__(self):
        self.count = itertools.count()

    def mark(self, lane):
        return next(self.count)

    def seconds(self, marks):
        return [float(mark) for mark in marks]


@pytest.fixture
def plan():
    return forward_plan(TWO_DEVICES, "x", output="c", state=STATE)


def measured(plan, executor, steps=1, **options):
    with Session(plan, STATE, executor=executor, **options) as session:
        with session.measured():
            for _ in range(steps):
                session.step(torch.ones(256))
        return session.report()


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_a_report_has_every_lane_and_device(plan, executor):
    found = measured(plan, executor, steps=3)
    assert found.steps == 2
    assert (found.name, found.executor, found.reason) == ("small", executor, "it was asked for")
    assert [time.lane for time in found.lanes] == list(plan.lanes)
    for time in found.lanes:
        assert min(time.busy, time.waiting, time.idle) >= 0
        assert time.busy + time.waiting + time.idle == pytest.approx(found.seconds)
    assert [entry.device for entry in found.devices] == ["gpu:0", "gpu:1"]
    assert [entry.place for entry in found.devices] == ["cpu", "cpu"]


def test_one_step_counts_bytes_and_is_timed(plan):
    found = measured(plan, "threads")
    assert found.steps == 1
    assert found.seconds > 0


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_bytes_are_those_that_the_tensors_have(plan, executor):
    first, second = measured(plan, executor).devices
    assert (first.state, first.predicted_state, second.state) == (KB, KB, 0)
    # Arguments live as long as the step, which holds them: w, x, b_gpu_0, and a or c.
    assert (first.peak, first.predicted_peak) == (4 * KB, 4 * KB)
    assert (second.peak, second.predicted_peak) == (2 * KB, 2 * KB)


RELAYED = """
    input x : f32[batch,64] @gpu:0
    a : f32[batch,64] @gpu:0 = aten.exp(x)
    a_gpu_1 : f32[batch,64] @gpu:1 = Copy(a)
    b : f32[64] @gpu:1 = aten.sum.dim_IntList(a_gpu_1, dim=[0])
    c : f32[64,64] @gpu:1 = aten.outer(b, b)
    d : f32[64] @gpu:1 = aten.sum.dim_IntList(c, dim=[0])
"""


@pytest.mark.parametrize("executor", ["reference", "serial", "threads", "adversarial"])
def test_what_is_received_is_kept_by_all_executors_but_one(executor):
    plan = forward_plan(RELAYED, "x", output="d", dims={"batch": 100})
    with Session(plan, {}, executor=executor) as session:
        for rows, largest in ((64, 64), (128, 128), (16, 128)):
            with session.measured():
                session.step(torch.ones(rows, 64))
            (_, found) = session.report().devices
            after = 64 * 64 + 64  # b and c, or c and d, when a_gpu_1 is not needed any more
            most = max(rows * 64 + 64, after) if executor == "reference" else largest * 64 + after
            assert found.peak == found.predicted_peak == 4 * most


@pytest.mark.parametrize(("seed", "devices", "shares"), [(0, 2, False), (3, 3, False), (6, 3, True)])
def test_measured_and_predicted_bytes_are_equal(seed, devices, shares):
    program = passes.inject_copies(nets.random_program(seed, devices=devices, spread=0.5))
    plan = passes.emit(passes.share_storage(program) if shares else program)
    assert len(plan.buffers) > 20
    for executor in ("reference", "serial", "threads"):
        with Session(plan, program.state, executor=executor) as session:
            for rows in (5, 9, 2):
                with session.measured():
                    session.step(*nets.example_inputs(program, seed=seed, batch=rows))
                for entry in session.report().devices:
                    assert (entry.peak, entry.state) == (entry.predicted_peak, entry.predicted_state)


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_bytes_of_a_training_step_are_the_predicted_ones(executor):
    example = models.resnet()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    rows = len(example.inputs[0]) - 1  # uneven shares
    with Session(plan, program.state, executor=executor) as session:
        with session.measured():
            session.step(example.inputs[0][:rows], example.targets[0][:rows])
        found = {entry.device: entry for entry in session.report().devices}
    for entry in found.values():
        assert entry.state == entry.predicted_state
        assert entry.peak == entry.predicted_peak


def test_copies_have_their_bytes(plan):
    there, back = measured(plan, "threads", steps=4).copies
    assert (there.source, there.destination, there.copies, there.nbytes) == ("gpu:0", "gpu:1", 1, KB)
    assert (back.source, back.destination, back.copies, back.nbytes) == ("gpu:1", "gpu:0", 1, KB)
    assert there.bytes_per_second == pytest.approx(KB / there.seconds)


def test_operators_are_by_module_slowest_first(plan):
    found = measured(plan, "reference", steps=2).operators
    times = {(time.module, time.type): time.calls for time in found}
    assert times[("net.exp", "aten.exp.default")] == 1
    assert sum(times.values()) == len(plan.step.ops)
    assert [time.seconds for time in found] == sorted([time.seconds for time in found], reverse=True)


def test_times_come_from_the_executors_clock(plan):
    setting = setting_of(plan, "x", w=torch.ones(256))
    measurement = Measurement(setting, Ticks())
    for _ in range(2):
        *_, timer = measurement.start({}, {"x": torch.ones(256)})
        for position, instruction in enumerate(plan.instructions):
            if instruction.kind != "record":
                timer.begin(position)
                if instruction.kind == "wait":
                    timer.clock.mark("")
                timer.end(position, (), ())
        measurement.finish()
    found = report(measurement, setting.binding, "threads", "asked", {})
    kinds = {lane: [i.kind for i in instructions] for lane, instructions in plan.lanes.items()}
    for time in found.lanes:
        assert time.waiting == 2 * kinds[time.lane].count("wait")
        assert time.busy == sum(kind not in ("wait", "record") for kind in kinds[time.lane])
    assert measurement.timed.intervals[0] == Interval(0, 1)


def test_measured_steps_train_as_others_do():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    with Session(plan, program.state) as plain, Session(plan, program.state, check_finite=True) as session:
        for _ in range(2):
            plain.step(*example.inputs, *example.targets)
        with session.measured():
            session.step(*example.inputs, *example.targets)
        session.step(*example.inputs, *example.targets)
        assert all(torch.equal(value, session.state()[name]) for name, value in plain.state().items())
        assert session.report().steps == 1


def test_a_step_that_fails_is_not_measured():
    body = "input x : f32[2] @gpu:0\nc : f32[2] @gpu:0 = aten.log(x)"
    with Session(forward_plan(body, "x", output="c"), {}, check_finite=True) as session:
        with session.measured():
            session.step(torch.ones(2))
            with pytest.raises(RunError):
                session.step(torch.zeros(2))
            session.step(torch.ones(2))
            session.step(torch.ones(2))
        assert session.report().steps == 2


def test_it_prints_as_a_table_and_as_json(plan):
    found = measured(plan, "threads", steps=2)
    lines = str(found).splitlines()
    assert lines[0].startswith("report of 'small': ")
    assert lines[0].endswith(" a step, mean of 1 step")
    assert lines[1] == "  executor threads: it was asked for"
    assert lines[2].startswith("  predicted on this host (") and " a step, " in lines[2]
    heads = [line.split() for line in lines if line.split()[0] in ("lane", "device", "copies", "module")]
    assert heads == [
        ["lane", "busy", "predicted", "waiting", "idle"],
        ["device", "on", "state", "predicted", "peak", "predicted"],
        ["copies", "number", "bytes", "time", "bandwidth"],
        ["module", "operator", "calls", "time"],
    ]
    assert max(map(len, lines)) <= 100
    assert type(found).model_validate_json(found.to_json()) == found
    assert json.loads(found.to_json())["lanes"][0]["lane"] == "gpu:0.compute"


@pytest.mark.parametrize("profiled", [False, True])
def test_a_prediction_stands_beside_what_was_measured(plan, profiled, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHIR_PROFILE", str(tmp_path / "profile.json"))
    if profiled:
        graphir.profile(plan)
    found = measured(plan, "threads", steps=2)
    expected = graphir.estimate(plan, executor="threads")
    assert ("profile" in {source.source for source in expected.sources}) is profiled
    assert found.predicted == expected.seconds > 0
    assert [(t.lane, t.predicted) for t in found.lanes] == [(use.lane, use.busy) for use in expected.lanes]


def test_a_plan_that_does_nothing_has_a_report():
    plan = forward_plan("input x : f32[2] @gpu:0", "x", output="x")
    with Session(plan, {}, binding="cpu") as session:
        with session.measured():
            session.step(torch.ones(2))
        assert ": 0.0 µs a step" in str(session.report())


def test_a_device_of_unknown_speed_has_no_prediction():
    plan = forward_plan("input x : f32[2] @gpu:0\nc : f32[2] @gpu:0 = aten.neg(x)", "x", output="c")
    with Session(plan, {}, binding={"gpu:0": "meta"}) as session:
        with session.measured():
            session.step(torch.ones(2))
        found = session.report()
    assert found.predicted is None and found.lanes[0].predicted is None
    assert str(found).splitlines()[2].split() == ["lane", "busy", "waiting", "idle"]


def test_a_plan_without_copies_has_no_table_of_them():
    plan = forward_plan("input x : f32[256] @gpu:0\nc : f32[256] @gpu:0 = aten.neg(x)", "x", output="c")
    found = measured(plan, "auto")
    assert found.copies == ()
    assert "bandwidth" not in str(found)
    assert found.reason == "the plan has one device"


def test_without_a_measured_step_there_is_no_report(plan):
    with Session(plan, STATE) as session:
        session.step(torch.ones(256))
        with pytest.raises(SessionError, match="no step was measured"):
            session.report()
        with session.measured(), pytest.raises(SessionError, match="are being measured already"), session.measured():
            pass


def test_measuring_ends_with_its_context(plan):
    with Session(plan, STATE) as session:
        with session.measured():
            session.step(torch.ones(256))
        session.step(torch.ones(256))
        assert session.report().steps == 1
        with pytest.raises(ZeroDivisionError), session.measured():
            raise ZeroDivisionError
        with session.measured():
            session.step(torch.ones(256))


def test_a_storage_counts_until_it_dies(plan):
    ledger = Ledger(setting_of(plan, "x"), {})
    made = next(i for i, instruction in enumerate(plan.instructions) if instruction.op == 0)
    first, second = (i for i, instruction in enumerate(plan.instructions) if instruction.storage in ("a", "b_gpu_0"))
    tensor = torch.ones(256)
    ledger.end(made, (), (tensor,))
    ledger.end(first, (), ())
    assert ledger.live["gpu:0"] == KB  # something still holds it
    del tensor
    ledger.end(second, (), ())
    assert ledger.live["gpu:0"] == 0


def test_a_view_of_an_argument_counts_nothing(plan):
    x = torch.ones(256)
    ledger = Ledger(setting_of(plan, "x"), {"x": x})
    made = next(i for i, instruction in enumerate(plan.instructions) if instruction.op == 0)
    ledger.end(made, (), (x[:2],))
    assert ledger.peak["gpu:0"] == KB
