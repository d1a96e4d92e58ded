"""What a failing step says, and whether its session can go on."""

import threading
import weakref

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.failures.faults import fault, writes_state
from graphir.runtime.kernels.communication import copy
from runnable import captured, copy_by, forward_plan, sgd
from small import two_layers

from graphir import passes
from graphir.errors import RunError, SessionError

EXECUTORS = ["reference", "serial", "threads"]

COUNTED = """
    param table : f32[5,3] @gpu:0
    buffer s : f32[2,3] @gpu:1
    input i : i64[2] @gpu:0
    input d : f32[2,3] @gpu:1
    {first}
    {second}
    a_gpu_1 : f32[2,3] @gpu:1 = Copy(a)
    c : f32[2,3] @gpu:1 = aten.add.Tensor(a_gpu_1, s;1)
"""
LOOKUP = "a : f32[2,3] @gpu:0 = aten.embedding(table, i)"
COUNT = "s;1 = aten.add_.Tensor(s, d) {writes=[0:0]}"
STATE = {"table": torch.arange(15.0).view(5, 3), "s": torch.zeros(2, 3)}
GOOD, BAD, D = torch.tensor([1, 2]), torch.tensor([1, 99]), torch.ones(2, 3)


def counted(first, second):
    return forward_plan(COUNTED.format(first=first, second=second), "i", "d", output="c", state=STATE)


