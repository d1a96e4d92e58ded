"""Threads that cannot go on: they are noticed, and everything stops."""

import _thread
import ctypes
import gc
import re
import threading
import time
import weakref

import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.codegen.handoffs import Handoffs, handoffs
from graphir.runtime.executors import threads
from graphir.runtime.failures.watch import Watch
from graphir.runtime.kernels.communication import copy
from runnable import copy_by, forward_plan, threads_of_sessions

from graphir.errors import RunError, SessionError

BODY = """
    param w : f32[3] @gpu:0
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.add.Tensor(x, w)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    b : f32[3] @gpu:1 = aten.neg(a_gpu_1)
    b_gpu_0 : f32[3] @gpu:0 = Copy(b)
    c : f32[3] @gpu:0 = aten.neg(b_gpu_0)
    c_gpu_1 : f32[3] @gpu:1 = Copy(c)
    d : f32[3] @gpu:1 = aten.neg(c_gpu_1)
"""
STATE, X = {"w": torch.zeros(3)}, torch.ones(3)


def session_of(**options):
    plan = forward_plan(BODY, "x", output="d", state=STATE)
    return Session(plan, STATE, executor="threads", **options)


def unusable(session):
    with pytest.raises(SessionError, match="the session is unusable: step 0 failed"):
        session.step(X)
    return not session.usable


def circle(plan, thread):
    """The hand-offs of a plan, but gpu:0 gives the first one together with its last one."""
    found = handoffs(plan, thread)
    given = dict(found.given)
    given[max(given)] += given.pop(min(given))
    return Handoffs(found.total, given, found.taken)


@pytest.mark.parametrize("observed", [False, True])
def test_lanes_that_wait_for_each_other_are_noticed_at_once(observed, monkeypatch):
    monkeypatch.setattr("graphir.runtime.executors.threads.handoffs", circle)
    with session_of(deadline=None, check_finite=observed) as session:
        with pytest.raises(RunError) as caught:
            session.step(X)
        assert unusable(session)
    lines = str(caught.value).splitlines()
    assert lines[0] == "a deadlock: lanes wait for each other"
    assert re.fullmatch(
        r"  at   \d+ gpu:0.copy_in: wait b by gpu:1.compute, whose record \(\d+\) is still to come", lines[1]
    )
    assert re.fullmatch(
        r"       \d+ gpu:1.copy_in: wait a by gpu:0.compute, whose record \(\d+\) is still to come", lines[2]
    )
    assert lines[3] == "  in   plan 'small', step 0"
    assert lines[4].startswith("  fix  emit the plan again; the session is unusable now")
    assert threads_of_sessions() == []


def test_an_event_that_got_lost_is_noticed_at_the_deadline(monkeypatch):
    events = threads._Team.events

    def without_the_first(team):
        give, take = events(team)
        return [lambda: None, *give[1:]], take

    monkeypatch.setattr(threads._Team, "events", without_the_first)
    with session_of(deadline=0.2) as session:
        with pytest.raises(RunError, match=r"no lane has moved for 0\.2 s") as caught:
            session.step(X)
        assert unusable(session)
    assert "gpu:1.copy_in: wait a by gpu:0.compute, whose record (1) was made" in caught.value.at
    assert "give a larger deadline, or None" in caught.value.fix


def test_an_operator_that_takes_long_is_no_deadlock(monkeypatch):
    def slow(source, device):
        time.sleep(0.3)
        return copy(source, device)

    copy_by(monkeypatch, slow)
    with session_of(deadline=30) as session:
        assert torch.equal(session.step(X), -X)
    with session_of(deadline=None) as session:
        assert torch.equal(session.step(X), -X)


@pytest.fixture
def blocked(monkeypatch):
    """Copies block until the event is set; nobody waits for them longer than a moment."""
    leave = threading.Event()

    def blocking(source, device):
        leave.wait(20)
        return copy(source, device)

    copy_by(monkeypatch, blocking)
    monkeypatch.setattr("graphir.runtime.executors.threads._GRACE_SECONDS", 0.1)
    yield leave
    leave.set()
    for thread in threads_of_sessions():
        thread.join(20)


def test_an_operator_that_hangs_is_given_up_at_the_deadline(blocked):
    with session_of(deadline=0.2) as session:
        with pytest.raises(RunError, match=r"no lane has moved for 0\.2 s") as caught:
            session.step(X)
        assert unusable(session)
    assert "gpu:1.copy_in: copy a_gpu_1 : f32[3] @gpu:1 <- a, in wait (threading.py:" in caught.value.at
    assert re.search(r"gpu:0.\w+: wait .*, whose record \(\d+\) is still to come", caught.value.at)
    blocked.set()
    for thread in threads_of_sessions():
        thread.join(20)
    assert threads_of_sessions() == []


def test_ctrl_c_does_not_wait_for_an_operator_that_hangs(blocked):
    with session_of() as session:
        timer = threading.Timer(0.2, _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # outside it would end the run of the tests
            timer.start()
            session.step(X)
        timer.join()
        assert unusable(session)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_an_exception_that_ends_threads_is_reported(error, monkeypatch):
    def ending(source, device):
        raise error

    copy_by(monkeypatch, ending)
    with session_of() as session:
        with pytest.raises(RunError, match=f"Copy failed: {type(error).__name__}") as caught:
            session.step(X)
        assert caught.value.__cause__ is error
        assert len(threads_of_sessions()) == 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_thread_that_was_killed_is_reported(index):
    with session_of() as session:
        session.step(X)
        thread = next(t for t in threads_of_sessions() if t.name == f"graphir-{index}")
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        with pytest.raises(RunError, match=rf"the thread of gpu:{index}\.compute, .* has died: SystemExit") as caught:
            session.step(X)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert not session.usable
    assert threads_of_sessions() == []


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_what_is_no_deadline_is_refused(deadline):
    with pytest.raises(SessionError, match=r"deadline=.*: seconds, more than 0(.|\n)*None for no limit"):
        session_of(deadline=deadline)


def test_looking_at_a_thread_keeps_nothing_that_it_holds(monkeypatch):
    held = []

    def slow(source, device):
        made = source.clone()
        held.append(weakref.ref(made))
        time.sleep(0.12)  # longer than the caller waits before it looks
        return made.clone()

    copy_by(monkeypatch, slow)
    looked = []
    monkeypatch.setattr(Watch, "look", lambda watch, threads, look=Watch.look: looked.append(look(watch, threads)))
    gc.disable()
    try:
        with session_of() as session:
            session.step(X)
            assert looked
            assert [made() for made in held] == [None] * 3
    finally:
        gc.enable()


def test_threads_that_are_ended_during_a_step_end(monkeypatch):
    """As at the interpreter's exit, while a daemon thread is in a step."""

    def ending(source, device):
        team = session._executor.team
        gos = [worker.go for worker in team.workers]
        # A lock that the caller has given just now, and the thread has not taken yet, cannot be given twice.
        monkeypatch.setattr(threads, "_release", lambda lock: None if lock in gos else release(lock))
        team.close()
        return copy(source, device)

    release = threads._release
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 0.5)
    copy_by(monkeypatch, ending)
    with session_of() as session:
        with pytest.raises(RunError, match=r"ended during a step\n  in   plan 'small', step 0\n  fix  before the"):
            session.step(X)
        assert unusable(session)
        for thread in threads_of_sessions():
            thread.join(1)
        assert threads_of_sessions() == []
