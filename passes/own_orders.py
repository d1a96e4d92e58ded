"""The orders that schedules give to the micro-batches of one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final

from .list_schedule import RANKS, UNBEATEN, Beaten, Rules, Schedule, list_schedule
from .micro_work import Work
from .pipeline_needs import Need, comes_back, most_in_flight, needs_of

__all__ = ["OwnOrders", "one_after_the_other"]

_LESS: Final = (0.0, 0.0, 0.01, 0.03)
"""Safety margin of each simulation within limits, as a share of the limit; on top of it goes what the one before has
exceeded the limit by."""

_MORE: Final = 2
_WORTHWHILE: Final = 0.97
"""Where a forward comes back to a device, it waits there for others: up to so many more micro-batches are let in, each
if the step becomes shorter than this share."""


class OwnOrders:
    """The orders of schedules, within limits and without.

    Args:
        work: of the step.
        in_flight: how many micro-batches may be on a device at a time; None: as many as the schedule lets in.

    Attributes:
        known: schedules without limits, by name.
        granted: of each schedule that was looked for within limits, its name, the limits, and the least limits within
            which it is the same.
    """

    def __init__(self, work: Work, in_flight: int | None) -> None:
        self.work, self.in_flight = work, in_flight
        self.known: dict[str, Schedule] = {}
        self.granted: list[tuple[str, Sequence[int | None], list[int]]] = []

    @cached_property
    def needs(self) -> list[Need]:
        """What the micro-batches need."""
        return needs_of(self.work)

    def unbeaten(self, schedule: str) -> Schedule:
        """A schedule without limits."""
        if schedule not in self.known:
            found = self.found(schedule)
            assert found is not None  # nothing beats it
            self.known[schedule] = found
        return self.known[schedule]

    def found(
        self,
        schedule: str,
        limits: Sequence[int | None] | None = None,
        in_flight: int | None = None,
        beaten: Beaten = UNBEATEN,
    ) -> Schedule | None:
        """What a schedule gives, unless it is beaten."""
        work, ranks, finishes, granted = self.work, RANKS[schedule], schedule == "1f1b", [0 for _ in self.work.devices]
        needs = None if limits is None else self.needs
        if limits is not None:
            self.granted.append((schedule, tuple(limits), granted))

        def simulated(most: Sequence[int] | None, beaten: Beaten) -> Schedule | None:
            return list_schedule(work, Rules(ranks, most, limits, finishes), needs, beaten, granted if limits else None)

        given = in_flight or self.in_flight
        if given or not finishes:
            return simulated([given] * len(work.devices) if given else None, beaten)
        most = self.most_in_flight
        best = simulated(most, beaten)
        for more in range(1, _MORE + 1) if best is not None and self.comes_back else ():
            assert best is not None
            other = simulated([n + more for n in most], Beaten(_WORTHWHILE * best.seconds))
            if other is None:
                break
            best = other
        return best

    def is_same(self, schedule: str, limits: Sequence[int | None], since: int) -> bool:
        """Whether what a schedule gives within limits is what it gave within one of those *since*."""
        return any(
            name == schedule
            and all(
                limit is most is None or (limit is not None and most is not None and least <= limit <= most)
                for limit, least, most in zip(limits, granted, given, strict=True)
            )
            for name, given, granted in self.granted[since:]
        )

    @cached_property
    def most_in_flight(self) -> list[int]:
        """By device, how many micro-batches 1F1B lets in."""
        return most_in_flight(self.work)

    @cached_property
    def comes_back(self) -> bool:
        """Whether the forward comes back to a device that it has left."""
        return comes_back(self.work)

    def tightened(
        self,
        schedule: str,
        limits: Sequence[int | None],
        peaks: Callable[[Schedule], Sequence[int]],
        beaten: Beaten = UNBEATEN,
    ) -> Iterator[tuple[Schedule, Sequence[int]]]:
        """A schedule and its *peaks*, as long as it is not beaten; of a device that exceeds its limit, the next
        simulation is given less."""
        inner = list(limits)
        simulated: Sequence[int] = [0 for _ in inner]
        held = simulated
        for share in _LESS:
            for d, (limit, given) in enumerate(zip(limits, inner, strict=True)):
                if limit is not None and given is not None and held[d] > limit:
                    less = min(given, simulated[d]) - (held[d] - limit)
                    inner[d] = min(less, int((1 - share) * limit))
            found = self.found(schedule, inner, beaten=beaten)
            if found is None:
                return
            simulated, held = _simulated(found), peaks(found)
            yield found, held

    @cached_property
    def overwriting(self) -> OwnOrders:
        """Those of the same work, its operators in place."""
        return OwnOrders(self.work.overwriting(), self.in_flight)

    @cached_property
    def plain(self) -> Schedule:
        """1F1B without limits, and what it takes in place."""
        return self.overwriting.unbeaten("1f1b")

    def within_1f1b(self, beaten: Beaten = UNBEATEN) -> Schedule | None:
        """Zero bubble, on no gpu with more than 1F1B takes on the fullest one after :func:`.share_storage`. 1F1B itself
        where that cannot be; None if it is beaten."""
        plain, devices = self.plain, self.work.devices
        peaks = [peak for device, peak in zip(devices, _simulated(plain), strict=True) if device.startswith("gpu")]
        limits = [max(peaks) if device.startswith("gpu") else None for device in devices]
        worth = Beaten(min(plain.seconds, beaten.seconds))
        for found, held in self.overwriting.tightened("zero_bubble", limits, _simulated, worth):
            if _within(held, limits) and found.seconds < plain.seconds:
                return found
        return plain if plain.seconds <= beaten.seconds else None


def one_after_the_other(work: Work) -> list[int]:
    """The micro-batches as captured: each one done before the next begins."""
    return sorted(range(len(work.micro)), key=lambda i: (work.micro[i], i))


def _simulated(found: Schedule) -> Sequence[int]:
    """The most bytes on each device, as the simulation has them."""
    assert found.peaks is not None  # it was limited
    return found.peaks


def _within(peaks: Sequence[int], limits: Sequence[int | None]) -> bool:
    return all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True))
