"""The CPU executor: generated Python, one persistent thread per logical device.

A thread executes its device's lanes, merged in issue order. A step::

    caller     give every thread its inputs ① ── wait for all ④ ──▶ outputs
    gpu:0      ① ── run … record ② ───────────────────────── ④
    gpu:1      ① ── run … ──────── ③ wait … run ──────────── ④

An event is a lock for each (record, wait) pair, taken beforehand: a record releases it ②, a wait acquires it ③, which
leaves it ready for the next step. Where a thread fails, it releases all locks, and every wait after that stops its
thread, so that nothing is left hanging. Waits of threads take no time limit: the caller, while it waits ④, watches all
threads (:mod:`graphir.runtime.failures.watch`), and releases the locks itself where they cannot go on.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from operator import methodcaller
from typing import Any, Final

import torch
from torch import Tensor

from graphir.errors import SessionError
from graphir.ir.plan import lane_device
from graphir.ir.size import Dims

from ..codegen.handoffs import Handover, handoffs
from ..codegen.statements import generate
from ..executor import Feedable, Setting
from ..failures.watch import Watch
from ..machine.interrupts import held_back
from ..machine.openmp import set_threads
from ..machine.stopwatch import Stopwatch
from .generated import Generated, OnHost, Stopped

__all__ = ["Threads", "end_threads_at_exit"]

_SPINS: Final = 40
"""How often a wait looks before it blocks: some 30 µs, which is what waking a blocked thread costs."""

_LOOK_SECONDS: Final = 0.05
"""How often the caller looks at the threads that it waits for."""

_GRACE_SECONDS: Final = 10.0
"""How long a thread that was told to stop may take to end the operator that it is in, before it is left to itself."""

_yield: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Threads(OnHost):
    """See :mod:`graphir.runtime.executors.threads`.

    Args:
        setting: what to run.
        threads: how many threads one kernel may use; None: as many as in the thread that makes the executor, so that
            bits equal those of eager PyTorch there.
    """

    def __init__(self, setting: Setting, threads: int | None = None) -> None:
        super().__init__()
        self.setting, plan = setting, setting.plan
        devices = {device: i for i, device in enumerate(dict.fromkeys(map(lane_device, plan.lanes)))}
        of_lane = {lane: devices[lane_device(lane)] for lane in plan.lanes}
        self.handoffs, self.of_lane = handoffs(plan, of_lane), of_lane
        intraop = threads or torch.get_num_threads()
        self.team = _Team(len(devices), self.handoffs.total, intraop, setting.mode)
        try:
            handover = Handover(self.handoffs, *self.team.events(), self.team.values)
            self.generate = partial(generate, setting, of_lane, handover, buffers=self.buffers)
            self.plain = Generated(setting, self.generate())
        except BaseException:
            self.close()
            raise

    def execute(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """One step of this code, whose functions take *first* before their inputs: the number of steps done, …"""
        calls = [(*first, *[inputs[i] for i in code.inputs]) for code in generated.threads]
        returned, errors = self.team.run(generated.functions(dims), calls, partial(self.watch, generated, first[0]))
        if any(e is not None for e in errors):
            raise generated.blame(errors, dims, first[0])
        outputs: dict[int, Tensor] = {}
        for code, values in zip(generated.threads, returned, strict=True):
            outputs.update(zip(code.outputs, values, strict=True))
        return [outputs[i] for i in range(len(outputs))]

    def close(self) -> None:
        """End the threads."""
        self.team.close()

    def watch(self, generated: Generated, step: int) -> Watch:
        """What looks at the threads of a step."""
        setting, threads = self.setting, self.team.threads
        return Watch(setting.plan, self.handoffs, self.of_lane, generated.threads, threads, setting.deadline, step)


class _Worker:
    """One thread and the call that it is given.

    Attributes:
        go: released to start the call.
        done: released by the thread when it has finished it.
        error: what the call raised.
        died: what ended the thread itself.
    """

    def __init__(self) -> None:
        self.go, self.done = _taken_lock(), _taken_lock()
        self.call: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.finished = True
        self.returned: Any = None
        self.error: BaseException | None = None
        self.died: BaseException | None = None


class _Brake:
    """What stops every thread at its next wait.

    Attributes:
        pulled: not empty once it was.
        ended: whether threads are to end after the call that they are in.
        dropped: what ends them when nobody has the team any more.
    """

    def __init__(self, locks: Sequence[Any]) -> None:
        self.locks, self.pulled, self.ended = locks, list[bool](), False
        self.dropped: weakref.ref[_Team] | None = None

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

    def __init__(self, size: int, events: int, intraop: int, mode: Callable[[], AbstractContextManager[None]]) -> None:
        self.locks = [_taken_lock() for _ in range(events)]
        self.brake = _Brake(self.locks)
        self.values: list[Tensor | None] = []
        self.workers = [_Worker() for _ in range(size)]
        self.begun = _taken_lock()
        self.starters = [*[worker.go for worker in self.workers], self.begun]
        self.threads = [
            threading.Thread(target=_serve, args=(worker, self.brake, intraop, mode), daemon=True, name=f"graphir-{i}")
            for i, worker in enumerate(self.workers)
        ]
        # C code from end to end, so that Ctrl-C does not strike within: nothing that the collector of garbage calls may
        # raise it. A thread that is woken without a call ends.
        gos = [worker.go for worker in self.workers]
        self.brake.dropped = weakref.ref(self, partial(dict.fromkeys, map(methodcaller("release"), gos)))
        end_threads_at_exit()
        _teams.add(self)
        try:
            with held_back():
                for thread, worker in zip(self.threads, self.workers, strict=True):
                    thread.start()
                    worker.done.acquire()
                    if worker.error is not None:
                        raise worker.error
        except BaseException as e:
            self.close()
            if not isinstance(e, Exception):
                raise
            raise SessionError(
                f"the session's threads cannot be started: {type(e).__name__}: {e}",
                fix="use fewer threads, or executor='reference'",
            ) from e

    def close(self) -> None:
        """Have all threads end that were started; one that is in an operator for long is left to itself."""
        with held_back():
            self.brake.dropped = None
            _end(self.workers, self.threads, self.brake)

    def events(self) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
        """What gives and what takes each hand-off."""
        return [lock.release for lock in self.locks], [_taker(lock, self.brake.pulled) for lock in self.locks]

    def run(
        self,
        functions: Sequence[Callable[..., Any]],
        calls: Sequence[tuple[Any, ...]],
        watch: Callable[[], Watch],
    ) -> tuple[list[Any], list[BaseException | None]]:
        """What each thread returned, and what it raised.

        Args:
            functions: for each thread.
            calls: their arguments.
            watch: makes what looks at the threads, once they have taken a while.

        Raises:
            RunError: a thread died, or they cannot go on; they were stopped.
        KeyboardInterrupt: on Ctrl-C, while they ran or while they were stopped.

        Ctrl-C may strike between any two lines here, so that what was started and what has finished is read from the
        locks and flags that C code and the workers set, never from how far these lines came.
        """
        try:
            for worker, function, arguments in zip(self.workers, functions, calls, strict=True):
                worker.finished, worker.call = False, (function, arguments)
            deque(map(methodcaller("release"), self.starters), maxlen=0)
            watching: Watch | None = None
            for worker in self.workers:
                while not worker.done.acquire(timeout=_LOOK_SECONDS):
                    watching = watching or watch()
                    self.look(watching)
            if self.brake.pulled:
                self.look(watching or watch())
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

    def look(self, watch: Watch) -> None:
        """Raise a RunError where a thread has died, or the others cannot go on."""
        for index, worker in enumerate(self.workers):
            if worker.died is not None:
                raise watch.died(index, worker.died) from worker.died
        watch.look([index for index, worker in enumerate(self.workers) if not worker.finished])

    def settle(self) -> None:
        """Stop whatever was started and wait for its end, whatever else happens.

        A thread that does not end the operator that it is in is left to itself. All stay stopped then: it must not come
        upon the next step.

        Raises:
            KeyboardInterrupt: on Ctrl-C, or what another signal's handler raises. No thread is waited for then.
        """
        grace = Stopwatch()
        struck: BaseException | None = None
        while True:
            try:
                if not self.begun.locked():
                    self.brake.pull()
                    for worker in self.workers:
                        while not worker.finished and worker.died is None:
                            if struck is not None or grace.look() > _GRACE_SECONDS:
                                break
                            worker.done.acquire(timeout=_LOOK_SECONDS)
                if self.begun.locked() or all(worker.finished or worker.died is not None for worker in self.workers):
                    for worker in self.workers:
                        worker.done.acquire(False)
                        worker.returned = worker.error = worker.call = None
                    self.begun.acquire(False)
                    self.reset()
                break
            except BaseException as e:  # a signal's: nothing here raises
                struck = e
        if struck is not None:
            raise struck

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


def _serve(worker: _Worker, brake: _Brake, intraop: int, mode: Callable[[], AbstractContextManager[None]]) -> None:
    """What a thread does until it is given nothing."""
    try:
        set_threads(intraop)
    except BaseException as e:
        worker.error = e
        worker.done.release()
        return
    try:
        with mode():
            worker.done.release()
            while not brake.ended and _called(worker, brake):
                continue
    except BaseException as e:  # nothing of a call: what was raised in the thread from outside
        worker.died = e
        brake.pull()


def _called(worker: _Worker, brake: _Brake) -> bool:
    """Do what a thread is told to do next; whether it was anything."""
    worker.go.acquire()
    if worker.call is None:
        return False
    function, arguments = worker.call
    try:
        worker.returned = function(*arguments)
    except BaseException as e:
        worker.error = e if brake.pull() else Stopped().with_traceback(e.__traceback__)
    worker.call = None
    del function, arguments
    worker.finished = True
    worker.done.release()
    return True


_teams: Final[weakref.WeakSet[_Team]] = weakref.WeakSet()


@cache
def end_threads_at_exit() -> None:
    """End the threads of sessions that nobody closed before the interpreter ends."""

    def end() -> None:
        for team in list(_teams):
            team.close()

    atexit.register(end)


def _end(workers: Sequence[_Worker], threads: Sequence[threading.Thread], brake: _Brake) -> None:
    try:
        brake.ended = True  # for a thread that was told to start a call just now, and is not told twice
        brake.pull()
        for worker in workers:
            _release(worker.go)
    except KeyboardInterrupt:
        _end(workers, threads, brake)
        raise
    grace = Stopwatch()
    for thread in threads:
        while thread.is_alive() and thread is not threading.current_thread() and grace.look() <= _GRACE_SECONDS:
            thread.join(_LOOK_SECONDS)
