"""The executor that runs a plan in a thread for each logical device."""

import _thread
import gc
import threading
import time

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.kernels.communication import copy
from runnable import captured, copy_by, forward_plan, sgd, spread, threads_of_sessions

from graphir import passes
from graphir.errors import RunError, SessionError

TWO_DEVICES = """
    param table : f32[5,3] @gpu:0
    input i : i64[2] @gpu:0
    input d : f32[2,3] @gpu:1
    a : f32[2,3] @gpu:0 = aten.embedding(table, i)
    a_gpu_1 : f32[2,3] @gpu:1 = Copy(a)
    b : f32[2,3] @gpu:1 = aten.add.Tensor(a_gpu_1, d)
    b_gpu_0 : f32[2,3] @gpu:0 = Copy(b)
    c : f32[2,3] @gpu:0 = aten.neg(b_gpu_0)
"""
STATE = {"table": torch.arange(15.0).view(5, 3)}
GOOD, BAD = torch.tensor([1, 2]), torch.tensor([1, 99])


@pytest.fixture
def two():
    with Session(forward_plan(TWO_DEVICES, "i", "d", output="c", state=STATE), STATE, executor="threads") as session:
        yield session


def test_values_cross_between_threads(two):
    for k in range(100):
        d = torch.full((2, 3), float(k))
        assert torch.equal(two.step(GOOD, d), -(STATE["table"][GOOD] + d))


def test_a_plan_of_one_device_makes_no_thread():
    before = len(threads_of_sessions())
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = aten.neg(x)", "x", output="y")
    with Session(plan, {}, executor="threads") as session:
        assert session.executor == "serial"
        assert session.step(torch.ones(2)).tolist() == [-1, -1]
        assert len(threads_of_sessions()) == before


def test_threads_end_with_the_session(two):
    assert len(threads_of_sessions()) >= 2
    two.close()
    gc.collect()
    assert threads_of_sessions() == []


def test_threads_end_with_a_session_that_nobody_closed():
    session = Session(forward_plan(TWO_DEVICES, "i", "d", output="c", state=STATE), STATE, executor="threads")
    threads = threads_of_sessions()
    assert threads
    del session
    gc.collect()
    for thread in threads:  # they are told to end, and nobody waits for them
        thread.join(10)
    assert threads_of_sessions() == []


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_a_failing_operator_stops_every_lane_and_is_named(executor):
    plan = forward_plan(TWO_DEVICES, "i", "d", output="c", state=STATE)
    with Session(plan, STATE, executor=executor) as session:
        with pytest.raises(RunError) as caught:
            session.step(BAD, torch.zeros(2, 3))
        assert str(caught.value).splitlines()[:3] == [
            "aten.embedding.default failed: IndexError: index out of range in self",
            "  at   a : f32[2,3] @gpu:0 = aten.embedding(table, i)",
            "  in   module 'a', plan 'small', step 0, lane gpu:0.compute",
        ]
        assert isinstance(caught.value.__cause__, IndexError)


def test_a_lane_that_waits_for_a_failed_one_executes_nothing_more(monkeypatch):
    copied = []
    copy_by(monkeypatch, lambda *args: copied.append(args))
    with Session(forward_plan(TWO_DEVICES, "i", "d", output="c", state=STATE), STATE, executor="threads") as session:
        with pytest.raises(RunError):
            session.step(BAD, torch.zeros(2, 3))
        assert copied == []


def test_the_executor_is_whole_after_a_failure(two):
    for _ in range(5):
        with pytest.raises(RunError):
            two.step(BAD, torch.zeros(2, 3))
        assert torch.equal(two.step(GOOD, torch.zeros(2, 3)), -STATE["table"][GOOD])


def test_the_module_of_a_failing_operator_is_named():
    example = models.gpt()
    program = captured(example, sgd(example.model.parameters()))
    x, y = example.inputs[0].clone(), example.targets[0]
    x[0, 0] = 10_000
    with Session(passes.emit(program), program.state) as session, pytest.raises(RunError, match=r"in   module '\w+"):
        session.step(x, y)


SLOW = """
    input x : f32[1500,1500] @gpu:0
    z : f32[1500,1500] @gpu:0 = aten.mm(x, x)
    z_gpu_1 : f32[1500,1500] @gpu:1 = Copy(z)
    y : f32[1500,1500] @gpu:1 = aten.mm(z_gpu_1, z_gpu_1)
    y_gpu_0 : f32[1500,1500] @gpu:0 = Copy(y)
    w : f32[1500,1500] @gpu:0 = aten.mm(y_gpu_0, y_gpu_0)
"""


@pytest.mark.parametrize("delay", [0.0, 0.01, 0.05])
def test_an_interrupt_stops_all_lanes(delay):
    x = torch.zeros(1500, 1500)
    with Session(forward_plan(SLOW, "x", output="w"), {}, executor="threads") as session:
        timer = threading.Thread(target=lambda: (time.sleep(delay), _thread.interrupt_main()))
        with pytest.raises(KeyboardInterrupt):  # it may come before, in or after a step
            timer.start()
            for _ in range(1000):
                session.step(x)
        timer.join()
        if delay:
            with pytest.raises(SessionError, match=r"unusable: step \d+ failed \(KeyboardInterrupt\)"):
                session.step(x)
        session._progress.broken = ""
        assert not session.step(x).any()


def test_sizes_may_alternate():
    program = nets.random_program(3)
    with Session(passes.emit(spread(program)), program.state, executor="threads") as session:
        for batch in (6, 7, 6, 20, 7, 6):
            session.step(*nets.example_inputs(program, batch=batch))
        assert session.steps_done == 6


@pytest.mark.parametrize(("devices", "executor"), [(1, "serial"), (2, "serial"), (2, "threads")])
def test_a_kernels_threads_are_those_asked_for(devices, executor, monkeypatch):
    mine, seen = torch.get_num_threads(), []
    other = 1 if mine > 1 else 2

    def noting_copy(source, device):
        seen.append(torch.get_num_threads())
        return copy(source, device)

    copy_by(monkeypatch, noting_copy)
    body = TWO_DEVICES if devices == 2 else TWO_DEVICES.replace("gpu:1", "gpu:0")
    plan = forward_plan(body, "i", "d", output="c", state=STATE)
    for threads, expected in ((None, mine), (other, other)):
        with Session(plan, STATE, executor=executor, threads=threads) as session:
            session.step(GOOD, torch.zeros(2, 3))
        assert set(seen) == {expected}
        assert torch.get_num_threads() == mine
        seen.clear()


SUM = """
    input x : f32[100003] @gpu:{0}
    x_there : f32[100003] @gpu:{1} = Copy(x)
    y : f32[] @gpu:{1} = aten.sum(x_there)
    y_back : f32[] @gpu:{0} = Copy(y)
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_of_a_kernel_depend_on_its_threads_and_not_on_devices(threads):
    x = torch.randn(100003, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    expected = x.sum()
    torch.set_num_threads(before)
    for there, executor in ((0, "reference"), (0, "serial"), (1, "serial"), (1, "threads")):
        plan = forward_plan(SUM.format(0, there), "x", output="y_back")
        with Session(plan, {}, executor=executor, threads=threads) as session:
            assert torch.equal(session.step(x), expected)
