"""The CPU executor: generated Python, one persistent thread per logical device.

A thread executes its device's lanes, merged in issue order. A step::

    caller     give every thread its inputs ① ── wait for all ④ ──▶ outputs
    gpu:0      ① ── run … record ② ───────────────────────── ④
    gpu:1      ① ── run … ──────── ③ wait … run ──────────── ④

An event is a lock for each (record, wait) pair, taken beforehand: a record releases it ②, a wait acquires it ③, which
leaves it ready for the next step. Where a thread fails, it releases all locks, and every wait after that stops its
thread, so that nothing is left hanging.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, Final

import torch
from torch import Tensor

from graphir.errors import SessionError
from graphir.ir.size import Dims
from graphir.plan import lane_device

from .codegen import Handover, generate
from .executor import Feedable, Setting
from .generated import Generated, Stopped
from .handoffs import handoffs
from .probes import Clock, HostClock, Probe

__all__ = ["Threads"]

_SPINS: Final = 40
"""How often a wait looks before it blocks: some 30 µs, which is what waking a blocked thread costs."""

_LOOK_SECONDS: Final = 0.05

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Threads:
    """See :mod:`graphir.runtime.threads`.

    Args:
        setting: what to run.
        threads: how many threads one kernel may use; None: as many as in the thread that makes the executor, so that
            bits equal those of eager PyTorch there.
    """

    def __init__(self, setting: Setting, threads: int | None = None) -> None:
        self.setting, plan = setting, setting.plan
        devices = {device: i for i, device in enumerate(dict.fromkeys(map(lane_device, plan.lanes)))}
        of_lane = {lane: devices[lane_device(lane)] for lane in plan.lanes}
        found = handoffs(plan, of_lane)
        self.clock: Clock = HostClock()
        self.team = _Team(len(devices), found.total, threads or torch.get_num_threads())
        try:
            handover = Handover(found, *self.team.events(), self.team.values)
            self.generate = partial(generate, setting, of_lane, handover)
            self.plain = Generated(setting, self.generate())
        except BaseException:
            self.team.close()
            raise
        self.observed: Generated | None = None

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`."""
        return self.execute(self.plain, dims, inputs, (step,))

    def run_observed(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe) -> Sequence[Tensor]:
        """One step with a probe; see :class:`.probes.Observable`."""
        if self.observed is None:
            self.observed = Generated(self.setting, self.generate(observed=True))
        return self.execute(self.observed, dims, inputs, (step, probe.begin, probe.end))

    def execute(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """One step of this code, whose functions take *first* before their inputs: the number of steps done, …"""
        calls = [(*first, *[inputs[i] for i in code.inputs]) for code in generated.threads]
        returned, errors = self.team.run(generated.functions(dims), calls)
        if any(e is not None for e in errors):
            raise generated.blame(errors, dims, first[0])
        outputs: dict[int, Tensor] = {}
        for code, values in zip(generated.threads, returned, strict=True):
            outputs.update(zip(code.outputs, values, strict=True))
        return [outputs[i] for i in range(len(outputs))]

    def close(self) -> None:
        """End the threads."""
        self.team.close()


class _Worker:
    """One thread and the call that it is given."""

    def __init__(self) -> None:
        self.go, self.done = _taken_lock(), _taken_lock()
        self.call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.finished = True
        self.returned: Any = None
        self.error: BaseException | None = None


class _Brake:
    """What stops every thread at its next wait.

    Attributes:
        pulled: not empty once it was.
    """

    def __init__(self, locks: Sequence[Any]) -> None:
        self.locks, self.pulled = locks, list[bool]()

    def pull(self) -> bool:
        """Stop all; whether nobody had before."""
        first = not self.pulled
        self.pulled.append(True)
        for lock in self.locks:
            _release(lock)
        return first

    def reset(self) -> None:
        """Take all locks again, for the next step."""
        self.pulled.clear()
        for lock in self.locks:
            lock.acquire(False)


class _Team:
    """Persistent threads, and the locks by which they wait for each other."""

    def __init__(self, size: int, events: int, intraop: int) -> None:
        self.locks = [_taken_lock() for _ in range(events)]
        self.brake = _Brake(self.locks)
        self.values: list[Tensor | None] = []
        self.workers = [_Worker() for _ in range(size)]
        self.begun = _taken_lock()
        self.starters = [*[worker.go for worker in self.workers], self.begun]
        self.threads = [
            threading.Thread(target=_serve, args=(worker, self.brake, intraop), daemon=True, name=f"graphir-{i}")
            for i, worker in enumerate(self.workers)
        ]
        own, started = torch.get_num_threads(), list[threading.Thread]()
        try:
            for thread, worker in zip(self.threads, self.workers, strict=True):
                thread.start()
                started.append(thread)
                worker.done.acquire()
                if worker.error is not None:
                    raise worker.error
        except Exception as e:
            _end(self.workers, started)
            raise SessionError(
                f"the session's threads cannot be started: {type(e).__name__}: {e}",
                fix="use fewer threads, or executor='reference'",
            ) from e
        finally:
            torch.set_num_threads(own)  # a worker's setting is also the one for threads to come
        self.close = weakref.finalize(self, _end, self.workers, self.threads)

    def events(self) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        """What gives and what takes each hand-off."""
        return [lock.release for lock in self.locks], [_taker(lock, self.brake.pulled) for lock in self.locks]

    def run(
        self, functions: Sequence[Callable[..., Any]], calls: Sequence[tuple[Any, ...]]
    ) -> tuple[list[Any], list[BaseException | None]]:
        """What each thread returned, and what it raised.

        Ctrl-C may strike between any two lines here, so that what was started and what has finished is read from the
        locks and flags that C code and the workers set, never from how far these lines came.
        """
        try:
            for worker, function, arguments in zip(self.workers, functions, calls, strict=True):
                worker.finished, worker.call = False, (function, arguments)
            deque(map(methodcaller("release"), self.starters), maxlen=0)
            for worker in self.workers:
                worker.done.acquire()
        except BaseException:
            self.settle()
            raise
        self.begun.acquire()
        returned = [worker.returned for worker in self.workers]
        errors = [worker.error for worker in self.workers]
        for worker in self.workers:
            worker.returned = worker.error = None
        if any(e is not None for e in errors):
            self.reset()
        return returned, errors

    def settle(self) -> None:
        """Stop whatever was started and wait for its end, whatever else happens."""
        while True:
            try:
                if not self.begun.locked():
                    self.brake.pull()
                    for worker in self.workers:
                        while not worker.finished:
                            worker.done.acquire(timeout=_LOOK_SECONDS)
                for worker in self.workers:
                    worker.done.acquire(False)
                    worker.returned = worker.error = worker.call = None
                self.begun.acquire(False)
                self.reset()
                return
            except KeyboardInterrupt:
                continue

    def reset(self) -> None:
        """Make ready for the next step after a failure."""
        self.brake.reset()
        self.values[:] = [None] * len(self.values)


def _taker(lock: Any, pulled: Sequence[bool]) -> Callable[[], None]:
    acquire = lock.acquire

    def take() -> None:
        for _ in range(_SPINS):
            if acquire(False):
                break
            _yield()
        else:
            acquire()
        if pulled:
            raise Stopped

    return take


def _taken_lock() -> Any:
    lock = allocate_lock()
    lock.acquire()
    return lock


def _release(lock: Any) -> None:
    try:
        lock.release()
    except RuntimeError:  # it was free already
        return


def _serve(worker: _Worker, brake: _Brake, intraop: int) -> None:
    """What a thread does until it is given nothing."""
    try:
        torch.set_num_threads(intraop)
        torch.get_num_threads()  # settles it: a thread's first look would take over what another thread set since
    except BaseException as e:
        worker.error = e
        worker.done.release()
        return
    with torch.inference_mode():
        worker.done.release()
        while True:
            worker.go.acquire()
            if worker.call is None:
                return
            function, arguments = worker.call
            try:
                worker.returned = function(*arguments)
            except BaseException as e:
                worker.error = e if brake.pull() else Stopped().with_traceback(e.__traceback__)
            worker.call = None
            del function, arguments
            worker.finished = True
            worker.done.release()


def _end(workers: Sequence[_Worker], threads: Sequence[threading.Thread]) -> None:
    for worker in workers:
        _release(worker.go)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
