"""Real signals, sent to processes with sessions: a pause of the process costs nothing, and no Ctrl-C gets lost."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import gc, os, random, signal, sys, threading, time
sys.path[:0] = {paths}
import torch
from graphir.runtime import Session
from graphir.runtime.codegen import statements
from graphir.runtime.executors import threads
from graphir.runtime.kernels.buffers import Buffer
from runnable import forward_plan, threads_of_sessions

BODY = '''
    buffer s : f32[2] @gpu:0
    input x : f32[2] @gpu:1
    y : f32[2] @gpu:0 = Copy(x)
    s;1 = aten.add_.Tensor(s, y) {{writes=[0:0]}}
'''
STATE = {{"s": torch.zeros(2)}}
PLAN, X, MAIN = forward_plan(BODY, "x", output="y", state=STATE), torch.ones(2), threading.main_thread().ident

def session_of(**options):
    return Session(PLAN, STATE, **{{"executor": "threads", **options}})

def copy_by(copy):
    statements.copy = copy
    Buffer.receive = lambda buffer, source: copy(source, source.device)
"""


def process(code):
    """A Python process that runs *code*, with the above before it."""
    tests = Path(__file__).parents[1]
    head = HEAD.format(paths=[str(path) for path in (tests.parent, tests)])
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", head + code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def output_of(code):
    with process(code) as running:
        output, errors = running.communicate(timeout=120)
    assert errors == ""
    return output.split()


SUSPENDED = """
def slow(source, device):
    print("inside", flush=True)
    sys.stdin.readline()
    return source.clone()

copy_by(slow)
with session_of(deadline=3.0) as session:
    session.step(X)
    print(session.usable, session.steps_done)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal here")
def test_a_process_that_was_suspended_for_longer_than_the_deadline_keeps_its_session():
    with process(SUSPENDED) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "inside\n"
        time.sleep(0.3)  # some looks
        running.send_signal(signal.SIGSTOP)
        time.sleep(3.2)
        running.send_signal(signal.SIGCONT)
        time.sleep(0.2)  # and some before the operator ends
        output, errors = running.communicate("\n", timeout=120)
    assert (output, errors) == ("True 1\n", "")


HANGS = """
threads._GRACE_SECONDS = 60.0
inside, leave = threading.Event(), threading.Event()
copy_by(lambda source, device: (inside.set(), leave.wait(60), source.clone())[2])
session = session_of(deadline={deadline})
brake = session._executor.team.brake

def press(*conditions):
    def pressing():
        for condition in conditions:
            while not condition():
                time.sleep(0.01)
            time.sleep(0.1)
            signal.pthread_kill(MAIN, signal.SIGINT)
    threading.Thread(target=pressing).start()
"""

GIVEN_UP = """
started = time.monotonic()
try:
    press(inside.is_set, lambda: brake.pulled)
    session.step(X)
except KeyboardInterrupt:
    print("stepping", session.usable, time.monotonic() - started < 30)

started = time.monotonic()
try:
    press(lambda: brake.ended, lambda: True)
    session.close()
except KeyboardInterrupt:
    print("closing", session.usable, time.monotonic() - started < 30)
leave.set()
"""


def test_a_second_ctrl_c_ends_the_wait_for_an_operator_that_hangs():
    """It used to begin the ten seconds of grace anew."""
    found = output_of(HANGS.format(deadline=None) + GIVEN_UP)
    assert found == ["stepping", "False", "True", "closing", "False", "True"]


AFTER_AN_ERROR = """
try:
    press(lambda: brake.pulled)
    session.step(X)
except KeyboardInterrupt as e:
    print(type(e.__context__).__name__, session.usable)
leave.set()
session.close()
"""


def test_ctrl_c_while_threads_are_stopped_after_an_error_is_not_lost():
    assert output_of(HANGS.format(deadline=0.2) + AFTER_AN_ERROR) == ["RunError", "False"]


AT_EXIT = """
import atexit
sessions = []
atexit.register(lambda: [session.close() for session in sessions])  # called after what sessions register themselves

def work(executor, begun):
    with session_of(executor=executor) as session:
        sessions.append(session)
        while True:
            session.step(X)
            begun.set()

for executor in ("serial", "threads"):
    begun = threading.Event()
    threading.Thread(target=work, args=(executor, begun), daemon=True).start()
    begun.wait()
"""


def test_the_exit_waits_for_steps_of_threads_that_nobody_waits_for():
    """It ended them within operators, whereupon C++ aborted the process in a quarter of the runs."""
    at_once = [process(AT_EXIT) for _ in range(4)]
    for running in at_once:
        output, errors = running.communicate(timeout=120)
        assert (output, errors, running.returncode) == ("", "", 0)


AT_ANY_MOMENT = """
chance, go, sent, lost, odd = random.Random({seed}), threading.Event(), threading.Event(), [], []
sys.unraisablehook = lambda raised: odd.append(repr(raised.exc_value))

def work():
    {work}

def press():
    while True:
        go.wait()
        go.clear()
        end = time.perf_counter() + chance.random() * seconds
        while time.perf_counter() < end:
            time.sleep(0)
        signal.pthread_kill(MAIN, signal.SIGINT)
        sent.set()

work()
started = time.perf_counter()
work()
seconds = 1.5 * (time.perf_counter() - started)
threading.Thread(target=press, daemon=True).start()
for run in range(60):
    try:
        go.set()
        work()
        sent.wait()
        time.sleep(0.005)
        lost.append(run)
    except KeyboardInterrupt:
        sent.wait()
    sent.clear()
gc.collect()
end = time.monotonic() + 20
while any(thread.is_alive() for thread in threads_of_sessions()) and time.monotonic() < end:
    time.sleep(0.01)
print(len(lost), len(odd), sum(thread.is_alive() for thread in threads_of_sessions()))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""

WORK = {
    "make and drop": "session_of()",
    "step": "with session_of() as session: [session.step(X) for _ in range(5)]",
    "serial": "with session_of(executor='serial', keep_heap=True) as session: session.step(X)",
    "run": "with session_of() as session: session.run([X] * 5, progress=False)",
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_ctrl_c_at_any_moment_is_raised_and_leaves_no_thread(work):
    assert output_of(AT_ANY_MOMENT.format(seed=len(work), work=work)) == ["0", "0", "0", "True"]
