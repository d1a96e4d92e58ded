"""The search for the fastest order of micro-batches whose plan keeps within limits.

Each order is judged as a plan: by the bytes that the plan holds, and by the seconds that it takes. These are tried:

1. the schedules' own orders, which do not depend on the limits;
2. what a schedule finds within the limits, and less where its plan exceeds them;
3. what a schedule finds within smaller limits, in proportion to those that were given::

       least         free
         |--|--|--|--|             levels, between the least that micro-batches take and what the own order takes
                    |              the limits: the three levels below are tried

4. one micro-batch at a time.

Steps of more than 2,048 operators have no levels. Of these, zero bubble's order within its default limits is left out,
too, if what was found leaves a device no room for the forward of one more micro-batch.

All multiples of some limits have the same levels. So an order of 1, 3 or 4 that is tried within some limits is tried
within their multiples, too, and larger limits make no longer step of it. What 2 finds has no such proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .list_schedule import Beaten, Schedule
from .micro_work import Work
from .own_orders import OwnOrders, one_after_the_other
from .plan_figures import Figures, PlanFigures

__all__ = ["Judge", "Within", "excess"]

_LEVELS: Final = 8
_FEWEST: Final = 4
_SIMULATED: Final = 8_192
"""How many levels are tried at the most and at the least, and how many operators their simulations may come to. Steps
of more operators have no levels."""


class Judge:
    """What plans of one program come to.

    Args:
        figures: of its plans.
        exact: the seconds of the plan of an order, where these are more than the figures say.

    Attributes:
        known: figures, by order; None: the plan was given up before all was found of it.
    """

    def __init__(self, figures: PlanFigures, exact: Callable[[Sequence[int]], float] | None = None) -> None:
        self.figures, self.exact = figures, exact
        self.known: dict[tuple[int, ...], Figures | None] = {}
        self.exactly: dict[tuple[int, ...], float] = {}

    def of(self, order: Sequence[int]) -> Figures:
        """The figures of an order."""
        found = self.known.get(key := tuple(order))
        if found is None:
            found = self.known[key] = self.figures.of(order)
        return found

    def seconds(self, order: Sequence[int], limits: Mapping[str, int], best: float) -> float | None:
        """Those of an order; None if it exceeds the limits or takes longer than the best."""
        found = self.known.get(key := tuple(order))
        if found is None:
            found = self.known[key] = self.figures.unbeaten(order, limits, best)
        if found is None or found.seconds > best or excess(found.peaks, limits):
            return None
        if self.exact is None:
            return found.seconds
        if key not in self.exactly:
            self.exactly[key] = self.exact(order)
        return self.exactly[key]


class _Best(NamedTuple):
    order: Sequence[int]
    seconds: float


class Within:
    """A search within limits.

    Args:
        orders: of the step.
        judge: of its plans.
        schedule: the one that was asked for.
        limits: by device, in bytes.

    Attributes:
        count: of levels.
        since: how many schedules had been looked for within limits before.
        best: the fastest so far that keeps within the limits.
    """

    def __init__(self, orders: OwnOrders, judge: Judge, schedule: str, limits: Mapping[str, int]) -> None:
        self.orders, self.judge, self.schedule, self.limits = orders, judge, schedule, limits
        self.work: Work = orders.work
        self.most = [limits.get(device) for device in self.work.devices]
        self.count = _levels(len(self.work.micro))
        self.since = len(orders.granted)
        self.best: _Best | None = None

    def fastest(self) -> Sequence[int] | None:
        """The fastest order that was found; None: none keeps within the limits."""
        for order in self.tried():
            self.offer(order)
        return None if self.best is None else self.best.order

    def is_kept(self) -> bool:
        """Whether an order keeps within the limits."""
        return any(map(self.offer, self.tried()))

    def offer(self, order: Sequence[int]) -> bool:
        """Take an order if it is the best so far, and keeps within the limits; return whether."""
        best = self.beaten.seconds
        seconds = self.judge.seconds(order, self.limits, best)
        if seconds is None or (self.best is not None and seconds >= best):
            return False
        self.best = _Best(order, seconds)
        return True

    @property
    def beaten(self) -> Beaten:
        """What is of no use."""
        return Beaten() if self.best is None else Beaten(self.best.seconds)

    def tried(self) -> Iterator[Sequence[int]]:
        """The orders to try, one after the other, but for those that are beaten. What is likely to be the fastest comes
        first. Of a large step, the order within the default limits is left out if there is no room for another one."""
        orders, schedule = self.orders, self.schedule
        free = orders.unbeaten(schedule).order
        if self.count:
            self.judge.of(free)  # levels ask for all of it
        yield free
        yield from self.tightened(schedule)
        if schedule == "zero_bubble" and (self.count or not self.is_filled()):
            if orders.plain.seconds <= self.beaten.seconds:
                yield orders.plain.order
            yield from _orders(orders.within_1f1b(self.beaten))
        elif schedule != "1f1b":
            yield from _orders(orders.found("1f1b", beaten=self.beaten))
        if schedule == "zero_bubble":
            yield from _orders(orders.found("gpipe", beaten=self.beaten))
        yield from self.levels(schedule, free)
        if schedule != "1f1b":
            yield from self.tightened("1f1b")
            yield from self.levels("1f1b", free)
        yield from _orders(orders.found("1f1b", in_flight=1, beaten=self.beaten))
        if self.best is None:
            yield one_after_the_other(self.work)

    def is_filled(self) -> bool:
        """Whether the best so far leaves a device less room than the forward of one more micro-batch leaves behind."""
        if self.best is None:
            return False
        held = zip(self.work.devices, self.orders.needs, strict=True)
        peaks, limits = self.judge.of(self.best.order).peaks, self.limits
        return any(device in limits and limits[device] - peaks[device] < need.held for device, need in held)

    def tightened(self, schedule: str) -> Iterator[Sequence[int]]:
        """What a schedule finds within the limits, up to the first order whose plan keeps within them. A plan issues
        copies and frees in an order of its own, and what is let in can come to more than was reckoned."""
        for found, held in self.orders.tightened(schedule, self.most, self.planned, self.beaten):
            yield found.order
            if all(limit is None or peak <= limit for peak, limit in zip(held, self.most, strict=True)):
                return

    def levels(self, schedule: str, free: Sequence[int]) -> Iterator[Sequence[int]]:
        """What a schedule finds within smaller limits, the largest first.

        Args:
            schedule: its name.
            free: an order without limits.
        """
        if not self.count:
            return
        most = self.judge.of(free).peaks
        devices = [
            (need.least + base, most[device], limit)
            for device, need, base, limit in zip(
                self.work.devices, self.orders.needs, self.work.bytes.base, self.most, strict=True
            )
            if limit
        ]
        lowest = max([least / limit for least, _, limit in devices])
        highest = max([most / limit for _, most, limit in devices])
        for level in range(self.count, 0, -1):
            share = lowest + (highest - lowest) * level / self.count
            if lowest < share <= 1:
                limits = [None if limit is None else int(share * limit) for limit in self.most]
                if not self.orders.is_same(schedule, limits, self.since):
                    yield from _orders(self.orders.found(schedule, limits, beaten=self.beaten))

    def planned(self, found: Schedule) -> Sequence[int]:
        """The most bytes on each device, as predicted for the plan of a schedule."""
        return list(self.judge.of(found.order).peaks.values())


def excess(peaks: Mapping[str, int], limits: Mapping[str, int]) -> int:
    """The bytes by which peaks exceed limits, together."""
    return sum([max(0, peaks[device] - limit) for device, limit in limits.items()])


def _levels(operators: int) -> int:
    """How many levels are tried of a step."""
    count = min(_LEVELS, _SIMULATED // operators)
    return count if count >= _FEWEST else 0


def _orders(found: Schedule | None) -> Iterator[Sequence[int]]:
    if found is not None:
        yield found.order
