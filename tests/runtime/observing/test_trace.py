"""Traces of measured steps, in the Trace Event Format."""

import json

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import captured, forward_plan, sgd, spread
from trace_events import imported

from graphir import passes
from graphir.errors import FileError, SessionError

TWO_DEVICES = """
    param w : f32[256] @gpu:0
    input x : f32[256] @gpu:0
    a : f32[256] @gpu:0 = aten.mul.Tensor(x, w) {module=net.scale}
    a_gpu_1 : f32[256] @gpu:1 = Copy(a)
    b : f32[256] @gpu:1 = aten.exp(a_gpu_1)
    b_gpu_0 : f32[256] @gpu:0 = Copy(b)
    c : f32[256] @gpu:0 = aten.neg(b_gpu_0)
"""
STATE = {"w": torch.ones(256)}
EXECUTORS = ["reference", "serial", "threads"]


@pytest.fixture
def plan():
    return forward_plan(TWO_DEVICES, "x", output="c", state=STATE)


def trace(path, plan, state, *batch, executor="threads", steps=1):
    with Session(plan, state, executor=executor) as session:
        with session.measured():
            for _ in range(steps):
                session.step(*batch)
        session.trace(path)
    return json.loads(path.read_text(encoding="utf-8"))


def training(tmp_path, executor):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    rows = len(example.inputs[0]) - 1  # uneven shares
    batch = example.inputs[0][:rows], example.targets[0][:rows]
    return plan, trace(tmp_path / "step.json", plan, program.state, *batch, executor=executor, steps=2)


def slices(found, process="measured"):
    return [found.event for found in imported(found).slices if found.process == process]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_lanes_and_instructions_are_those_of_the_plan(tmp_path, executor):
    plan, found = training(tmp_path, executor)
    assert found["otherData"] == {"plan": plan.name, "executor": executor, "reason": "it was asked for"}
    shown = imported(found)
    assert shown.threads == {"measured": list(plan.lanes), "predicted": list(plan.lanes)}
    for process, lane, event in shown.slices:
        instruction = plan.instructions[event["args"]["instruction"]]
        assert (instruction.lane, instruction.kind) == (lane, event["cat"]), process
    executed = {i for i, instruction in enumerate(plan.instructions) if instruction.op >= 0}
    assert {e["args"]["instruction"] for e in slices(found, "predicted")} >= executed
    # Views of state that are the same in every step were taken before it.
    left = executed - {e["args"]["instruction"] for e in slices(found)}
    assert all(plan.step.ops[plan.instructions[i].op].effects.views for i in left)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_arrows_lead_along_the_events_of_the_plan(tmp_path, plan, executor):
    found = trace(tmp_path / "step.json", plan, STATE, torch.ones(256), executor=executor)
    for process in ("measured", "predicted"):
        arrows = [arrow for arrow in imported(found).arrows if arrow[0].process == process]
        pairs = {(source.event["name"], target.event["name"]) for source, target in arrows}
        assert pairs == {("a", "a_gpu_1"), ("a_gpu_1", "b"), ("b", "b_gpu_0"), ("b_gpu_0", "c")}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_arrows_begin_and_end_at_operators(tmp_path, executor):
    _, found = training(tmp_path, executor)
    arrows = imported(found).arrows
    assert arrows
    assert not any(end.event["cat"] == "wait" for arrow in arrows for end in arrow)


def test_waits_between_threads_are_slices(tmp_path, plan):
    found = trace(tmp_path / "step.json", plan, STATE, torch.ones(256))
    waits = {event["name"] for event in slices(found) if event["cat"] == "wait"}
    assert {"wait a by gpu:0.compute", "wait b by gpu:1.compute"} <= waits


def test_slices_say_what_they_are(tmp_path, plan):
    found = trace(tmp_path / "step.json", plan, STATE, torch.ones(256))
    by_name = {event["name"]: event["args"] for event in slices(found)}
    position = by_name["a"].pop("instruction")
    assert plan.instructions[position].op == 0
    assert by_name["a"] == {
        "operator": "a : f32[256] @gpu:0 = aten.mul.Tensor(x, w) {module=net.scale}",
        "type": "aten.mul.Tensor",
        "phase": "forward",
        "module": "net.scale",
    }
    assert by_name["a_gpu_1"]["bytes"] == 1024


def test_source_lines_are_in_it(tmp_path):
    _, found = training(tmp_path, "threads")
    assert any("models.py:" in event["args"].get("source", "") for event in slices(found))


def test_a_device_of_unknown_speed_has_no_prediction(tmp_path):
    plan = forward_plan("input x : f32[2] @gpu:0\nc : f32[2] @gpu:0 = aten.neg(x)", "x", output="c")
    with Session(plan, {}, binding={"gpu:0": "meta"}) as session:
        with session.measured():
            session.step(torch.ones(2))
        session.trace(tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text())
    assert slices(found)
    assert not slices(found, "predicted")


def test_a_trace_is_written_whole_or_not_at_all(tmp_path, plan, monkeypatch):
    path = tmp_path / "step.json"
    trace(path, plan, STATE, torch.ones(256))
    before = path.read_bytes()

    def fails(*args):
        raise ZeroDivisionError

    monkeypatch.setattr("graphir.runtime.observing.trace.operator_text", fails)
    with pytest.raises(ZeroDivisionError):
        trace(path, plan, STATE, torch.ones(256))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/step.json", "the file cannot be written: No such file or directory"),
        ("file/step.json", "the file cannot be written: Not a directory"),
        ("folder", "the file cannot be written: Is a directory"),
        ("a\0b", "no file can have the path"),
        ("/", "no file can have the path"),
        (3, "a path was expected, not int"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path, plan, path, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with Session(plan, STATE, executor="serial") as session:
        with session.measured():
            session.step(torch.ones(256))
        with pytest.raises(FileError, match=message):
            session.trace(tmp_path / path if isinstance(path, str) else path)
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file", "folder"]


def test_without_a_measured_step_there_is_no_trace(tmp_path, plan):
    with Session(plan, STATE) as session, pytest.raises(SessionError, match="no step was measured"):
        session.trace(tmp_path / "step.json")
    assert list(tmp_path.iterdir()) == []
