"""Observed steps: what probes are told by every executor."""

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.executors.reference import Reference
from graphir.runtime.executors.serial import Serial
from graphir.runtime.executors.threads import Threads
from graphir.runtime.observing.probes import Probes
from runnable import captured, forward_plan, setting_of, sgd, spread

from graphir import passes
from graphir.errors import RunError

EXECUTORS = [Reference, Serial, Threads]

TWO_DEVICES = """
    buffer s : f32[2] @gpu:0
    input x : f32[2] @gpu:0
    a : f32[2] @gpu:0 = aten.neg(x)
    a_gpu_1 : f32[2] @gpu:1 = Copy(a)
    b : f32[2] @gpu:1 = aten.exp(a_gpu_1)
    s;1 = aten.add_.Tensor(s, a) {writes=[0:0]}
    b_gpu_0 : f32[2] @gpu:0 = Copy(b)
    c : f32[2] @gpu:0 = aten.add.Tensor(b_gpu_0, s;1)
"""


class Seen:
    """Notes every call."""

    def __init__(self):
        self.calls = []

    def begin(self, position):
        self.calls.append(("begin", position))

    def end(self, position, reads, makes):
        values = [[torch.as_tensor(value).tolist() for value in group] for group in (reads, makes)]
        self.calls.append(("end", position, *values))


def of_kind(plan, *kinds):
    return [i for i, instruction in enumerate(plan.instructions) if instruction.kind in kinds]


@pytest.fixture(params=EXECUTORS, ids=["reference", "serial", "threads"])
def executor(request):
    made = []

    def make(plan, *inputs, **state):
        made.append(request.param(setting_of(plan, *inputs, **state)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_probe_is_told_of_each_instruction_and_its_values(executor):
    plan = forward_plan(TWO_DEVICES, "x", output="c", state={"s": torch.zeros(2)})
    seen = Seen()
    executor(plan, "x", s=torch.zeros(2)).run_observed({}, [torch.tensor([0.0, -1.0])], 0, seen)
    e = torch.tensor(1.0).exp().item()
    expected = {
        "a": ([[0, -1]], [[0, 1]]),
        "a_gpu_1": ([[0, 1]], [[0, 1]]),
        "b": ([[0, 1]], [[1, e]]),
        "s": ([[0, 1], [0, 1]], [[0, 1]]),  # the overwritten operand holds what was written
        "b_gpu_0": ([[1, e]], [[1, e]]),
        "c": ([[1, e], [0, 1]], [[1, e + 1]]),
    }
    told = {call[1]: call[2:] for call in seen.calls if call[0] == "end"}
    names = {plan.step.ops[plan.instructions[p].op].outputs[0]: p for p in of_kind(plan, "run", "copy")}
    assert {name: told[position] for name, position in names.items()} == expected
    assert all(told[position] == ([], []) for position in told if plan.instructions[position].op < 0)


def test_calls_nest_and_keep_each_lanes_order(executor):
    plan = forward_plan(TWO_DEVICES, "x", output="c", state={"s": torch.zeros(2)})
    seen = Seen()
    executor(plan, "x", s=torch.zeros(2)).run_observed({}, [torch.ones(2)], 0, seen)
    for device in plan.devices:
        mine = [c[:2] for c in seen.calls if plan.instructions[c[1]].lane.startswith(device)]
        begun = [position for what, position in mine if what == "begin"]
        assert mine == [(what, position) for position in begun for what in ("begin", "end")]
        assert begun == sorted(begun)


def test_waits_between_threads_are_told():
    plan = forward_plan(TWO_DEVICES, "x", output="c", state={"s": torch.zeros(2)})
    seen, threads = Seen(), Threads(setting_of(plan, "x", s=torch.zeros(2)))
    threads.run_observed({}, [torch.ones(2)], 0, seen)
    threads.close()
    told = {call[1] for call in seen.calls}
    waits = [instruction for p in told if (instruction := plan.instructions[p]).kind == "wait"]
    assert {wait.lane for wait in waits} >= {"gpu:0.copy_in", "gpu:1.copy_in"}
    assert all(wait.lane[:5] != wait.event.lane[:5] for wait in waits)


def test_updates_in_one_call_are_told_one_by_one():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    seen, plan = Seen(), passes.emit(program)
    with Session(plan, program.state) as session:
        dims, shares = session._scatter.split((*example.inputs, *example.targets), {})
        session._executor.run_observed(dims, [*shares, *session._groups.now()], 0, Probes([seen]))
    updates = [p for p in of_kind(plan, "run") if plan.step.ops[plan.instructions[p].op].phase == "update"]
    told = [call for call in seen.calls if call[1] in updates]
    assert len(updates) > 1
    assert [call[:2] for call in told] == [(what, p) for p in updates for what in ("begin", "end")]
    assert [len(call[3]) for call in told if call[0] == "end"] == [2] * len(updates)


def test_an_unobserved_step_calls_nothing():
    plan = forward_plan(TWO_DEVICES, "x", output="c", state={"s": torch.zeros(2)})
    threads = Threads(setting_of(plan, "x", s=torch.zeros(2)))
    assert not any("begin" in thread.source for thread in threads.plain.threads)
    threads.run({}, [torch.ones(2)], 0)
    assert threads.observed is None
    threads.close()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_observed_steps_have_the_same_bits(kind):
    example = models.resnet(dropout=0.3)
    program = captured(example, sgd(example.model.parameters()))
    plan, states = passes.emit(spread(program)), []
    x, y = example.inputs[0], example.targets[0]
    for observed in (False, True):
        name = kind.__name__.lower()
        with Session(plan, program.state, executor=name) as session:
            if observed:
                executor = session._executor
                executor.run = lambda *a, executor=executor: executor.run_observed(*a, Probes([]))
            for rows in (len(x), len(x) - 1):
                session.step(x[:rows], y[:rows])
            states.append(session.state())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("when", ["begin", "end"])
def test_what_a_probe_raises_stops_every_lane(executor, when):
    plan = forward_plan(TWO_DEVICES, "x", output="c", state={"s": torch.zeros(2)})
    seen = Seen()
    stop = RunError("enough")

    def raises(position, *values):
        if plan.instructions[position].kind == "copy":
            raise stop

    setattr(seen, when, raises)
    runs = executor(plan, "x", s=torch.zeros(2))
    with pytest.raises(RunError) as caught:
        runs.run_observed({}, [torch.ones(2)], 0, seen)
    assert caught.value.what == "enough"
    assert caught.value.__cause__ is stop
    assert torch.isfinite(runs.run_observed({}, [torch.ones(2)], 1, Seen())[0]).all()


def test_several_probes_enclose_each_other(executor):
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = aten.neg(x)", "x", output="y")
    calls = []

    class Named:
        def __init__(self, name):
            self.name = name

        def begin(self, position):
            calls.append((self.name, "begin"))

        def end(self, position, reads, makes):
            calls.append((self.name, "end"))

    executor(plan, "x").run_observed({}, [torch.ones(2)], 0, Probes([Named("outer"), Named("inner")]))
    assert calls[:4] == [("outer", "begin"), ("inner", "begin"), ("inner", "end"), ("outer", "end")]
