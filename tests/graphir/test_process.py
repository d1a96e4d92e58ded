"""Settings of the whole process have one owner: whoever needs a value holds it, and the last one puts back what was."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from graphir import process
from graphir.collector import collector_paused
from graphir.ir.meta import errors_not_logged, fresh_fake_mode
from graphir.process import Setting, held


class Kept:
    """A setting, with all values that it was given."""

    def __init__(self):
        self.values = [0]
        self.setting = Setting("x", lambda: self.values[-1], self.values.append)

    def at(self, value, **options):
        return held({self.setting: value}, **options)


@pytest.fixture
def x():
    made = Kept()
    yield made
    assert not process._owner.claims and not process._owner.before and not process._owner.ours


def started(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    return threads


def joined(threads):
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def until(holds):
    """Wait until something holds, which it soon does."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_value_is_set_within_and_put_back_after_an_error(x):
    with pytest.raises(KeyError), x.at(1):
        assert x.values == [0, 1]
        raise KeyError
    assert x.values == [0, 1, 0]


def test_what_is_so_already_is_not_set(x):
    with x.at(0), x.at(0):
        pass
    assert x.values == [0]


def test_equal_values_overlap_and_the_last_one_puts_back(x):
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(x.at(1))
        joined(started(lambda: second.enter_context(x.at(1))))
        first.close()
        assert x.values == [0, 1]
    assert x.values == [0, 1, 0]


def test_other_values_take_turns_in_the_order_of_asking(x):
    entered, seen = threading.Event(), []

    def use(value):
        def run():
            with x.at(value):
                seen.append(x.values[-1])
                entered.set()
                time.sleep(0.05)

        return run

    threads = started(use(1))
    assert entered.wait(20)
    for value in (2, 1, 2):  # the second 1 would fit the first, and comes after the 2 that waits
        threads += started(use(value))
        claimed = len(threads) + 1
        until(lambda claimed=claimed: len(process._owner.claims) + len(seen) >= claimed)
    joined(threads)
    assert seen == [1, 2, 1, 2]
    assert x.values == [0, 1, 0, 2, 0, 1, 0, 2, 0]


def test_a_thread_would_wait_for_itself(x):
    with x.at(1):
        with pytest.raises(RuntimeError, match="this thread holds x at another value"), x.at(2):
            pass
        assert x.values == [0, 1]


def test_what_the_program_sets_meanwhile_stays(x):
    with x.at(1):
        x.values.append(5)
    assert x.values == [0, 1, 5]


def test_a_holder_does_not_queue_behind_those_that_wait_for_it(x):
    def waiting():
        with x.at(2):
            pass

    with x.at(1):
        threads = started(waiting)
        until(lambda: len(process._owner.claims) > 1)
        with x.at(1):
            assert x.values == [0, 1]
    joined(threads)
    assert x.values == [0, 1, 0, 2, 0]


def test_a_lasting_hold_ends_in_any_thread(x):
    stack = ExitStack()
    stack.enter_context(x.at(1, lasting=True))
    joined(started(stack.close))
    assert x.values == [0, 1, 0]


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_and_values_leave_what_was(x, seed):
    y, wrong = Kept(), []

    def use(number):
        chance = random.Random(seed * 100 + number)
        for _ in range(60):
            wanted = {setting.setting: chance.randrange(3) for setting in (x, y) if chance.random() < 0.7}
            try:
                with held(wanted):
                    for setting in (x, y):
                        if wanted.get(setting.setting, setting.values[-1]) != setting.values[-1]:
                            wrong.append(wanted)
                    if chance.random() < 0.2:
                        raise KeyError
                    time.sleep(0)
            except KeyError:
                pass

    joined(started(*[lambda number=number: use(number) for number in range(6)]))
    assert not wrong
    assert (x.values[-1], y.values[-1]) == (0, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_no_holder_but_the_thread_that_forked(x):
    y, inside, leave = Kept(), threading.Event(), threading.Event()

    def use():
        with y.at(1):
            inside.set()
            leave.wait(20)

    with x.at(1), ExitStack() as lasting:
        z = Kept()
        lasting.enter_context(z.at(1, lasting=True))
        threads = started(use)
        inside.wait(20)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            found = x.values[-1], y.values[-1], z.values[-1]
            with y.at(2):
                found += (y.values[-1],)
            lasting.close()
            os._exit(0 if (*found, z.values[-1], y.values[-1]) == (1, 0, 0, 2, 0, 0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (x.values[-1], y.values[-1], z.values[-1]) == (1, 1, 1)
        leave.set()
        joined(threads)


INTERRUPTED = """
import random, signal, sys, threading, time
sys.path[:0] = {paths}
from graphir.process import Setting, _owner, held

values, chance, main = [0], random.Random(0), threading.main_thread().ident
x = Setting("x", lambda: values[-1], values.append)

def use():
    while True:
        with held({{x: 1}}):
            pass
        time.sleep(0.0005)

threading.Thread(target=use, daemon=True).start()
struck = 0
for _ in range(100):
    delay = chance.random() * 2e-4
    timer = threading.Thread(target=lambda: (time.sleep(delay), signal.pthread_kill(main, signal.SIGINT)))
    try:
        timer.start()
        while True:
            with held({{x: 2}}):
                pass
    except KeyboardInterrupt:
        struck += 1
    timer.join()
    with _owner.changed:
        mine = [claim for claim in _owner.claims if claim.thread == main]
        assert not mine, mine
print(struck)
"""


def test_ctrl_c_at_any_moment_leaves_no_claim():
    code = INTERRUPTED.format(paths=[str(Path(__file__).parents[2])])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("100\n", "")


# -- what graphir holds


def in_turn(first, second):
    """Enter two contexts in two threads, and leave the first one first."""
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(first())
        thread = started(lambda: other.enter_context(second()))
        joined(thread)
        one.close()
        yield "between"


def test_what_was_made_while_the_collector_rested_is_not_looked_through_at_once():
    gc.collect()
    seen = []
    gc.callbacks.append(watch := lambda phase, info: seen.append(phase))
    try:
        with collector_paused():
            made = [[] for _ in range(100_000)]
        after = [[] for _ in range(100)]
    finally:
        gc.callbacks.remove(watch)
    assert gc.isenabled() and not seen and len(made) > len(after)


def test_what_somebody_has_frozen_stays_so():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            made = [[] for _ in range(100_000)]
        assert gc.get_freeze_count() == frozen and made
    finally:
        gc.unfreeze()


def test_two_threads_leave_the_collector_on():
    assert gc.isenabled()
    for _ in in_turn(collector_paused, collector_paused):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_errors_go_unlogged_in_the_thread_that_says_so(caplog):
    import logging

    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)  # torch's own do not pass it on
    try:
        with errors_not_logged(), errors_not_logged():
            logger.error("mine")
            joined(started(lambda: logger.error("another thread's")))
        logger.error("later")
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == ["another thread's", "later"]
    assert not logger.disabled


def test_tracebacks_are_whole_after_modes_were_made_in_many_threads():
    def make():
        for _ in range(50):
            fresh_fake_mode()

    joined(started(*[make] * 4))
    assert not hasattr(sys, "tracebacklimit")
