"""The CUDA executor: one host thread issues every lane to a stream of its own.

The generated function (:mod:`.cuda_code`) issues a step and waits for nothing; the devices work it off behind it. What
comes before and after a step is in order with it by the *gate*, one more stream::

    caller's streams  ── batch ① ─────────────────────────────────── ④ read the loss
    gate              ──────── ① ② ─────────────────────────── ③ ④
    gpu:0.compute     ──────────── ② run … record ──────────── ③
    gpu:1.copy_in     ──────────── ② wait … copy … record ──── ③
    gpu:1.compute     ──────────── ② wait … run ────────────── ③

So a step starts on every lane only after the one before it has ended on every lane, and the caller's work on its own
current streams is ordered with steps as if they were one operator.

Memory is that of the lane's device that frees it: ``record_stream`` is not needed, since the plan lets a compute lane
wait for the last use elsewhere before it frees, and the allocator hands memory on in the order of its stream.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphir.analysis.memory import memory
from graphir.errors import RunError, SessionError
from graphir.ir.device import Device
from graphir.ir.size import Dims

from .codegen import ThreadCode
from .cuda_code import Lanes, generate_streams
from .executor import Feedable, Setting
from .faults import fault
from .streams import Event, Machine, Stream, TorchCuda
from .surroundings import neutral

__all__ = ["Collectives", "Cuda", "Fence", "Held"]

Collectives: TypeAlias = Literal["ordered", "native"]

_KEPT_SIZES: Final = 64
"""For how many sizes the bound functions are kept."""


class Held(NamedTuple):
    """The bytes of one logical device, and the allocator's figures of the real one that it is bound to.

    Attributes:
        place: the real device; others may share it.
        predicted: the plan's peak at the sizes of the last step, state and inputs included.
        state: of parameters, buffers, optimizer state and constants.
        received: of the buffers for incoming copies, which are kept from step to step.
        allocator: some of ``torch.cuda.memory_stats``, in bytes and counts; empty on the host.
    """

    place: torch.device
    predicted: int
    state: int
    received: int
    allocator: Mapping[str, int]


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
        self.called: list[Event] = []

    def enter(self, callers: Sequence[Stream]) -> None:
        """What the gate gets from now on comes after what *callers* got."""
        while len(self.called) < len(callers):
            self.called.append(self.machine.event())
        for event, stream in zip(self.called, callers, strict=False):
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
        """What *callers* get from now on comes after what the gate got."""
        self.done.record(self.gate)
        for stream in callers:
            self.done.wait(stream)


class Cuda:
    """See :mod:`graphir.runtime.cuda`.

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
        self.machine: Machine = machine or TorchCuda()
        self.real = list(dict.fromkeys(place for place in self.places.values() if place.type == "cuda"))
        with self.machine.kept(self.real):
            self.gate = self.machine.stream(self.real[0])
            self.lanes = Lanes(setting.plan, self.places, self.machine)
            self.code, statements = generate_streams(setting, self.lanes, collectives == "native")
            self.fence = Fence(self.machine, self.gate, list(self.lanes.streams.values()))
        self.buffers = statements.buffers
        self.kinds = {place.type for place in setting.binding.values()}
        self.bound: dict[tuple[int, ...], Callable[..., tuple[Tensor, ...]]] = {}
        self.dims: Dims = setting.plan.dims

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`. It returns as soon as all is issued."""
        self.dims = dims
        with neutral(self.intraop, self.kinds), torch.inference_mode(), self.machine.kept(self.real) as callers:
            self.fence.enter(callers)
            outputs = self.issue(dims, inputs, step)
            self.fence.leave(callers)
            return outputs

    def issue(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """Issue a step behind the gate."""
        function = self.bound.get(key := tuple(dims.values()))
        if function is None:
            if len(self.bound) >= _KEPT_SIZES:
                del self.bound[next(iter(self.bound))]
            function = self.bound[key] = self.code.bind(dims)
        try:
            self.fence.fork()
            outputs = function(step, *[inputs[i] for i in self.code.inputs])
            self.fence.join()
        except BaseException as e:
            self.settle()
            if not isinstance(e, Exception):
                raise
            raise self.blame(self.code, e, step) from e
        return outputs

    def settle(self) -> None:
        """Let the devices come to rest, so that what a failed step drops is in no stream's hands any more."""
        for stream in (*self.lanes.streams.values(), self.gate):
            try:
                stream.synchronize()
            except RuntimeError:  # a kernel has failed; the device refuses everything from now on
                return

    def blame(self, code: ThreadCode, cause: Exception, step: int) -> RunError:
        """The error for what the generated code raised."""
        plan, position = self.setting.plan, -1
        for frame, line in traceback.walk_tb(cause.__traceback__):
            if frame.f_code is code.code:
                position = code.instructions[line]
        error = fault(plan, plan.instructions[position] if position >= 0 else None, step, cause)
        traceback.clear_frames(cause.__traceback__)  # frames hold the step's tensors
        return error

    def ledger(self) -> dict[Device, Held]:
        """What each device holds: the plan's own bytes, and beside them the allocator's, of the sizes stepped last."""
        plan = self.setting.plan
        predicted = memory(plan.with_(dims=dict(self.dims)))
        state, received = dict.fromkeys(self.places, 0), dict.fromkeys(self.places, 0)
        for name, tensor in self.setting.state.items():
            state[plan.step.blobs[name].device] += tensor.numel() * tensor.element_size()
        for (device, _), buffer in self.buffers.items():
            received[device] += buffer.nbytes
        return {
            device: Held(
                place,
                predicted.peak.get(str(device), 0),
                state[device],
                received[device],
                self.machine.statistics(place) if place.type == "cuda" else {},
            )
            for device, place in self.places.items()
        }

    def close(self) -> None:
        """Let the devices come to rest, and give back what was kept."""
        self.settle()
        self.bound.clear()
        self.buffers.clear()


def _check_distinct(setting: Setting, places: Mapping[Device, torch.device]) -> None:
    for op in setting.plan.step.ops:
        if op.type != "AllReduce":
            continue
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
