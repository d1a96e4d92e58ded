"""What surrounds a step does not change its bits: autocast, modes, thread numbers; other threads and processes."""

import copy
import os
import pickle
import signal
import threading
import time

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.executors import threads
from processes import output_of
from runnable import captured, copy_by, forward_plan, sgd, spread
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


@pytest.mark.parametrize("context", [torch.autograd.detect_anomaly, CONTEXTS["meta device"]], ids=["anomalies", "meta"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_a_callers_context_changes_no_capture(context):
    example = models.mlp()
    expected = captured(example, sgd(example.model.parameters()))
    with context():
        program = captured(example, sgd(example.model.parameters()))
        assert torch.is_anomaly_enabled() is (context is torch.autograd.detect_anomaly)
    assert program == expected
    Session(passes.emit(program), program.state).close()


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_a_kernels_threads_are_those_of_the_sessions_making(executor, monkeypatch):
    mine, seen = torch.get_num_threads(), []
    other = 1 if mine > 1 else 2
    module = "codegen.statements" if executor == "threads" else "kernels.invoke"
    monkeypatch.setattr(
        f"graphir.runtime.{module}.copy", lambda t, d: (seen.append(torch.get_num_threads()), t.clone())[1]
    )
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
    copy_by(monkeypatch, lambda t, d: (inside.set(), leave.wait(10), t)[2])
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
    with Session(passes.emit(spread(program)), program.state, executor="threads") as session:
        session.step(*example.inputs, *example.targets)
        child = os.fork()
        if child == 0:
            try:
                session.step(*example.inputs, *example.targets)
            except SessionError as e:
                os._exit(7 if "before this process was forked" in str(e) else 8)
            finally:
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

    monkeypatch.setattr(threads, "set_threads", failing)
    with pytest.raises(SessionError, match="threads cannot be started: RuntimeError: no more"):
        Session(plan, program.state, executor="threads")
    assert threading.active_count() == before


def test_an_interrupt_while_threads_start_ends_those_that_were_started(monkeypatch):
    plan, before, begun = passes.emit(spread(nets.random_program(1))), threading.active_count(), threading.Thread.start

    def interrupted(thread):
        begun(thread)
        if thread.name == "graphir-1":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Session(plan, nets.random_program(1).state, executor="threads")
    assert threading.active_count() == before


def test_an_interrupt_while_a_session_is_closed_leaves_it_closed_and_no_thread(monkeypatch):
    plan, before, given = passes.emit(spread(nets.random_program(1))), threading.active_count(), threads._release
    left = [KeyboardInterrupt]

    def interrupted(lock):
        if left:
            raise left.pop()
        given(lock)

    session = Session(plan, nets.random_program(1).state, executor="threads")
    monkeypatch.setattr(threads, "_release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert threading.active_count() == before
    assert not session.usable
    with pytest.raises(SessionError, match="the session is closed"):
        session.step()


# -- threads, processes and copies of a session

ADDING = """
    buffer s : f32[2] @gpu:0
    input x : f32[2] @gpu:0
    y : f32[2] @gpu:0 = Copy(x)
    s;1 = aten.add_.Tensor(s, y) {writes=[0:0]}
"""


def adding(**options):
    state = {"s": torch.zeros(2)}
    return Session(forward_plan(ADDING, "x", output="y", state=state), state, **options)


@pytest.fixture
def during(monkeypatch):
    """Within a step, calls what is in the list."""
    calls = []

    def calling(source, device):
        while calls:
            calls.pop()()
        return source.clone()

    copy_by(monkeypatch, calling)
    return calls


USES = {
    "state_dict": lambda session: session.state_dict(),
    "optimizer_state_dict": lambda session: session.optimizer_state_dict(),
    "loss_scaler_state_dict": lambda session: session.loss_scaler_state_dict(),
    "state": lambda session: session.state(),
    "gradients": lambda session: session.gradients(),
    "load_state_dict": lambda session: session.load_state_dict({"s": torch.ones(2)}),
    "step": lambda session: session.step(torch.ones(2)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_state_is_not_used_during_a_step_of_another_thread(use, during):
    refused = []

    def in_another_thread():
        def trying():
            with pytest.raises(SessionError, match="another thread is in a step"):
                use(session)
            refused.append(True)

        thread = threading.Thread(target=trying)
        thread.start()
        thread.join(20)

    with adding() as session:
        during.append(in_another_thread)
        session.step(torch.ones(2))
        assert refused
        assert session.usable
        assert session.state()["s"].tolist() == [1, 1]


@pytest.mark.parametrize("use", [*USES.values(), Session.close], ids=[*USES, "close"])
def test_a_session_is_not_used_from_within_its_own_step(use, during):
    refused = []

    def trying():
        with pytest.raises(SessionError, match=r"this thread is in a step of this session already"):
            use(session)
        refused.append(True)

    with adding(executor="serial") as session:
        during.append(trying)
        session.step(torch.ones(2))
        assert refused
        assert session.state()["s"].tolist() == [1, 1]
        session.step(torch.ones(2))


class Slow(dict):
    """A state whose reading takes as long as somebody else says."""

    def __init__(self, state):
        super().__init__(state)
        self.reading, self.leave = threading.Event(), threading.Event()

    def __getitem__(self, name):
        self.reading.set()
        self.leave.wait(20)
        return super().__getitem__(name)


def test_a_step_while_another_thread_uses_the_state_says_so():
    """The thread that stepped last was told that it was in a step."""
    with adding(executor="serial") as session:
        session.step(torch.ones(2))
        given = Slow({"s": torch.ones(2)})
        other = threading.Thread(target=session.load_state_dict, args=(given,))
        other.start()
        assert given.reading.wait(20)
        try:
            with pytest.raises(
                SessionError, match=r"another thread is reading or overwriting the state of this session"
            ):
                session.step(torch.ones(2))
        finally:
            given.leave.set()
            other.join(20)
        assert session.step(torch.ones(2)).tolist() == [1, 1]
        assert session.state()["s"].tolist() == [2, 2]


def test_a_step_within_a_use_of_the_state_says_so():
    class Stepping(Slow):
        def __getitem__(self, name):
            with pytest.raises(
                SessionError, match=r"this thread is reading or overwriting the state of this session al"
            ):
                session.step(torch.ones(2))
            return dict.__getitem__(self, name)

    with adding(executor="serial") as session:
        session.load_state_dict(Stepping({"s": torch.ones(2)}))
        assert session.step(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_closing_waits_for_the_step_of_another_thread(executor, during):
    inside, results = threading.Event(), []

    def taking_its_time():
        inside.set()
        time.sleep(0.2)

    session = adding(executor=executor)
    during.append(taking_its_time)
    other = threading.Thread(target=lambda: results.append(session.step(torch.ones(2))))
    other.start()
    assert inside.wait(20)
    session.close()
    assert session.steps_done == 1
    other.join(20)
    assert results[0].tolist() == [1, 1]
    with pytest.raises(SessionError, match="the session is closed"):
        session.step(torch.ones(2))


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_steps_from_many_threads_are_done_whole_or_refused(executor):
    done = []

    def stepping(session):
        for _ in range(50):
            try:
                done.append(session.step(torch.ones(2)))
            except SessionError as e:
                assert "another thread is in a step" in str(e)  # refused or done, either may happen

    with adding(executor=executor) as session:
        threads = [threading.Thread(target=stepping, args=(session,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert session.steps_done == len(done) > 0
        assert session.state()["s"].tolist() == [len(done)] * 2


COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_session_cannot_be_copied_or_pickled(copied):
    with adding() as session:
        with pytest.raises(
            SessionError, match=r"cannot be copied or pickled(.|\n)*Session\(session\.plan, session\.state"
        ):
            copied(session)
        with Session(session.plan, session.state()) as another:
            assert another.state().keys() == session.state().keys()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_session_can_be_closed_in_a_child_forked_during_a_step(during):
    inside, leave = threading.Event(), threading.Event()
    during.append(lambda: (inside.set(), leave.wait(20)))
    with adding(executor="threads") as session:
        other = threading.Thread(target=session.step, args=(torch.ones(2),))
        other.start()
        assert inside.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                session.close()
                os._exit(7 if not session.usable else 8)
            finally:
                os._exit(9)
        leave.set()
        other.join(20)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert session.usable


EXIT = """
def interrupting(source, device):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return source.clone()

for executor in ("serial", "threads"):
    statements.copy = interrupting
    with session_of(executor=executor) as made:
        try:
            made.step(X)
        except KeyboardInterrupt:
            print(executor, made.usable, made.steps_done)

# At the exit: threads that nobody ended, and a step that nobody waits for.
inside = threading.Event()
statements.copy = lambda source, device: (inside.set(), time.sleep(60))
threads._GRACE_SECONDS = session._EXIT_SECONDS = 0.2
idle, busy = session_of(), session_of()
threading.Thread(target=busy.step, args=(X,), daemon=True).start()
print(inside.wait(20))
"""


def test_ctrl_c_stops_every_thread_and_sessions_that_nobody_closed_do_not_keep_a_process():
    assert output_of(EXIT) == ["serial False 0", "threads False 0", "True"]
