"""Calls of operators on a CUDA card: their time there, what the host needs to issue them, and what they allocate.

A card works through a queue. Events behind a kernel that keeps the card busy are reached when all calls between them
wait in the queue, so what lies between two events is the card's time alone; and the host's time alone is that of calls
into a queue with room, after which nobody waits.

The tests put another :class:`Card` in the place of :class:`TorchCard`, which computes on the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from graphir.analysis.profiles import Machine, Measured, card, driver

from ..kernels.communication import copy
from ..machine.capacity import free_on
from ..machine.surroundings import neutral
from .allocations import Allocated
from .calls import Subject, call_of, check_room, sets_at_once, summed
from .timing import Timing

__all__ = ["Card", "TorchCard", "measured_on"]

_RUNS: Final = 5
_BUSY_CYCLES: Final = 2_000_000
"""For how long a card is kept busy before calls that are timed: about a millisecond, in which the host issues them."""


class Card(Protocol):
    """What is asked of a card to measure calls there."""

    @property
    def place(self) -> torch.device:
        """Where tensors of it are."""
        ...

    def machine(self) -> Machine:
        """Its name, with the driver and the versions by which figures hold."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Calls are made in this context."""
        ...

    def free(self) -> int:
        """How many bytes nobody holds."""
        ...

    def cache(self) -> int:
        """Bytes of the cache that all of it shares."""
        ...

    def seconds(self, call: Callable[[], object], *, cold: bool) -> float:
        """What the card takes for a call; *cold*: with nothing in its cache."""
        ...

    def issue(self, call: Callable[[], object]) -> float:
        """Until the host has issued a call."""
        ...

    def launches(self, call: Callable[[], object]) -> int | None:
        """How many kernels a call launches; None where nobody can count them."""
        ...

    def allocated(self, call: Callable[[], object]) -> Allocated:
        """What a call asks the allocator for."""
        ...


def measured_on(card: Card, subjects: Mapping[str, Subject]) -> tuple[dict[str, Measured], dict[str, str]]:
    """What the call of each subject takes on a card; and of those that fail, why.

    Collectives are left out: the executor makes copies and sums of them, on streams of their own.
    """
    found: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    with neutral(torch.get_num_threads(), {"cpu", "cuda"}), torch.inference_mode(), card.current():
        for name, subject in subjects.items():
            if subject.is_reduction:
                continue
            try:
                check_room(subject, 1, card.free())
                found[name] = _measured(card, subject)
            except Exception as e:  # whatever a kernel may raise about values that are made up, or a full card
                failed[name] = f"{type(e).__name__}: {e}".partition("\n")[0]
    return found, failed


def _measured(card: Card, subject: Subject) -> Measured:
    inputs = next(_operands(card, subject))
    sets = [inputs, *[next(_operands(card, subject)) for _ in range(sets_at_once(subject) - 1)]]
    call = call_of(subject, sets, card.place)
    far = [distance for distance in subject.uses[0].reuse if distance is not None]
    seconds = card.seconds(call, cold=max(far, default=0) > card.cache()) / len(sets)
    issue = card.issue(call) / len(sets)
    launches = None if subject.is_update else card.launches(call)
    del call, sets
    figures = []
    for values in _operands(card, subject):
        figures.append(card.allocated(call_of(subject, [values], card.place)))
    return summed(subject, figures, Timing(seconds))._replace(launches=launches, issue=issue)


def _operands(card: Card, subject: Subject) -> Iterator[list[Tensor]]:
    """A subject's operands on a card; those of the host, such as counts of steps, stay there."""
    for values in subject.operands():
        named = zip(subject.op.inputs, values, strict=True)
        yield [t if subject.blobs[name].device.is_host else copy(t, card.place) for name, t in named]


class TorchCard:
    """:class:`Card` as ``torch.cuda`` has it."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._swept: Tensor | None = None

    @property
    def place(self) -> torch.device:
        return self._place

    def machine(self) -> Machine:
        return card(torch.cuda.get_device_name(self._place), driver())

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self._place):
            yield
            torch.cuda.synchronize()
        self._swept = None

    def free(self) -> int:
        return free_on(self._place)

    def cache(self) -> int:
        return int(getattr(torch.cuda.get_device_properties(self._place), "L2_cache_size", 0))

    def seconds(self, call: Callable[[], object], *, cold: bool) -> float:
        call()  # pays for what is made on demand
        pairs, nothing = [_events() for _ in range(_RUNS)], _events()
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)
        for start, end in pairs:
            if cold:
                self._sweep()
            start.record()
            call()
            end.record()
        for event in nothing:
            event.record()
        torch.cuda.synchronize()
        empty, *taken = [float(start.elapsed_time(end)) * 1e-3 for start, end in (nothing, *pairs)]
        return max(statistics.median(taken) - empty, 0.0)

    def _sweep(self) -> None:
        """Push everything out of the cache."""
        if self._swept is None:
            self._swept = torch.empty(2 * self.cache(), dtype=torch.uint8, device=self._place)
        self._swept.zero_()

    def issue(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        taken = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        return statistics.median(taken)

    def launches(self, call: Callable[[], object]) -> int | None:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        kineto: Any = profiler.profiler
        events = kineto.kineto_results.events()
        return len([e for e in events if e.device_type() == torch._C._autograd.DeviceType.CUDA]) or None

    def allocated(self, call: Callable[[], object]) -> Allocated:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = self._requested("current")
        returned = call()
        figures = Allocated(self._requested("peak") - before, self._requested("current") - before)
        del returned
        return figures

    def _requested(self, what: str) -> int:
        return int(torch.cuda.memory_stats(self._place)[f"requested_bytes.all.{what}"])


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
