"""What the CUDA executor asks of the machine: streams, events, memory, graphs. Nothing else calls ``torch.cuda``.

The tests put another :class:`Machine` in its place, which notes the calls and computes on the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ..machine.stopwatch import Stopwatch

__all__ = ["Event", "Graph", "Machine", "Queue", "Stream", "TorchCuda", "wait_for"]

_LOOK_SECONDS: Final = 20e-6
"""How often the host looks whether a device is done."""

FIGURES: Final = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_ooms")
"""Which of ``torch.cuda.memory_stats`` stand beside a plan's own bytes."""

_FINDS_GENERATORS: Final = "2.14"
"""From this version of torch on, a capture finds generators itself, and prints a warning for each that it is told of.
Nothing else in torch says so."""


class Queue(Protocol):
    """What the host can wait for."""

    def query(self) -> bool:
        """Whether it is done."""

    def synchronize(self) -> None:
        """Let the host wait for all of it."""


class Stream(Queue, Protocol):
    """Work of one device that is done in order; as ``torch.cuda.Stream``."""

    @property
    def device(self) -> torch.device:
        """The real device."""


class Event(Queue, Protocol):
    """A point in a stream; as ``torch.cuda.Event``. A wait is for the last record before it."""

    def record(self, stream: Any) -> None:
        """Put it behind what was issued to *stream* so far."""

    def wait(self, stream: Any) -> None:
        """Let what is issued to *stream* from now on come after it."""

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this event to another one of its device, both timed."""


class Graph(Protocol):
    """A captured step; as ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Issue it to the current stream."""

    def reset(self) -> None:
        """Give its memory back."""


class Machine(Protocol):
    """The CUDA devices of this process."""

    def stream(self, place: torch.device) -> Stream:
        """A new stream of a device."""

    def event(self, timed: bool = False) -> Event:
        """A new event."""

    def use(self, stream: Stream) -> None:
        """Make a stream the current one of its device, and that the current device."""

    def kept(self, places: Sequence[torch.device]) -> AbstractContextManager[Sequence[Stream]]:
        """The current streams of these devices; they, and the current device, are made current again afterwards."""

    def empty(self, nbytes: int, place: torch.device) -> Tensor:
        """Uninitialised bytes of the current stream's memory; on the host, page-locked."""

    def like(self, tensor: Tensor, place: torch.device) -> Tensor:
        """Uninitialised memory of a device's current stream, with the geometry of *tensor*."""

    def elements(self, count: int, dtype: torch.dtype, place: torch.device) -> Tensor:
        """So many uninitialised elements of a device's current stream's memory."""

    def all_reduce(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], streams: Sequence[Stream]) -> None:
        """NCCL's sum, each participant on a device and a stream of its own."""

    def capture(self, stream: Stream, generators: Sequence[torch.Generator]) -> AbstractContextManager[Graph]:
        """Capture what is issued, beginning and ending on *stream*; *generators* are seeded before each replay."""

    def statistics(self, place: torch.device) -> Mapping[str, int]:
        """The allocator's figures; see :data:`FIGURES`."""


def wait_for(queue: Queue, deadline: float | None) -> None:
    """Let the host wait for an event or a stream.

    Args:
        queue: what is waited for.
        deadline: seconds, without those in which this process was suspended; None: for ever.

    Raises:
        TimeoutError: it was not done by then.
    """
    if deadline is not None:
        waited = Stopwatch(deadline)
        while not queue.query():
            if waited.look() > deadline:
                raise TimeoutError(f"the device did not get there in {deadline:g} s")
            time.sleep(_LOOK_SECONDS)
    queue.synchronize()


class TorchCuda:
    """:class:`Machine` as ``torch.cuda`` has it."""

    def stream(self, place: torch.device) -> Stream:
        """See :class:`Machine`."""
        return torch.cuda.Stream(device=place)

    def event(self, timed: bool = False) -> Event:
        """See :class:`Machine`."""
        return torch.cuda.Event(enable_timing=timed)

    def use(self, stream: Any) -> None:
        """See :class:`Machine`."""
        torch.cuda.set_stream(stream)

    @contextmanager
    def kept(self, places: Sequence[torch.device]) -> Iterator[Sequence[Stream]]:
        """See :class:`Machine`."""
        device = torch.cuda.current_device()
        streams = [torch.cuda.current_stream(place) for place in places]
        try:
            yield streams
        finally:
            with suppress(torch.AcceleratorError):  # of a device that is lost; the error on its way says more
                for stream in streams:
                    torch.cuda.set_stream(stream)
                torch.cuda.set_device(device)

    def empty(self, nbytes: int, place: torch.device) -> Tensor:
        """See :class:`Machine`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=place.type == "cpu")

    def like(self, tensor: Tensor, place: torch.device) -> Tensor:
        """See :class:`Machine`."""
        return torch.empty_like(tensor, device=place)

    def elements(self, count: int, dtype: torch.dtype, place: torch.device) -> Tensor:
        """See :class:`Machine`."""
        return torch.empty(count, dtype=dtype, device=place)

    def all_reduce(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], streams: Sequence[Any]) -> None:
        """See :class:`Machine`."""
        torch.cuda.nccl.all_reduce(list(inputs), list(outputs), streams=list(streams))

    @contextmanager
    def capture(self, stream: Any, generators: Sequence[torch.Generator]) -> Iterator[Graph]:
        """See :class:`Machine`."""
        # Generators, the process's own one too, take memory that every graph fills; those of others, outside this mode.
        with torch.inference_mode(False):
            graph = torch.cuda.CUDAGraph()
            if torch.__version__ < _FINDS_GENERATORS:
                for generator in generators:
                    graph.register_generator_state(generator)
            # Other threads, such as those that pin a loader's batches, may call CUDA meanwhile.
            capturing = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
            with capturing, torch.inference_mode():
                yield graph

    def statistics(self, place: torch.device) -> Mapping[str, int]:
        """See :class:`Machine`."""
        found = torch.cuda.memory_stats(place)
        return {name: int(found.get(name, 0)) for name in FIGURES}
