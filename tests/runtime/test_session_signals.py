"""Real signals, sent to processes with sessions: a pause of the process costs nothing, and no Ctrl-C gets lost.

A process takes seconds to start, so those of one kind share one.
"""

import os
import signal
import time

import pytest
from processes import output_of, started

WAITS = """
def slow(source, device):
    print("inside", flush=True)
    sys.stdin.readline()
    return source.clone()

copy_by(slow)
with session_of(deadline=1.6) as session:
    session.step(X)
    print(session.usable, session.steps_done)

threads._GRACE_SECONDS = 60.0

def hanging(deadline):
    inside, leave = threading.Event(), threading.Event()
    copy_by(lambda source, device: (inside.set(), leave.wait(60), source.clone())[2])
    session = session_of(deadline=deadline)
    return session, session._executor.team.brake, inside, leave

def press(*conditions):
    def pressing():
        for condition in conditions:
            while not condition():
                time.sleep(0.01)
            time.sleep(0.1)
            signal.pthread_kill(MAIN, signal.SIGINT)
    threading.Thread(target=pressing).start()

# A second one while the first one waits for the operator, and two in a close.
session, brake, inside, leave = hanging(deadline=None)
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

# One while threads are stopped after an error.
session, brake, inside, leave = hanging(deadline=0.2)
try:
    press(lambda: brake.pulled)
    session.step(X)
except KeyboardInterrupt as e:
    print(type(e.__context__).__name__, session.usable)
leave.set()
session.close()
"""


@pytest.fixture(scope="module")
def waited() -> list[str]:
    """What a process prints that is suspended in its first step, and sends itself Ctrl-C in later ones."""
    with started(WAITS) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.readline() == "inside\n"
        time.sleep(0.2)  # some looks
        if hasattr(signal, "SIGSTOP"):
            running.send_signal(signal.SIGSTOP)
            time.sleep(1.8)
            running.send_signal(signal.SIGCONT)
            time.sleep(0.2)  # and some before the operator ends
        output, errors = running.communicate("\n", timeout=120)
    assert errors == ""
    return output.splitlines()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no such signal here")
def test_a_process_that_was_suspended_for_longer_than_the_deadline_keeps_its_session(waited):
    assert waited[0] == "True 1"


def test_a_second_ctrl_c_ends_the_wait_for_an_operator_that_hangs_and_one_after_an_error_is_not_lost(waited):
    assert waited[1:] == ["stepping False True", "closing False True", "RunError False"]


AT_EXIT = """
sessions = []
atexit.register(lambda: [session.close() for session in sessions])  # called after what sessions register themselves

with session_of(executor="serial") as session:
    session.step(X)  # what a first step imports takes longer than all else here, so the children have it already

children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.exit()

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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_the_exit_waits_for_steps_of_threads_that_nobody_waits_for():
    """If it ends them within operators, C++ aborts the process in a quarter of the runs."""
    assert output_of(AT_EXIT) == ["0 0 0 0"]


AT_ANY_MOMENT = """
chance, go, sent = random.Random(6), threading.Event(), threading.Event()
seconds, odd = 0.0, []
sys.unraisablehook = lambda raised: odd.append(repr(raised.exc_value))

def press():
    while True:
        go.wait()
        go.clear()
        end = time.perf_counter() + chance.random() * seconds
        while time.perf_counter() < end:
            time.sleep(0)
        signal.pthread_kill(MAIN, signal.SIGINT)
        sent.set()

def step():
    with session_of() as session:
        for _ in range(5):
            session.step(X)

def step_in_line():
    with session_of(executor="serial", keep_heap=True) as session:
        session.step(X)

def run():
    with session_of() as session:
        session.run([X] * 5, progress=False)

threading.Thread(target=press, daemon=True).start()
for work in (session_of, step, step_in_line, run):
    work()
    started = time.perf_counter()
    work()
    seconds, lost = 1.5 * (time.perf_counter() - started), []
    for turn in range(40):
        try:
            go.set()
            work()
            sent.wait()
            time.sleep(0.005)
            lost.append(turn)
        except KeyboardInterrupt:
            sent.wait()
        sent.clear()
    gc.collect()
    end = time.monotonic() + 20
    while any(thread.is_alive() for thread in threads_of_sessions()) and time.monotonic() < end:
        time.sleep(0.01)
    alive = sum(thread.is_alive() for thread in threads_of_sessions())
    print(work.__name__, len(lost), len(odd), alive, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_at_any_moment_is_raised_and_leaves_no_thread():
    assert output_of(AT_ANY_MOMENT) == [f"{work} 0 0 0 True" for work in ("session_of", "step", "step_in_line", "run")]
