"""The card that ``bench gpu`` measures; and the host in its place, so that every section runs without a card."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from allocations import measured_peak
from torch.profiler import ProfilerActivity, profile

import graphir
from graphir import runtime

__all__ = ["MS", "Bytes", "Card", "Event", "Pretended", "Section", "Step", "Taken", "Task", "failed"]

Step = Callable[[], object]
Cells = Sequence[object]

MS: Final = 1e3
_ENTRIES: Final = 1_000_000
"""Events of the allocator that are kept, at most."""


class Task(NamedTuple):
    """Some rows of a table, measured together.

    Attributes:
        key: the first cells of each of its rows, which say what was not reached.
        rows: measures; yields the cells behind the key.
    """

    key: tuple[object, ...]
    rows: Callable[[], Iterator[Cells]]


class Section(NamedTuple):
    """A table: its columns, and what fills it, in falling order of worth."""

    columns: tuple[str, ...]
    tasks: Sequence[Task]


class Bytes(NamedTuple):
    """Bytes of a card: as they were asked for, rounded up to blocks, and taken from the driver."""

    requested: int
    allocated: int
    reserved: int

    def above(self, before: Bytes) -> Bytes:
        return Bytes(*[after - first for after, first in zip(self, before, strict=True)])


class Taken(NamedTuple):
    """Medians of seconds.

    Attributes:
        returned: until a step returned that was begun when the device was at rest.
        done: that each of some steps took until the device was done.
    """

    returned: float
    done: float


class Event(NamedTuple):
    """What the caching allocator did, as torch's memory history names it; *stream* is the address of a stream."""

    action: str
    address: int
    nbytes: int
    stream: int


class Card:
    """The first CUDA device.

    Attributes:
        place: where tensors are put.
        pretended: whether the host stands in for a card, and models are tiny.
    """

    place = torch.device("cuda")
    pretended = False
    blocks, block_seconds, singles = 5, 0.1, 7
    """How often some steps are timed, how long they take together at least, and how often a single one is."""

    def count(self) -> int:
        """How many cards there are."""
        return torch.cuda.device_count()

    def settle(self) -> None:
        """Wait for all cards."""
        for i in range(torch.cuda.device_count()):
            torch.cuda.synchronize(i)

    def clear(self) -> None:
        """Give back what nothing uses any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def held(self) -> Bytes:
        """What is held now."""
        return self._figures("current")

    def peak(self, step: Step) -> Bytes:
        """The most that is held during two steps."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        step()
        torch.cuda.synchronize()
        return self._figures("peak")

    def _figures(self, kind: str) -> Bytes:
        found = torch.cuda.memory_stats()  # empty before the first allocation
        return Bytes(*[int(found.get(f"{name}_bytes.all.{kind}", 0)) for name in Bytes._fields])

    def taken(self, step: Step) -> Taken:
        """How long a step takes."""
        for _ in range(3):
            step()
        self.settle()
        returned, single = zip(*[self._single(step) for _ in range(self.singles)], strict=True)
        count = max(int(self.block_seconds / statistics.median(single)), 1)
        done = []
        for _ in range(self.blocks):
            start = time.perf_counter()
            for _ in range(count):
                step()
            self.settle()
            done.append((time.perf_counter() - start) / count)
        return Taken(statistics.median(returned), statistics.median(done))

    def _single(self, step: Step) -> tuple[float, float]:
        start = time.perf_counter()
        step()
        returned = time.perf_counter() - start
        self.settle()
        return returned, time.perf_counter() - start

    def kernels(self, step: Step) -> float:
        """Seconds of a step's kernels and copies, added up."""
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            self.settle()
        on_card = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(event.time_range.elapsed_us() for event in on_card if not event.is_user_annotation) / 1e6

    def graphed(self, step: Step) -> Step:
        """A whole step in one graph; nothing that it reads may move."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()

        def replay(_: Step = step) -> None:  # which keeps what the graph reads and writes
            graph.replay()

        return replay

    def compiled(self, function: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """By ``torch.compile`` in a mode."""
        return torch.compile(function, mode=mode)

    def session(self, plan: graphir.Plan, state: Any, *, graphs: bool = False, apart: bool = False) -> runtime.Session:
        """Runs a plan: all logical devices on this card, or *apart*, each on a card of its own."""
        on_one = {str(device): "cuda:0" for device in plan.devices if not device.is_host}
        return runtime.Session(plan, state, binding="cuda" if apart else on_one, cuda_graph=graphs)

    def traced(self, run: Callable[[], object]) -> list[Event]:
        """What the allocator does while something is run, from an empty cache on."""
        self.clear()
        memory: Any = torch.cuda.memory
        memory._record_memory_history("all", context=None, max_entries=_ENTRIES)
        try:
            run()
            torch.cuda.synchronize()
            found = memory._snapshot()
        finally:
            memory._record_memory_history(None)
        entries = found["device_traces"][torch.cuda.current_device()]
        return [Event(e["action"], e.get("addr", 0), e["size"], e["stream"]) for e in entries]


class Pretended(Card):
    """The host, which is taken for two cards: its figures say nothing, and rows come as they come on a card."""

    place = torch.device("cpu")
    pretended = True
    blocks, block_seconds, singles = 1, 0.0, 1

    def count(self) -> int:
        """See :class:`Card`."""
        return 2

    def settle(self) -> None:
        """See :class:`Card`."""

    def clear(self) -> None:
        """See :class:`Card`."""

    def held(self) -> Bytes:
        """See :class:`Card`."""
        return Bytes(0, 0, 0)

    def peak(self, step: Step) -> Bytes:
        """See :class:`Card`."""
        step()
        return Bytes(*[measured_peak(step)] * 3)

    def kernels(self, step: Step) -> float:
        """See :class:`Card`."""
        with profile(activities=[ProfilerActivity.CPU]) as found:
            step()
        return sum(event.self_cpu_time_total for event in found.events()) / 1e6

    def graphed(self, step: Step) -> Step:
        """See :class:`Card`."""
        return step

    def compiled(self, function: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """See :class:`Card`; traced and partitioned, and run by eager kernels."""
        return torch.compile(function, backend="aot_eager_decomp_partition")

    def session(self, plan: graphir.Plan, state: Any, *, graphs: bool = False, apart: bool = False) -> runtime.Session:
        """See :class:`Card`."""
        return runtime.Session(plan, state, binding="cpu")

    def traced(self, run: Callable[[], object]) -> list[Event]:
        """See :class:`Card`."""
        run()
        return [
            Event("segment_alloc", 4096, 2 << 20, 0),
            Event("alloc", 4096, 512, 0),
            Event("free_requested", 4096, 512, 0),
            Event("free_completed", 4096, 512, 0),
        ]


def failed(error: BaseException) -> str:
    """One cell that says what went wrong."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:160]
