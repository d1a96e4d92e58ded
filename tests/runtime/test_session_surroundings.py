"""What surrounds a step does not change its bits: autocast, modes, thread numbers; other threads and processes."""

import os
import threading

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import captured, forward_plan, sgd, spread
from torch.overrides import TorchFunctionMode

from graphir import passes
from graphir.errors import SessionError


class Passing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function mode": Passing,
    "meta device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
@pytest.mark.parametrize("change", [lambda p: p, spread], ids=["one device", "four devices"])
@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_a_callers_context_changes_no_bit(context, change, executor):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(change(program))

    def losses():
        with Session(plan, program.state, executor=executor) as session:
            return [session.step(*example.inputs, *example.targets) for _ in range(2)]

    expected = losses()
    with context():
        assert all(torch.equal(a, b) for a, b in zip(losses(), expected, strict=True))


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_a_kernels_threads_are_those_of_the_sessions_making(executor, monkeypatch):
    mine, seen = torch.get_num_threads(), []
    other = 1 if mine > 1 else 2
    module = "codegen" if executor == "threads" else "reference"
    monkeypatch.setattr(f"graphir.runtime.{module}.copy", lambda t, d: (seen.append(torch.get_num_threads()), t)[1])
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = Copy(x)", "x", output="y")
    with Session(plan, {}, executor=executor) as a, Session(plan, {}, executor=executor, threads=other) as b:
        b.step(torch.ones(2))
        try:
            torch.set_num_threads(other)
            a.step(torch.ones(2))
            assert torch.get_num_threads() == other
        finally:
            torch.set_num_threads(mine)
    assert seen == [other, mine]


def test_an_offset_into_a_storage_counts_where_a_step_counts_it():
    plan = forward_plan(
        "input x : f32[2] @gpu:0\n"
        "v : f32[2] in x @gpu:0 = aten.as_strided(x, size=[2], stride=[1], storage_offset=0) {views=[0:0]}\n"
        "y : f32[2] @gpu:0 = aten.neg(v)",
        "x",
        output="y",
    )
    x = torch.arange(4.0)
    with Session(plan, {}) as session:
        assert session.step(x[:2]).tolist() == [0, -1]
        assert session.step(x[2:]).tolist() == [-2, -3]


def test_a_meta_tensor_is_refused_in_a_warm_session():
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = aten.neg(x)", "x", output="y")
    with Session(plan, {}) as session:
        session.step(torch.ones(2))
        with pytest.raises(SessionError, match="is on meta, so it has no data"):
            session.step(torch.ones(2, device="meta"))
        assert session.step(torch.ones(2)).tolist() == [-1, -1]


def test_a_step_in_another_thread_is_refused_meanwhile(monkeypatch):
    inside, leave = threading.Event(), threading.Event()
    monkeypatch.setattr("graphir.runtime.codegen.copy", lambda t, d: (inside.set(), leave.wait(10), t)[2])
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = Copy(x)", "x", output="y")
    with Session(plan, {}) as session:
        other = threading.Thread(target=session.step, args=(torch.ones(2),))
        other.start()
        inside.wait(10)
        try:
            with pytest.raises(SessionError, match=r"another thread is in a step(.|\n)*one Session for each thread"):
                session.step(torch.ones(2))
        finally:
            leave.set()
            other.join()
        assert session.steps_done == 1
        session.step(torch.ones(2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_in_a_forked_child_is_refused():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    with Session(passes.emit(spread(program)), program.state) as session:
        session.step(*example.inputs, *example.targets)
        child = os.fork()
        if child == 0:
            try:
                session.step(*example.inputs, *example.targets)
            except SessionError as e:
                os._exit(7 if "before this process was forked" in str(e) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        session.step(*example.inputs, *example.targets)


def test_a_thread_that_cannot_start_is_reported(monkeypatch):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan, before = passes.emit(spread(program)), threading.active_count()

    def failing(number):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("no more")

    monkeypatch.setattr(torch, "set_num_threads", failing)
    with pytest.raises(SessionError, match="threads cannot be started: RuntimeError: no more"):
        Session(plan, program.state)
    assert threading.active_count() == before
