"""The memory of a step stays in the process between steps."""

import os
import resource
import threading

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.machine import heap
from runnable import captured, sgd

import graphir
from graphir import passes


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
    monkeypatch.setattr(heap, "_contexts", 0)
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
def test_a_process_forked_while_memory_is_given_back_can_keep_it(libc, monkeypatch):
    begun, leave = threading.Event(), threading.Event()
    monkeypatch.setattr(libc, "malloc_trim", lambda pad: begun.set() or leave.wait(60))

    def use():
        with heap.kept_heap():
            pass

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if heap._lock.acquire(timeout=5) else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    with Session(plan, program.state, executor=executor) as session:
        for _ in range(8):
            session.step(*batch)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(4):
            session.step(*batch)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults / 4 < 0.05 * needed / resource.getpagesize()
