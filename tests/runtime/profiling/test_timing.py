"""What counts of the runs of a call."""

from types import SimpleNamespace

import pytest
from graphir.runtime.profiling import timing
from graphir.runtime.profiling.timing import Timed, times


class Clock:
    """Gives each run of a call its seconds and its page faults."""

    def __init__(self, monkeypatch, runs):
        self.runs, self.now, self.count = iter(runs), 0.0, 0
        clock = SimpleNamespace(thread_time=lambda: self.now, perf_counter=None)
        monkeypatch.setattr(timing, "time", clock)
        monkeypatch.setattr(timing, "_faults", lambda: self.count)

    def call(self):
        seconds, faults = next(self.runs)
        self.now += seconds
        self.count += faults


def timed(call, operators=1):
    return Timed(call, lambda: None, operators)


def refuse(name, error):
    raise error


def test_the_median_of_the_runs_with_the_fewest_page_faults_counts(monkeypatch):
    clock = Clock(monkeypatch, [(1e-3, 0), (9e-3, 5), (2e-3, 2), (4e-3, 2), (3e-3, 2), (8e-3, 7)])
    assert times({"a": timed(clock.call)}, {}, 1, refuse)["a"].alone == pytest.approx(3e-3), "the first one is left out"


def test_a_long_call_is_made_once_and_a_call_of_several_is_shared(monkeypatch):
    clock = Clock(monkeypatch, [(0.5, 0)])
    assert times({"a": timed(clock.call, operators=2)}, {}, 1, refuse)["a"].alone == pytest.approx(0.25)


def test_operands_are_touched_before_a_run_and_outside_its_time(monkeypatch):
    clock = Clock(monkeypatch, [(1e-3, 0)] * 6)

    def touch():
        clock.now += 7.0

    assert times({"a": Timed(clock.call, touch)}, {}, 1, refuse)["a"].alone == pytest.approx(1e-3)


def test_calls_that_fail_are_told_of_and_left_out():
    made, told = [], {}

    def fail():
        raise ValueError("no")

    calls = {"bad": timed(fail), "good": timed(lambda: made.append("one"))}
    others = {"bad": timed(fail), "good": timed(lambda: made.append("other"))}
    found = times(calls, others, 1, told.__setitem__)
    assert found.keys() == {"good"} and str(told["bad"]) == "no"
    assert made.count("one") == 2 * made.count("other") == 12
    assert found["good"].beside is not None


def test_a_call_that_fails_beside_another_leaves_no_thread_behind():
    runs = iter(range(9))

    def fail_later():
        if next(runs) > 6:
            raise ValueError("later")

    before = timing.threading.active_count()
    with pytest.raises(ValueError, match="later"):
        times({"a": timed(fail_later)}, {"a": timed(lambda: None)}, 1, refuse)
    assert timing.threading.active_count() == before
