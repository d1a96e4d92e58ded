"""The search for the fastest order of micro-batches whose plan keeps within limits.

Each order is judged as a plan: by the bytes that it holds, and the seconds that it takes. Tried are

1. the own orders of the schedules, which no limits change;
2. what the schedule finds within the limits;
3. what it finds within limits that are in proportion to these, on levels that these do not shift::

       floor   1/4   2/4   3/4   free      of a device's bytes, floor: the least, free: of the order without limits
         |-----|-----|-----|-----|
                          |                the limits: 3/4 and what is below it are tried, and the limits themselves

4. plainer orders: 1F1B within the limits, one micro-batch at a time, one after the other.

Larger limits have all that smaller ones have of 1 and 3, and of 4 what knows no limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from .list_schedule import Beaten, Schedule
from .micro_work import Work
from .own_orders import OwnOrders, one_after_the_other
from .plan_figures import Figures, PlanFigures

__all__ = ["Judge", "Within", "excess"]

_OWN: Final[Mapping[str, tuple[str, ...]]] = {
    "zero_bubble": ("zero_bubble", "1f1b", "gpipe"),
    "1f1b": ("1f1b",),
    "gpipe": ("gpipe", "1f1b"),
}
"""By schedule, those whose orders it may take: its own, and plainer ones."""

_LEVELS: Final = 16
_SIMULATED: Final = 16_384
"""How many levels are tried at the most, and how many operators their simulations may come to: the orders of many
operators differ by less."""


class Judge:
    """What plans of one program come to.

    Args:
        work: of its step.
        figures: of its plans.
        exact: the seconds of the plan of an order, where these are more than the figures say.

    Attributes:
        known: figures, by order.
    """

    def __init__(self, figures: PlanFigures, exact: Callable[[Sequence[int]], float] | None = None) -> None:
        self.figures, self.exact = figures, exact
        self.known: dict[tuple[int, ...], Figures] = {}
        self.exactly: dict[tuple[int, ...], float] = {}

    def of(self, order: Sequence[int]) -> Figures:
        """The figures of an order."""
        found = self.known.get(key := tuple(order))
        if found is None:
            found = self.known[key] = self.figures.of(order)
        return found

    def seconds(self, order: Sequence[int], best: float) -> float:
        """Those of an order; any that are more than the *best* if it takes more."""
        least = self.of(order).seconds
        if self.exact is None or least >= best:
            return least
        found = self.exactly.get(key := tuple(order))
        if found is None:
            found = self.exactly[key] = self.exact(order)
        return found


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
        best: the fastest so far that keeps within the limits.
    """

    def __init__(self, orders: OwnOrders, judge: Judge, schedule: str, limits: Mapping[str, int]) -> None:
        self.orders, self.judge, self.schedule, self.limits = orders, judge, schedule, limits
        self.work: Work = orders.work
        self.most = [limits.get(device) for device in self.work.devices]
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
        """Take an order if it is the best so far; return whether it keeps within the limits."""
        if excess(self.judge.of(order).peaks, self.limits):
            return False
        seconds = self.judge.seconds(order, self.beaten.seconds)
        if self.best is None or seconds < self.best.seconds:
            self.best = _Best(order, seconds)
        return True

    @property
    def beaten(self) -> Beaten:
        """What is of no use."""
        return Beaten() if self.best is None else Beaten(self.best.seconds)

    def tried(self) -> Iterator[Sequence[int]]:
        """The orders to try, one after the other, but for those that are beaten."""
        own = self.orders.unbeaten(self.schedule).order
        yield own
        yield from self.tightened(self.schedule)
        for schedule in _OWN[self.schedule][1:]:
            yield from _orders(self.orders.found(schedule, beaten=self.beaten))
        if self.schedule == "zero_bubble":
            yield from _orders(self.orders.within_1f1b(self.beaten))
        yield from self.levels(self.judge.of(own).peaks)
        if self.schedule != "1f1b":
            yield from self.tightened("1f1b")
        yield from _orders(self.orders.found("1f1b", in_flight=1, beaten=self.beaten))
        if self.best is None:
            yield one_after_the_other(self.work)

    def tightened(self, schedule: str) -> Iterator[Sequence[int]]:
        """What a schedule finds within the limits, up to the first order whose plan keeps within them. A plan issues
        copies and frees in an order of its own, and what is let in can come to more than was reckoned."""
        for found, held in self.orders.tightened(schedule, self.most, self.planned, self.beaten):
            yield found.order
            if all(limit is None or peak <= limit for peak, limit in zip(held, self.most, strict=True)):
                return

    def levels(self, free: Mapping[str, int]) -> Iterator[Sequence[int]]:
        """What the schedule finds on levels within the limits, the highest first.

        Args:
            free: by device, what the schedule's own plan holds.
        """
        devices = [
            (need.least + base, free[device], limit)
            for device, need, base, limit in zip(
                self.work.devices, self.orders.needs, self.work.bytes.base, self.most, strict=True
            )
            if limit
        ]
        lowest = max([least / limit for least, _, limit in devices])
        highest = max([most / limit for _, most, limit in devices])
        count = min(_LEVELS, _SIMULATED // len(self.work.micro))
        for level in range(count, 0, -1):
            share = lowest + (highest - lowest) * level / count
            if lowest < share <= 1:
                limits = [None if limit is None else int(share * limit) for limit in self.most]
                yield from _orders(self.orders.found(self.schedule, limits, beaten=self.beaten))

    def planned(self, found: Schedule) -> Sequence[int]:
        """The most bytes on each device, as predicted for the plan of a schedule."""
        return list(self.judge.of(found.order).peaks.values())


def excess(peaks: Mapping[str, int], limits: Mapping[str, int]) -> int:
    """The bytes by which peaks exceed limits, together."""
    return sum([max(0, peaks[device] - limit) for device, limit in limits.items()])


def _orders(found: Schedule | None) -> Iterator[Sequence[int]]:
    if found is not None:
        yield found.order
