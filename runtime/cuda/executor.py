"""The CUDA executor: one host thread issues every lane to a stream of its own.

The generated function (:mod:`.codegen`) issues a step and waits for nothing; the devices work it off behind it. What
comes before and after a step is in order with it by the *gate*, one more stream::

    caller's streams  ── batch ① ─────────────────────────────────── ④ read the loss
    gate              ──────── ① ② ─────────────────────────── ③ ④
    gpu:0.compute     ──────────── ② run … record ──────────── ③
    gpu:1.copy_in     ──────────── ② wait … copy … record ──── ③
    gpu:1.compute     ──────────── ② wait … run ────────────── ③

So a step starts on every lane only after the one before it has ended on every lane, and the caller's work on its own
current streams is ordered with steps as if they were one operator.

Memory belongs to the compute stream of the device that frees it. ``record_stream`` is not needed: the plan lets a
compute lane wait for the last use on other lanes before it frees, and the allocator hands memory on in the order of its
stream.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from graphir.errors import SessionError
from graphir.ir.device import Device
from graphir.ir.size import Dims

from ..executor import Feedable, Held, Kept, Setting
from ..executors.generated import Generated, sizes_of, start_anew
from ..failures.faults import fault
from ..kernels.buffers import Buffers, bytes_of
from ..machine.surroundings import neutral
from ..observing.probes import Probe
from .codegen import Lanes, generate_streams, is_taken_anew
from .streams import Event, Machine, Stream, TorchCuda, wait_for

__all__ = ["Collectives", "Cuda", "Fence", "StreamClock"]

Collectives: TypeAlias = Literal["ordered", "native"]
T = TypeVar("T")


class Fence:
    """Orders a step with what comes before and after it.

    Args:
        machine: whose events they are.
        gate: the stream that steps come through.
        lanes: the streams of a step.
    """

    def __init__(self, machine: Machine, gate: Stream, lanes: Sequence[Stream]) -> None:
        self.gate, self.lanes, self.machine = gate, lanes, machine
        self.begun, self.done = machine.event(), machine.event()
        self.ended = [machine.event() for _ in lanes]
        self.called: dict[Stream, Event] = {}
        self.left: tuple[Stream, ...] = ()

    def enter(self, callers: Sequence[Stream]) -> None:
        """Let work that is issued to the gate from now on come after work that was issued so far to *callers*, and to
        the streams that :meth:`leave` was given since the last call, which may still read what the step handed back."""
        entering, self.left = dict.fromkeys((*callers, *self.left)), ()
        for stream in entering:
            event = self.called.get(stream)
            if event is None:
                event = self.called[stream] = self.machine.event()
            event.record(stream)
            event.wait(self.gate)

    def fork(self) -> None:
        """The lanes come after the gate."""
        self.begun.record(self.gate)
        for stream in self.lanes:
            self.begun.wait(stream)

    def join(self) -> None:
        """The gate comes after the lanes."""
        for event, stream in zip(self.ended, self.lanes, strict=True):
            event.record(stream)
            event.wait(self.gate)

    def leave(self, callers: Sequence[Stream]) -> None:
        """Let work that is issued to *callers* from now on come after work that was issued so far to the gate."""
        self.left = (*self.left, *callers)
        self.done.record(self.gate)
        for stream in callers:
            self.done.wait(stream)


class StreamClock:
    """A clock whose marks are events of the lanes' streams; a lane of the host is marked as it is issued."""

    def __init__(self, machine: Machine, lanes: Lanes) -> None:
        self.machine, self.lanes = machine, lanes
        self.started: dict[torch.device, tuple[float, Event]] = {}

    def start(self) -> None:
        """Begin at a moment at which the devices are at rest: events of two devices have no time between them."""
        self.started.clear()
        for stream in self.lanes.streams.values():
            if stream.device not in self.started:
                event = self.machine.event(timed=True)
                self.started[stream.device] = time.perf_counter(), event
                event.record(stream)

    def mark(self, lane: str) -> float | tuple[torch.device, Event]:
        """An event behind what was issued to the lane so far."""
        stream = self.lanes.streams.get(lane)
        if stream is None:
            return time.perf_counter()
        event = self.machine.event(timed=True)
        event.record(stream)
        return stream.device, event

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Waits for the events."""
        found = []
        for mark in marks:
            if isinstance(mark, tuple):
                seconds, start = self.started[mark[0]]
                start.synchronize()
                mark[1].synchronize()
                mark = seconds + start.elapsed_time(mark[1]) * 1e-3
            found.append(mark)
        return found


class Cuda:
    """See :mod:`graphir.runtime.cuda.executor`.

    Args:
        setting: what to run.
        threads: how many threads one kernel on the host may use; None: as many as in the thread that makes this.
        collectives: ``ordered``: copies, and sums in participant order; ``native``: NCCL's.
        machine: makes streams and events.
        places: the real device of each logical one, by default the setting's binding.

    Raises:
        SessionError: NCCL cannot reduce, since participants share a device or are on the host.
    """

    def __init__(
        self,
        setting: Setting,
        threads: int | None = None,
        collectives: Collectives = "ordered",
        machine: Machine | None = None,
        places: Mapping[Device, torch.device] | None = None,
    ) -> None:
        self.setting, self.intraop = setting, threads or torch.get_num_threads()
        self.places = places or setting.binding
        if collectives == "native":
            _check_distinct(setting, self.places)
        self.native = collectives == "native"
        self.machine: Machine = machine or TorchCuda()
        self.real = list(dict.fromkeys(place for place in self.places.values() if place.type == "cuda"))
        self.buffers: Buffers = {}
        with self.machine.kept(self.real):
            self.gate = self.machine.stream(self.real[0])
            self.lanes = Lanes(setting.plan, self.places, self.machine)
            self.plain = self.generate()
            self.fence = Fence(self.machine, self.gate, list(self.lanes.streams.values()))
        self.observed: Generated | None = None
        self.clock = StreamClock(self.machine, self.lanes)
        self.kinds = {place.type for place in self.places.values()}
        self.dims: Dims = setting.plan.dims

    def generate(self, observed: bool = False) -> Generated:
        """The function of all lanes."""
        code = generate_streams(self.setting, self.lanes, self.buffers, native=self.native, observed=observed)
        return Generated(self.setting, [code])

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`. It returns as soon as all is issued."""
        return self.between(dims, step, lambda: self.issue(self.plain, dims, inputs, (step,)))

    def run_observed(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe) -> Sequence[Tensor]:
        """One step with a probe, begun when the devices are at rest; see :class:`.observing.probes.Observable`."""
        if self.observed is None:
            self.observed = self.generate(observed=True)
        code, first = self.observed, (step, probe.begin, probe.end)
        self.settle()
        self.clock.start()
        return self.between(dims, step, lambda: self.issue(code, dims, inputs, first))

    def between(self, dims: Dims, step: int, issue: Callable[[], T]) -> T:
        """Issue something after all that the caller has issued so far, and before all that it will issue."""
        self.dims = dims
        with neutral(self.intraop, self.kinds), self.setting.mode(), self.machine.kept(self.real) as callers:
            try:
                self.fence.enter(callers)
                found = issue()
                self.fence.leave(callers)
            except torch.AcceleratorError as e:  # of a kernel before this step
                self.settle()
                raise fault(self.setting.plan, None, step, e) from e
            return found

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See :class:`.executor.OnDevices`."""
        with self.machine.kept(self.real) as callers:
            self.fence.leave(callers)
            yield

    def issue(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """Issue a step behind the gate; its function takes *first* before its inputs."""
        (function,), (code,) = generated.functions(dims), generated.threads
        try:
            self.fence.fork()
            outputs = function(*first, *[inputs[i] for i in code.inputs])
            self.fence.join()
        except BaseException as e:
            self.settle()
            self.start_anew()
            if not isinstance(e, Exception):
                raise
            error = generated.blame([e], dims, first[0])
            raise error from error.__cause__
        return outputs

    def start_anew(self) -> None:
        """Give receive buffers back; the devices are at rest."""
        start_anew(self.buffers, self.plain, self.observed)

    def settle(self) -> None:
        """Let the devices come to rest, so that no stream uses what a failed step drops."""
        for stream in (*self.lanes.streams.values(), self.gate):
            try:
                wait_for(stream, self.setting.deadline)
            except (TimeoutError, RuntimeError):
                self.forsake()  # a kernel hangs, so that the device does nothing any more; or one has failed
                return

    def forsake(self) -> None:
        """Keep page-locked buffers for as long as the process lasts. A device that hangs may still fill them when
        others have the memory. Where a device is lost, torch cannot record an event when it frees them, and ends the
        process."""
        for (device, _), buffer in self.buffers.items():
            if self.places[device].type == "cpu" and buffer.room is not None:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer.room))

    def ledger(self) -> dict[Device, Held]:
        """See :class:`.executor.OnDevices`."""
        plan, kept = self.setting.plan, self.kept()
        predicted = kept.predicted(plan, self.dims)
        state = dict.fromkeys(self.places, 0)
        for name, tensor in self.setting.state.items():
            state[plan.step.blobs[name].device] += tensor.numel() * tensor.element_size()
        return {
            device: Held(
                place,
                predicted.peak_of_storages(device),
                state[device],
                kept.nbytes.get(device, 0),
                self.machine.statistics(place) if place.type == "cuda" else {},
            )
            for device, place in self.places.items()
        }

    def kept(self) -> Kept:
        """See :class:`.observing.probes.Observable`; a copy without a number has a buffer of its own here."""
        plan, blobs = self.setting.plan, self.setting.plan.step.blobs
        numbers: dict[str, int] = {}
        for op in plan.step.ops:
            if op.kind == "copy" and not self.setting.state.keys() & set(op.outputs):
                (source,), (made,) = op.inputs, op.outputs
                if is_taken_anew(op, self.places[op.device]):
                    continue
                if any(self.places[blobs[name].device].type == "cuda" for name in (source, made)):
                    numbers[made] = plan.buffers.get(made, -1 - len(numbers))
        return Kept(numbers, bytes_of(self.buffers), sizes_of(self.plain, self.observed))

    def close(self) -> None:
        """Let the devices come to rest, and give back what was kept."""
        self.settle()
        self.start_anew()


def _check_distinct(setting: Setting, places: Mapping[Device, torch.device]) -> None:
    for op in setting.plan.step.ops:
        if op.kind != "reduce":
            continue
        if len(op.outputs) < len(op.inputs):
            raise SessionError(
                "collectives='native': NCCL gives the sum to all participants, and some want none",
                where=f"plan {setting.plan.name!r}",
                fix="leave collectives='ordered'",
            )
        devices = [setting.plan.step.blobs[name].device for name in op.inputs]
        first: dict[torch.device, Device] = {}
        for device in devices:
            place = places[device]
            if place.type != "cuda":
                problem = f"{device} is on {place}"
            elif first.setdefault(place, device) != device:
                problem = f"{first[place]} and {device} share {place}"
            else:
                continue
            raise SessionError(
                f"collectives='native': NCCL reduces among distinct GPUs, but {problem}",
                where=f"plan {setting.plan.name!r}",
                fix="bind each replica to a GPU of its own, or leave collectives='ordered'",
            )
