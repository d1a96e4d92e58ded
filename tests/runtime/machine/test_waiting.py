"""What counts as waited, and what Ctrl-C may end."""

import signal
import threading

import pytest
from graphir.runtime.cuda.streams import wait_for
from graphir.runtime.machine import stopwatch
from graphir.runtime.machine.interrupts import held_back
from graphir.runtime.machine.stopwatch import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    return now


def test_seconds_are_counted_from_look_to_look(clock):
    watch = Stopwatch()
    for seconds in (0.5, 0.25):
        clock[0] += seconds
        watch.look()
    assert watch.look() == 0.75
    watch.restart()
    assert watch.look() == 0.0


@pytest.mark.parametrize(("limit", "counted"), [(None, 1.0), (600.0, 1.0), (0.2, 0.05)])
def test_a_pause_of_the_process_is_one_look(limit, counted, clock):
    watch = Stopwatch(limit)
    clock[0] += 3600
    assert watch.look() == counted


class Busy:
    """A queue that is done after so many looks."""

    def __init__(self, looks, clock, seconds):
        self.looks, self.clock, self.seconds = looks, clock, seconds

    def query(self):
        self.looks -= 1
        self.clock[0] += self.seconds
        return self.looks < 0

    def synchronize(self):
        pass


def test_a_device_is_not_given_up_for_a_pause_of_the_process(clock):
    wait_for(Busy(3, clock, 3600.0), 600.0)
    with pytest.raises(TimeoutError):
        wait_for(Busy(1000, clock, 3600.0), 600.0)


def pressed():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_waits_for_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        pressed()
        done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_strikes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        pressed()
        pressed()
        done.append(True)
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_does_not_swallow_it():
    with pytest.raises(KeyboardInterrupt) as caught, held_back():
        pressed()
        raise KeyError
    assert isinstance(caught.value.__context__, KeyError)


def test_nothing_is_raised_where_nothing_was_pressed():
    with held_back():
        pass
    with pytest.raises(KeyError), held_back():
        raise KeyError


def test_contexts_within_each_other_hold_together():
    with pytest.raises(KeyboardInterrupt), held_back():
        with held_back():
            pressed()
        done = True
    assert done


def test_a_programs_own_handler_is_called_at_once_and_stays():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGINT)
        with held_back():
            pressed()
            assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_within_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with held_back():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing_back():
    thread = threading.Thread(target=lambda: held_back().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