# -- whether the session can go on


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_session_whose_state_was_not_written_goes_on(executor):
    plan = forward_plan(
        """
        param table : f32[5,3] @gpu:0
        input i : i64[2] @gpu:0
        a : f32[2,3] @gpu:0 = aten.embedding(table, i)
        table;1 = aten.add_.Tensor(table, table) {writes=[0:0]}
        """,
        "i",
        output="a",
        state={"table": STATE["table"]},
    )
    with Session(plan, {"table": STATE["table"]}, executor=executor) as session:
        with pytest.raises(RunError, match="fix  no state was written: the session can go on") as caught:
            session.step(BAD)
        assert caught.value.usable
        assert session.usable
        assert session.steps_done == 0
        assert torch.equal(session.step(GOOD), STATE["table"][GOOD])
        assert torch.equal(session.state_dict()["table"], 2 * STATE["table"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_session_whose_state_was_written_is_unusable(executor):
    plan = forward_plan(
        """
        param table : f32[5,3] @gpu:0
        input i : i64[2] @gpu:0
        table;1 = aten.add_.Tensor(table, table) {writes=[0:0]}
        a : f32[2,3] @gpu:0 = aten.embedding(table;1, i)
        """,
        "i",
        output="a",
        state={"table": STATE["table"]},
    )
    with Session(plan, {"table": STATE["table"]}, executor=executor) as session:
        with pytest.raises(RunError, match="fix  the session is unusable now: make a new one") as caught:
            session.step(BAD)
        assert not caught.value.usable
        assert not session.usable
        for use in (lambda: session.step(GOOD), session.state_dict, lambda: session.load_state_dict(STATE)):
            with pytest.raises(
                SessionError, match=r"unusable: step 0 failed \(aten.embedding.default failed: IndexError"
            ):
                use()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_operator_that_fails_while_it_writes_state_leaves_it_unusable(executor):
    plan = forward_plan(
        """
        buffer s : f32[3] @gpu:0
        input i : i64[2] @gpu:0
        input d : f32[2] @gpu:0
        s;1 = aten.index_add_(s, i, d, dim=0) {writes=[0:0]}
        """,
        "i",
        "d",
        output="s",
        state={"s": torch.zeros(3)},
    )
    with Session(plan, {"s": torch.zeros(3)}, executor=executor) as session:
        with pytest.raises(RunError):
            session.step(BAD, torch.ones(2))
        assert not session.usable


def test_what_other_lanes_wrote_before_they_stopped_counts(monkeypatch):
    wrote = threading.Event()

    def failing_once_written(source, device):
        if source.shape == (2,):
            assert wrote.wait(10)
            raise ValueError("no copy")
        wrote.set()
        return copy(source, device)

    copy_by(monkeypatch, failing_once_written)
    plan = forward_plan(
        """
        buffer s : f32[3] @gpu:1
        input i : f32[2] @gpu:0
        input d : f32[3] @gpu:1
        a : f32[2] @gpu:0 = Copy(i)
        s;1 = aten.add_.Tensor(s, d) {writes=[0:0]}
        b : f32[3] @gpu:1 = Copy(s;1)
        """,
        "i",
        "d",
        output="a",
        state={"s": torch.zeros(3)},
    )
    with Session(plan, {"s": torch.zeros(3)}, executor="threads") as session:
        with pytest.raises(RunError, match="Copy failed: ValueError: no copy") as caught:
            session.step(torch.ones(2), torch.ones(3))
        assert not caught.value.usable


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_stopped_lanes_had_yet_to_write_does_not_count(executor):
    state = {"table": STATE["table"], "s": torch.zeros(2, 3)}
    plan = forward_plan(
        """
        param table : f32[5,3] @gpu:0
        buffer s : f32[2,3] @gpu:1
        input i : i64[2] @gpu:0
        a : f32[2,3] @gpu:0 = aten.embedding(table, i)
        a_gpu_1 : f32[2,3] @gpu:1 = Copy(a)
        s;1 = aten.add_.Tensor(s, a_gpu_1) {writes=[0:0]}
        """,
        "i",
        output="a",
        state=state,
    )
    with Session(plan, state, executor=executor) as session:
        with pytest.raises(RunError):
            session.step(BAD)
        assert session.usable
        session.step(GOOD)
        assert torch.equal(session.state_dict()["s"], STATE["table"][GOOD])


@pytest.mark.parametrize(("first", "second", "usable"), [(LOOKUP, COUNT, True), (COUNT, LOOKUP, False)])
def test_the_reference_stops_at_the_failure_in_issue_order(first, second, usable):
    with Session(counted(first, second), STATE, executor="reference") as session:
        with pytest.raises(RunError):
            session.step(BAD, D)
        assert session.usable is usable


def test_only_what_overwrites_state_writes_it():
    plan = passes.emit(two_layers())
    written = [i for i in plan.instructions if writes_state(plan, i)]
    assert [plan.step.ops[i.op].type for i in written] == ["graphir.sgd"] * 2


def test_a_closed_session_is_not_usable():
    session = Session(counted(LOOKUP, COUNT), STATE)
    assert session.usable
    session.close()
    assert not session.usable


# -- what is said


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_line_of_a_failing_operator_is_named(executor):
    example = models.gpt()
    program = captured(example, sgd(example.model.parameters()))
    x = example.inputs[0].clone()
    x[0, 0] = 10_000
    with Session(passes.emit(program), program.state, executor=executor) as session:
        with pytest.raises(RunError, match=r"in   module '\w+', line models\.py:\d+, plan 'gpt', step 0, lane gpu:0\."):
            session.step(x, *example.targets)
        session.step(*example.inputs, *example.targets)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_caught_error_holds_no_tensor_of_the_step(executor, monkeypatch):
    made = []

    def noting_copy(source, device):
        made.append(weakref.ref(result := copy(source, device)))
        return result

    monkeypatch.setattr("graphir.runtime.kernels.invoke.copy", noting_copy)
    copy_by(monkeypatch, noting_copy)
    plan = forward_plan(
        """
        param table : f32[5,3] @gpu:0
        input i : i64[2] @gpu:0
        j : i64[2] @gpu:0 = Copy(i)
        a : f32[2,3] @gpu:0 = aten.embedding(table, j)
        """,
        "i",
        output="a",
        state={"table": STATE["table"]},
    )
    with Session(plan, {"table": STATE["table"]}, executor=executor) as session:
        with pytest.raises(RunError) as caught:
            session.step(BAD)
        assert len(made) == 1
        assert made[0]() is None
        assert isinstance(caught.value.__cause__, IndexError)


# -- memory that runs out

TOO_LARGE = """
    param w : f32[1000] @gpu:0
    input x : f32[1000] @gpu:0
    relu : f32[1000] @gpu:0 = aten.relu(x)
    fc : f32[1000] @gpu:0 = aten.mul.Tensor(relu, w)
    one : f32[1] in fc @gpu:0 = aten.slice.Tensor(fc, dim=0, start=0, end=1)
    all : f32[70368744177664] strides [0] in fc @gpu:0 = aten.expand(one, size=[70368744177664])
    big : f32[70368744177664] @gpu:0 = aten.neg(all)
"""
"""256 TiB, more than any process can address."""


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_is_live_is_said_where_memory_runs_out(executor):
    state = {"w": torch.ones(1000)}
    plan = forward_plan(TOO_LARGE, "x", output="fc", state=state)
    with Session(plan, state, executor=executor, memory_limit=None) as session:
        with pytest.raises(RunError) as caught:
            session.step(torch.ones(1000))
        assert session.usable
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("aten.neg.default ran out of memory: RuntimeError: [enforce fail at alloc_cpu.cpp:")
    assert lines == [
        "  at   big : f32[70368744177664] @gpu:0 = aten.neg(all)",
        "  in   module 'big', plan 'small', step 0, lane gpu:0.compute",
        "  live 256.0 TiB on cpu (gpu:0), 256.0 TiB of it for what this operator makes; the step's peak there: "
        "256.0 TiB (predicted)",
        "       activations 256.0 TiB: big 256.0 TiB, fc 3.9 KiB",
        "       parameters 3.9 KiB: w 3.9 KiB",
        "       inputs 3.9 KiB: x 3.9 KiB",
        "  fix  give a smaller batch; no state was written: the session can go on with other arguments",
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "aten.mm.default ran out of memory: MemoryError"),
        (
            torch.OutOfMemoryError("CUDA out of memory.\nmore"),
            "ran out of memory: OutOfMemoryError: CUDA out of memory.",
        ),
        (
            RuntimeError("x: DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
            "ran out of memory",
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nmore"), "ran out of memory: AcceleratorError: CUDA error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "aten.mm.default failed: RuntimeError: mat1"),
        (ValueError("can't allocate memory"), "aten.mm.default failed: ValueError"),
    ],
    ids=["MemoryError", "CUDA", "host of another system", "page-locked", "RuntimeError", "ValueError"],
)
def test_memory_that_runs_out_is_told_from_other_failures(error, said):
    plan = passes.emit(two_layers())
    instruction = next(
        i for i in plan.instructions if i.kind == "run" and plan.step.ops[i.op].type == "aten.mm.default"
    )
    text = str(fault(plan, instruction, 0, error))
    assert said in text
    assert ("\n  live " in text) == ("ran out of memory" in said)


def test_the_bytes_are_those_of_the_steps_own_sizes():
    example = models.mlp()
    plan = passes.emit(captured(example, sgd(example.model.parameters())))
    backward = next(i for i in plan.instructions if i.kind == "run" and plan.step.ops[i.op].phase == "backward")

    def activations(**dims):
        live = fault(plan, backward, 0, MemoryError(), dims=dims).live
        return next(line for line in live.splitlines() if "activations" in line)

    assert activations() == activations(**plan.dims)
    assert activations() != activations(batch=64)


def test_devices_that_share_a_memory_are_counted_together():
    example = models.mlp()
    plan = passes.emit(passes.replicate(captured(example, sgd(example.model.parameters())), devices=[0, 1]))
    backward = next(i for i in plan.instructions if i.kind == "run" and plan.step.ops[i.op].phase == "backward")
    shared = {device: torch.device("cuda:0") for device in plan.devices}
    apart = {device: torch.device("cuda", i) for i, device in enumerate(plan.devices)}
    assert "on cuda:0 (gpu:0, gpu:1" in fault(plan, backward, 0, MemoryError(), binding=shared).live
    assert "on cuda:0 (gpu:0), 4 B" in fault(plan, backward, 0, MemoryError(), binding=apart).live


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12 bytes")
LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")


def refuse(error):
    def call(*args, **kwargs):
        raise error

    return call


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    ("at", "error", "usable"),
    [
        ("graphir.runtime.interface.scatter._cut", FULL, {False: True, True: True}),
        ("graphir.runtime.interface.scatter._cut", LOST, {False: False, True: False}),
        ("graphir.runtime.interface.gather.Gather.mean", FULL, {False: True, True: False}),
        ("graphir.runtime.interface.gather.Gather.mean", LOST, {False: False, True: False}),
    ],
)
def test_a_device_that_fails_beside_the_plan(at, error, usable, trains, monkeypatch):
    """Where a batch is brought to its devices, and where results are handed back."""
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()) if trains else None)
    with Session(passes.emit(program), program.state) as session:
        session.step(*example.inputs, *example.targets)
        with monkeypatch.context() as patch:
            patch.setattr(at, refuse(error))
            with pytest.raises(RunError, match=f"a step failed: {type(error).__name__}: CUDA (.|\n)*step 1") as failed:
                session.step(*example.inputs, *example.targets)
        assert failed.value.usable == session.usable == usable[trains]
        assert ("new process" in str(failed.value)) == (error is LOST)
        if session.usable:
            session.step(*example.inputs, *example.targets)
        else:
            with pytest.raises(SessionError, match="unusable: step 1 failed"):
                session.step(*example.inputs, *example.targets)


def test_a_device_that_is_lost_when_state_is_read(monkeypatch):
    example = models.mlp()
    program = captured(example)
    with Session(passes.emit(program), program.state) as session:
        monkeypatch.setattr("graphir.runtime.state.State.module", refuse(LOST))
        with pytest.raises(RunError, match=r"AcceleratorError(.|\n)*new process"):
            session.state_dict()
        assert not session.usable
