"""One line of a search: random changes, of which worse ones are taken less and less often, and then each single one.

Simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983) of one group or of neighbours. Exceeding a limit costs more
than any step saves. Then each group is tried everywhere, until no change of one group helps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from .outcome import Outcome, Outcomes
from .plain import allowed
from .problem import AGAIN, KEEP, Choice, Group

__all__ = ["Clock", "Late", "Line"]

_OVER: Final = 4.0
_EXCEEDS: Final = 0.02
"""What exceeding a limit by all of it costs, in steps of the problem as it is; and by anything."""

_MOVED: Final = 2e-5
"""What it costs to change all groups, in such steps: of equal plans the one that changes least is found."""

_TURN: Final = 1e-4
"""What it costs, in such steps, that neighbours are on different devices: scattered modules have to be worth it."""

_TURN_IN_PARTS: Final = 3e-3
"""The same where micro-batches flow: what bytes do to their order is not looked at here, and does more to scattered
modules."""

_HOTTEST: Final = 0.02
_COLDEST: Final = 0.0002
"""By what part of a step worse choices are taken, at first and at last."""

_CYCLE: Final = 4
_COOLER: Final = 3
"""Of so many annealings the last begins with another plain choice, the others with the best, each colder by a factor
than the one before."""

_ANNEALED: Final = 0.75
"""The part of a run for annealing; the rest is for single changes."""

_STATE: Final = 0.2
"""How often state is changed, where it may be parked."""

_TRIES: Final = 80
"""How many choices one annealing looks at, for each group, at most."""


_SHORTEST: Final = 31
"""Choices of a round, at least, however little time is left."""


class Late(Exception):
    """The time of a search is spent."""


@dataclass
class Clock:
    """Says when the time of searches is spent, and how long rounds may be.

    Attributes:
        until: when the time is spent, as :func:`time.perf_counter` has it; never by default.
        pace: seconds of one choice in the newest round.
    """

    until: float = math.inf
    pace: float = 0.0

    def round(self, count: int, go_on: Callable[[int], None]) -> None:
        """Go on for so many choices, or for as many as there is time for: an annealing that is cut off ends hot."""
        begun = time.perf_counter()
        if self.pace and math.isfinite(self.until):
            count = min(count, max(round((self.until - begun) / self.pace), _SHORTEST))
        go_on(count)
        if count:
            self.pace = (time.perf_counter() - begun) / count


class Line:
    """Looks for the best choice, one run after the other: runs of equal lengths look at equal choices.

    Args:
        outcomes: of the problem.
        groups: those of the problem, with what this line may choose for each.
        factor: by which its limits are multiplied.
        plain: what it begins with.
        seed: of its random changes.
        clock: says when its time is spent.

    Attributes:
        limits: by device, the most bytes that it may hold; None: any number.
        best: so far.
        least: by how much it exceeds limits, and what it costs.
        tries: how many choices were looked at, those that were again counted again.
        ends: the best of each annealing.
    """

    def __init__(
        self,
        outcomes: Outcomes,
        groups: Sequence[Group],
        factor: float,
        plain: Iterable[Choice],
        seed: int,
        clock: Clock,
    ) -> None:
        self.problem, self.outcomes, self.groups, self.clock = outcomes.problem, outcomes, groups, clock
        self.random = random.Random(seed)
        self.factor = factor
        self.limits = [None if limit is None else factor * limit for limit in self.problem.limits]
        self.aways = list(dict.fromkeys(to for group in groups for to in group.away))
        self.turn = _TURN if self.problem.parts == 1 else _TURN_IN_PARTS
        self.base = max(outcomes(self.problem.now()).seconds, 1e-12)
        self.tries = self.number = self.unhelpful = self.at = 0
        self.ends: set[Choice] = set()
        self.plain = list(dict.fromkeys([allowed(groups, choice) for choice in plain]))
        self.plain[1:] = sorted(self.plain[1:], key=self.cost)
        self.best = min(self.plain, key=self.rank)
        self.least = self.rank(self.best)

    def over(self, outcome: Outcome) -> float:
        """By how much an outcome exceeds the limits of this line, in parts of them, summed up over devices."""
        found = 0.0
        for limit, peak in zip(self.limits, outcome.peaks, strict=True):
            if limit is not None and peak > limit:
                found += peak / max(limit, 1.0) - 1
        return found

    def cost(self, choice: Choice) -> float:
        """What a choice costs, in steps of the problem as it is."""
        return self.rank(choice)[1]

    def rank(self, choice: Choice) -> tuple[float, float]:
        """By how much a choice exceeds limits, and what it costs."""
        outcome = self.outcomes(choice)
        over = self.over(outcome)
        moved = sum(
            (device != group.now) + (stored != KEEP)
            for group, device, stored in zip(self.problem.groups, choice.devices, choice.stored, strict=True)
        ) + len(choice.parked)
        turns = sum(a != b for a, b in pairwise(choice.devices))
        cost = outcome.seconds / self.base + (_OVER * over + _EXCEEDS if over else 0.0)
        return over, cost + _MOVED * moved / (2 * len(choice.devices)) + self.turn * turns

    def hold(self, more: Sequence[int]) -> None:
        """Let devices hold so many bytes more than their outcomes say."""
        self.limits = [None if limit is None else limit - n for limit, n in zip(self.limits, more, strict=True)]
        self.best = min([*sorted(self.ends), *self.plain], key=self.rank)
        self.least, self.unhelpful = self.rank(self.best), 0

    def look(self, choice: Choice) -> None:
        """Know a choice that something else has found."""
        choice = allowed(self.groups, choice)
        if (found := self.rank(choice)) < self.least:
            self.best, self.least, self.unhelpful = choice, found, 0

    def tried(self, choice: Choice) -> float:
        """What a choice costs; the best is kept.

        Raises:
            Late: the time is spent.
        """
        self.require_time()
        self.tries += 1
        found = self.rank(choice)
        if found < self.least:
            self.best, self.least, self.unhelpful = choice, found, 0
        return found[1]

    def require_time(self) -> None:
        """Raise Late where the time is spent."""
        if time.perf_counter() >= self.clock.until:
            raise Late

    def run(self, count: int) -> None:
        """Look at so many choices.

        Raises:
            Late: the time is spent.
        """
        until = self.tries + count
        while (left := until - self.tries) > 0:
            length = min(max(round(_ANNEALED * left), 1), _TRIES * len(self.groups))
            cycle, step = divmod(self.number, _CYCLE)
            if step < _CYCLE - 1:
                self.anneal(self.best, _HOTTEST / _COOLER**step, length)
            else:
                self.anneal(self.plain[cycle % len(self.plain)], _HOTTEST, length)
            self.number += 1
            self.polish(until)

    def anneal(self, start: Choice, hottest: float, length: int) -> None:
        """Change at random, and take what is worse less and less often."""
        now, cost = start, self.cost(start)
        best, least, begun = now, cost, self.tries
        while (part := (self.tries - begun) / length) < 1:
            choice = self.changed(now)
            if choice == now:
                self.require_time()
                self.tries += 1  # or a search in which nothing can be changed would not end
                continue
            new = self.tried(choice)
            if new <= cost or self.random.random() < math.exp((cost - new) / (hottest * (_COLDEST / hottest) ** part)):
                now, cost = choice, new
                if cost < least:
                    best, least = now, cost
        self.ends.add(best)

    def changed(self, choice: Choice) -> Choice:
        """A choice with one or some neighbouring groups changed."""
        draw, groups = self.random, self.groups
        devices, stored = list(choice.devices), list(choice.stored)
        fullest = self.fullness(choice)
        first = self.crowded(choice, fullest) if draw.random() < 0.5 else draw.randrange(len(groups))
        size = 1 if draw.random() < 0.6 else draw.randint(2, max(2, len(groups) // 6))
        some = range(first, min(first + size, len(groups)))
        if self.aways and draw.random() < _STATE:
            return allowed(groups, choice._replace(state=self.other_state(choice, some, fullest)))
        kind = draw.random()
        if kind < 0.1:
            other = draw.randrange(len(groups))
            stored[first], stored[other] = stored[other], stored[first]
            if draw.random() < 0.3:
                devices[first], devices[other] = devices[other], devices[first]
        elif kind < 0.35:
            self.move_boundary(devices, first)
        elif kind < 0.6:
            device = self.preferred(groups[first].devices, fullest, [devices[max(first - 1, 0)], devices[some[-1]]])
            for i in some:
                devices[i] = device
        else:
            option = self.option(groups[first].stored, fullest)
            for i in some:
                stored[i] = option
        return allowed(groups, Choice(tuple(devices), tuple(stored), choice.state))

    def other_state(self, choice: Choice, some: range, fullest: Sequence[float]) -> tuple[int, ...]:
        """The state of a choice with that of some groups elsewhere, or all of theirs at home, or exchanged with that of
        a group elsewhere."""
        draw, count = self.random, len(choice.devices)
        state = list(choice.state or (KEEP,) * count)
        drawn = draw.random()
        if drawn < 0.3:
            first, other = some[0], draw.randrange(count)
            state[first], state[other] = state[other], state[first]
            return tuple(state)
        to = self.preferred(self.aways, fullest) if drawn < 0.65 else KEEP
        for i in some:
            state[i] = to
        return tuple(state)

    def preferred(self, among: Sequence[int], fullest: Sequence[float], near: Sequence[int] = ()) -> int:
        """One of some devices: a neighbour's, the emptiest one, or any."""
        drawn = self.random.random()
        if near and drawn < 0.5:
            return self.random.choice(near)
        if drawn < 0.8:
            return min(among, key=fullest.__getitem__)
        return self.random.choice(among)

    def option(self, among: Sequence[int], fullest: Sequence[float]) -> int:
        """What becomes of what a group saves."""
        drawn, places = self.random.random(), [option for option in among if option >= 0]
        if places and drawn < 0.4:
            return self.preferred(places, fullest)
        if AGAIN in among and drawn < 0.65:
            return AGAIN
        return KEEP

    def fullness(self, choice: Choice) -> list[float]:
        """How full each device is; what has no limit, as the host, counts as full."""
        limits, peaks = self.limits, self.outcomes(choice).peaks
        return [1.0 if limit is None else peak / max(limit, 1.0) for limit, peak in zip(limits, peaks, strict=True)]

    def move_boundary(self, devices: list[int], near: int) -> None:
        """Let a group go where its neighbour is, at the next boundary."""
        count = len(devices)
        for i in (*range(near, count - 1), *range(near)):
            if i + 1 < count and devices[i] != devices[i + 1]:
                if self.random.random() < 0.5:
                    devices[i] = devices[i + 1]
                else:
                    devices[i + 1] = devices[i]
                return

    def crowded(self, choice: Choice, fullest: Sequence[float]) -> int:
        """A group on the device that is nearest to its limit, or farthest over it."""
        worst = max(range(len(fullest)), key=lambda d: (self.limits[d] is not None, fullest[d]))
        there = [i for i, device in enumerate(choice.devices) if device == worst]
        return self.random.choice(there) if there else self.random.randrange(len(choice.devices))

    def polish(self, until: int) -> None:
        """Try each group everywhere, until no change of one helps, or so many choices were looked at. The next time
        goes on where this one has ended."""
        while self.unhelpful < len(self.groups):
            before = self.least
            for choice in self.singles(self.at):
                if self.tries >= until:
                    return
                self.tried(choice)
            self.at = (self.at + 1) % len(self.groups)
            self.unhelpful = 0 if self.least < before else self.unhelpful + 1

    def singles(self, number: int) -> Iterator[Choice]:
        """The best choice with one group changed, or its state alone."""
        group = self.groups[number]
        for device in group.devices:
            for stored in dict.fromkeys((KEEP, self.best.stored[number], *group.stored)):
                devices, kinds, state = self.best
                if stored == device or (device == devices[number] and stored == kinds[number]):
                    continue
                if device != devices[number] and stored not in (KEEP, kinds[number], AGAIN):
                    continue
                devices = (*devices[:number], device, *devices[number + 1 :])
                kinds = (*kinds[:number], stored, *kinds[number + 1 :])
                yield allowed(self.groups, Choice(devices, kinds, state))
        for to in (KEEP, *group.away) if group.away else ():
            state = self.best.state or (KEEP,) * len(self.groups)
            if to != state[number]:
                yield allowed(self.groups, self.best._replace(state=(*state[:number], to, *state[number + 1 :])))
