"""The search for the fastest order of micro-batches whose plan keeps within limits.

Each order is judged as a plan: by the bytes that the plan holds, and by the seconds that it takes. These are tried:

1. the schedules' own orders, one micro-batch in flight, and one micro-batch after the other;
2. what a schedule finds within levels, which are limits in proportion to those that were given::

       least    1F1B      free
         |-|--|--|---|------|      levels: within which own orders keep, and others from the least to the most of these
                       |           the limits: the levels below are tried

All multiples of some limits have the same levels. So what is tried within some limits is tried within their multiples,
too, and larger limits make no longer step. Where nothing of that keeps within the limits, a schedule looks for an order
within the limits themselves.

Steps of more than 2,048 operators have no levels: a schedule looks for an order within the limits themselves, and
within less where its plan exceeds them. Of these steps, zero bubble's order within its default limits is left out if
what was found leaves a device no room for the forward of one more micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from .list_schedule import ROUNDING, Beaten, Schedule
from .micro_work import Work
from .own_orders import OwnOrders, one_after_the_other
from .plan_figures import Figures, PlanFigures

__all__ = ["Judge", "Within", "excess"]

_LEVELS: Final = 16
_FEWEST: Final = 4
_SIMULATED: Final = 8_192
"""How many levels lie between the least and the most at the most and at the least, and how many operators their
simulations may come to. Steps of more operators have none."""


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
        count: of levels between the least and the most.
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
        """The orders to try, one after the other, but for those that are beaten."""
        if not self.count:
            yield from self.of_a_large_step()
            return
        schedules = list(dict.fromkeys((self.schedule, "1f1b")))
        own = {name: self.own(name) for name in schedules}
        levels = {name: self.levels([self.judge.of(order).peaks for order in own[name]]) for name in schedules}
        yield from sorted(own[self.schedule], key=lambda order: self.judge.of(order).seconds)
        for level in sorted(set().union(*levels.values()), reverse=True):
            limits = [None if limit is None else math.ceil(level * limit * ROUNDING) for limit in self.most]
            for name in schedules:
                if level in levels[name] and not self.orders.is_same(name, limits, self.since):
                    yield from _orders(self.orders.found(name, limits, beaten=self.beaten))
        if self.best is None:
            for name in schedules:
                yield from self.tightened(name)

    def own(self, schedule: str) -> list[Sequence[int]]:
        """The orders that do not depend on the limits; first that of the schedule."""
        orders = self.orders
        found = [orders.unbeaten(schedule), orders.unbeaten("1f1b"), self.alone]
        if schedule == "zero_bubble":
            found += [orders.within_1f1b(), orders.plain, orders.unbeaten("gpipe")]
        return [*[order for one in found for order in _orders(one)], one_after_the_other(self.work)]

    @cached_property
    def alone(self) -> Schedule | None:
        """1F1B with one micro-batch in flight."""
        return self.orders.found("1f1b", in_flight=1)

    def levels(self, own: Sequence[Mapping[str, int]]) -> list[float]:
        """The levels of a schedule up to the limits, as shares of these.

        Args:
            own: peaks of own orders, first those of the schedule.
        """

        def share(peaks: Mapping[str, int]) -> float:
            return max([peaks[device] / limit for device, limit in self.limits.items()])

        needs = zip(self.work.devices, self.orders.needs, self.work.bytes.base, strict=True)
        shares = [share(peaks) for peaks in own]
        lowest, highest = min(share({device: base + need.least for device, need, base in needs}), *shares), shares[0]
        between = [lowest * (highest / lowest) ** (n / self.count) for n in range(self.count + 1)]
        return [level for level in (*shares, *between) if level <= ROUNDING]

    def of_a_large_step(self) -> Iterator[Sequence[int]]:
        """The orders to try of a step without levels, what is likely to be the fastest first. The order within the
        default limits is left out if there is no room for another micro-batch."""
        orders, schedule = self.orders, self.schedule
        yield orders.unbeaten(schedule).order
        yield from self.tightened(schedule)
        if schedule == "zero_bubble" and not self.is_filled():
            if orders.plain.seconds <= self.beaten.seconds:
                yield orders.plain.order
            yield from _orders(orders.within_1f1b(self.beaten))
        elif schedule != "1f1b":
            yield from _orders(orders.found("1f1b", beaten=self.beaten))
        if schedule == "zero_bubble":
            yield from _orders(orders.found("gpipe", beaten=self.beaten))
        if schedule != "1f1b":
            yield from self.tightened("1f1b")
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
