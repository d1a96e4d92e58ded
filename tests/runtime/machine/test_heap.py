"""The memory of a step stays in the process between steps, where a session is asked for that."""

import gc
import os
import resource
from itertools import pairwise

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.machine import heap
from runnable import captured, forward_plan, sgd

import graphir
from graphir import passes
from graphir.errors import SessionError


class Recorded:
    """In the place of the C library: what was called."""

    def __init__(self):
        self.calls = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))

    def malloc_trim(self, pad):
        self.calls.append("trim")


@pytest.fixture
def libc(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(heap, "_glibc", lambda: recorded)
    return recorded


def test_the_last_context_gives_back(libc):
    kept, left = [*heap._KEEP.items()], [*heap._LEAVE.items(), "trim"]
    with heap.kept_heap():
        with heap.kept_heap():
            assert libc.calls == kept
        assert libc.calls == kept
    assert libc.calls == kept + left


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_gives_back_and_can_keep_again(libc):
    kept, left = [*heap._KEEP.items()], [*heap._LEAVE.items(), "trim"]
    with heap.kept_heap():
        child = os.fork()
        if child == 0:
            with heap.kept_heap():
                os._exit(0 if libc.calls == kept + left + kept else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert libc.calls == kept


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_a_session_keeps_memory_where_it_is_asked_to(executor, libc):
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:1 = Copy(x)", "x", output="y")
    with Session(plan, {}, executor=executor) as session:
        session.step(torch.ones(2))
    assert libc.calls == []
    with Session(plan, {}, executor=executor, keep_heap=True):
        assert libc.calls == [*heap._KEEP.items()]
    assert libc.calls[-1] == "trim"
    session = Session(plan, {}, executor=executor, keep_heap=True)
    del session
    gc.collect()
    assert libc.calls[-1] == "trim"


@pytest.mark.parametrize("given", [1, None, "yes"])
def test_what_is_neither_on_nor_off_is_refused(given):
    plan = forward_plan("input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = aten.neg(x)", "x", output="y")
    with pytest.raises(SessionError, match=r"keep_heap=.*: it is on or off"):
        Session(plan, {}, keep_heap=given)


def test_what_the_environment_sets_stays(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    assert heap._glibc() is None


def test_other_libraries_are_left_alone(monkeypatch):
    monkeypatch.setattr("os.confstr", lambda name: "musl 1.2")
    assert heap._glibc() is None


@pytest.mark.skipif(heap._glibc() is None, reason="the C library is not glibc, or told by the environment")
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_warm_step_maps_few_pages(executor):
    example = models.resnet(batch=8, channels=16, image=32)
    program = passes.replicate(captured(example, sgd(example.model.parameters())), [0, 1])
    plan = passes.emit(program)
    predicted = graphir.memory(plan)
    needed = sum(predicted.peak[device] - predicted.state[device] for device in predicted.peak)
    batch = [torch.cat([tensor, tensor]) for tensor in (*example.inputs, *example.targets)]
    with Session(plan, program.state, executor=executor, keep_heap=True) as session:
        for _ in range(8):
            session.step(*batch)
        counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
        for _ in range(8):
            session.step(*batch)
            counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    # What the process does beside steps, such as a collection of garbage, maps pages too, but not in each of them.
    assert min(b - a for a, b in pairwise(counts)) < 0.05 * needed / resource.getpagesize()
