"""The best choice that a local search finds.

It begins with plain choices: everything as it is, every cut into contiguous parts, everything parked on one device, all
computed again. From the best of these it anneals (Kirkpatrick, Gelatt and Vecchi, 1983): random changes of one group or
of neighbours, of which worse ones are taken less and less often. Exceeding a limit costs more than any step saves. In
the end each group is tried everywhere, until no change of one group helps.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from itertools import cycle, pairwise
from typing import Final, NamedTuple

from .outcome import Outcome, Outcomes
from .problem import AGAIN, KEEP, Choice

__all__ = ["Found", "search"]

_OVER: Final = 4.0
_EXCEEDS: Final = 0.02
"""What exceeding a limit by all of it costs, in steps of the problem as it is; and by anything."""

_MOVED: Final = 2e-5
"""What it costs to change all groups, in such steps: of equal plans the one that changes least is found."""

_TURN: Final = 1e-4
"""What it costs, in such steps, that neighbours are on different devices: scattered modules have to be worth it."""

_TURN_IN_PARTS: Final = 3e-3
_CUTS: Final = 3
"""The same where micro-batches flow: what bytes do to their order is not looked at here, and does more to scattered
modules; and so many of the best plain choices are for plans to decide on, too."""

_HOTTEST: Final = 0.02
_COLDEST: Final = 0.0002
"""By what part of a step worse choices are taken, at first and at last."""

_POLISHED: Final = 0.8
"""The part of the budget after which the best is polished."""

_ROUNDS: Final = 3
"""How often annealing begins again, from the best so far, in a third of the budget each."""

_STATE: Final = 0.2
"""How often state is changed, where it may be parked."""

_TRIES: Final = 80
"""How many choices a round looks at, for each group, at most. What is left of the budget, where a problem is small, is
for more rounds, every other one of which begins with another plain choice."""


class Found(NamedTuple):
    """What a search has found.

    Attributes:
        choice: the best.
        outcome: what it comes to; where no limits could be kept, the least excess is best.
        evaluated: how many choices were looked at, those that were again counted again.
        others: the best of other rounds of annealing, and what rounds began with; the best first, and the plain one
            last where there is one micro-batch.
        interrupted: whether Ctrl-C ended it.
    """

    choice: Choice
    outcome: Outcome
    evaluated: int
    others: tuple[Choice, ...] = ()
    interrupted: bool = False


class _Spent(Exception):
    """The budget is."""


def search(
    outcomes: Outcomes,
    seconds: float = 2.0,
    evaluations: int | None = None,
    seed: int = 0,
    starts: Sequence[Choice] = (),
) -> Found:
    """The best choice that can be found in so much time.

    Args:
        outcomes: of the problem of what is placed.
        seconds: how long to search.
        evaluations: how many choices to look at instead; equal numbers and seeds find equal choices.
        seed: of the random changes.
        starts: choices to begin with, beside the plain ones.

    Ctrl-C ends the search early, with the best so far.
    """
    found, interrupted = _Search(outcomes, seconds, evaluations, seed), False
    try:
        found.run(starts)
    except _Spent:
        pass
    except KeyboardInterrupt:
        interrupted = True
    last = found.plainest if outcomes.problem.parts == 1 else None
    others = sorted(found.ends - {found.best}, key=lambda choice: (choice == last, found.rank(choice)))
    return Found(found.best, found.outcomes(found.best), found.tries, tuple(others), interrupted)


class _Search:
    """One search.

    Attributes:
        best: so far.
        least: by how much it exceeds limits, and what it costs.
        tries: how many choices were looked at.
        seeded: whether all plain choices were; they are, whatever the budget.
        ends: the best so far, and that of the round, at the end of each; what the search began with.
        plainest: the best of the plain choices.
    """

    def __init__(self, outcomes: Outcomes, seconds: float, evaluations: int | None, seed: int) -> None:
        self.problem, self.outcomes = outcomes.problem, outcomes
        self.random = random.Random(seed)
        self.seconds, self.evaluations, self.begun = seconds, evaluations, time.perf_counter()
        self.tries, self.seeded = 0, False
        self.ends: set[Choice] = set()
        self.plainest: Choice | None = None
        self.turn = _TURN if self.problem.parts == 1 else _TURN_IN_PARTS
        self.base = max(self.outcomes(self.problem.now()).seconds, 1e-12)
        self.aways = list(dict.fromkeys(to for group in self.problem.groups for to in group.away))
        self.best = self.allowed(self.problem.now())
        self.least = self.rank(self.best)

    def spent(self) -> float:
        """The part of the budget that is spent."""
        if self.evaluations is not None:
            return self.tries / max(self.evaluations, 1)
        return (time.perf_counter() - self.begun) / max(self.seconds, 1e-9)

    def cost(self, choice: Choice) -> float:
        """What a choice costs, in steps of the problem as it is."""
        outcome = self.outcomes(choice)
        moved = sum(
            (device != group.now) + (stored != KEEP)
            for group, device, stored in zip(self.problem.groups, choice.devices, choice.stored, strict=True)
        ) + len(choice.parked)
        turns = sum(a != b for a, b in pairwise(choice.devices))
        over = _OVER * outcome.over + _EXCEEDS if outcome.over else 0.0
        return outcome.seconds / self.base + over + _MOVED * moved / (2 * len(choice.devices)) + self.turn * turns

    def rank(self, choice: Choice) -> tuple[float, float]:
        """By how much a choice exceeds limits, and what it costs."""
        return self.outcomes(choice).over, self.cost(choice)

    def tried(self, choice: Choice) -> float:
        """What a choice costs; the best is kept.

        Raises:
            _Spent: there is no budget left.
        """
        if self.seeded and self.spent() >= 1:
            raise _Spent
        self.tries += 1
        found = self.rank(choice)
        if found < self.least:
            self.best, self.least = choice, found
        return found[1]

    def run(self, starts: Sequence[Choice]) -> None:
        for choice in map(self.allowed, starts):
            self.tried(choice)
            self.ends.add(choice)
        plain = list(dict.fromkeys(self.plain()))
        for choice in plain:
            self.tried(choice)
        self.seeded = True
        ranked = sorted(plain, key=self.rank)
        self.plainest = ranked[0]
        self.ends.update(ranked[: _CUTS if self.problem.parts > 1 else 1])
        others = cycle([plain[0], *sorted(plain[1:], key=self.cost)])
        part = max(_POLISHED - self.spent(), 0.0) / _ROUNDS
        number = 0
        while self.spent() < _POLISHED:
            self.ends.add(self.best)
            if number < _ROUNDS or number % 2:
                self.anneal(self.best, self.spent() + part, _HOTTEST / 3 ** min(number, _ROUNDS - 1))
            else:
                self.anneal(next(others), self.spent() + part, _HOTTEST)
            self.ends.add(self.best)
            self.polish()
            number += 1

    def allowed(self, choice: Choice) -> Choice:
        """A choice with groups where they may be."""
        groups = self.problem.groups
        if not choice.state:
            choice = choice._replace(state=(KEEP,) * len(groups))
        devices = [d if d in g.devices else g.devices[0] for g, d in zip(groups, choice.devices, strict=True)]
        stored = [
            s if s in g.stored and s != d else KEEP for g, s, d in zip(groups, choice.stored, devices, strict=True)
        ]
        state = [s if s in g.away and s != d else KEEP for g, s, d in zip(groups, choice.state, devices, strict=True)]
        return Choice(tuple(devices), tuple(stored), tuple(state) if any(s != KEEP for s in state) else ())

    def plain(self) -> Iterator[Choice]:
        """What to begin with."""
        now, groups = self.problem.now(), self.problem.groups
        count, devices = len(groups), sorted({d for group in groups for d in group.devices})
        placed = [self.allowed(now), *[self.filled(order) for order in (devices, devices[::-1])]]
        placed += [self.allowed(Choice(spread, now.stored)) for spread in self.spreads(devices)]
        for device, other in pairwise((*devices, devices[0])) if len(devices) > 1 else ():
            cuts = range(1, count, max(len(devices) - 1, 1))
            placed += [self.allowed(Choice((device,) * i + (other,) * (count - i), now.stored)) for i in cuts]
        yield from placed
        options = dict.fromkeys(stored for group in groups for stored in group.stored if stored != KEEP)
        ranked = sorted(dict.fromkeys(placed), key=self.cost)
        for choice in (placed[0], *ranked[:2]):
            for stored in options:
                yield self.allowed(choice._replace(stored=(stored,) * count))
            for to in self.aways:
                for stored in (KEEP, *options):
                    yield self.allowed(Choice(choice.devices, (stored,) * count, (to,) * count))

    def spreads(self, devices: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Contiguous parts over all devices, filled one after the other to equal shares of bytes or of seconds."""
        problem = self.problem
        nbytes = [float(group.state) for group in problem.groups]
        spent = [0.0] * len(nbytes)
        for value in problem.values:
            if value.counted and value.parks:
                nbytes[value.group] += value.nbytes
        for task in problem.tasks:
            spent[task.group] += task.seconds[0]
        for weights in (nbytes, spent):
            total = sum(weights) or 1.0
            for used in range(2, len(devices) + 1):
                for tilt in (0.0, -0.3, 0.3):
                    begun, row = 0.0, []
                    for weight in weights:
                        part = min(max((begun + weight / 2) / total, 0.0), 1.0)
                        row.append(devices[min(int(part ** (1 + tilt) * used), used - 1)])
                        begun += weight
                    yield tuple(row)

    def filled(self, devices: Sequence[int]) -> Choice:
        """Contiguous parts, each as large as its device's limit allows; what is left over is on the last device."""
        count, stored = len(self.problem.groups), self.problem.now().stored
        row: tuple[int, ...] = ()
        for device, following in pairwise(devices):
            limit = self.problem.limits[device]
            low, high = len(row), count
            while limit is not None and low < high:
                middle = (low + high + 1) // 2
                choice = Choice((*row, *[device] * (middle - len(row)), *[following] * (count - middle)), stored)
                if self.outcomes(self.allowed(choice)).peaks[device] <= limit:
                    low = middle
                else:
                    high = middle - 1
            row = (*row, *[device] * ((count if limit is None else low) - len(row)))
        return self.allowed(Choice((*row, *[devices[-1]] * (count - len(row))), stored))

    def anneal(self, start: Choice, until: float, hottest: float) -> None:
        """Change at random, and take what is worse less and less often."""
        now, cost = start, self.cost(start)
        best, least = now, cost
        begin, first, most = self.spent(), self.tries, _TRIES * len(start.devices)
        while (part := max((self.spent() - begin) / max(until - begin, 1e-9), (self.tries - first) / most)) < 1:
            warm = hottest * (_COLDEST / hottest) ** part
            choice = self.changed(now)
            if choice == now:
                self.tries += 1  # or a search in which nothing can be changed would not end
                continue
            new = self.tried(choice)
            if new <= cost or self.random.random() < math.exp((cost - new) / warm):
                now, cost = choice, new
                if cost < least:
                    best, least = now, cost
        if self.problem.parts == 1:  # where micro-batches flow, plain choices are the others for plans to decide on
            self.ends.add(best)

    def changed(self, choice: Choice) -> Choice:
        """A choice with one or some neighbouring groups changed."""
        draw, groups = self.random, self.problem.groups
        devices, stored = list(choice.devices), list(choice.stored)
        fullest = self.fullness(choice)
        first = self.crowded(choice, fullest) if draw.random() < 0.5 else draw.randrange(len(groups))
        size = 1 if draw.random() < 0.6 else draw.randint(2, max(2, len(groups) // 6))
        some = range(first, min(first + size, len(groups)))
        if self.aways and draw.random() < _STATE:
            return self.allowed(choice._replace(state=self.other_state(choice, some, fullest)))
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
        return self.allowed(Choice(tuple(devices), tuple(stored), choice.state))

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
        limits, peaks = self.problem.limits, self.outcomes(choice).peaks
        return [1.0 if limit is None else peak / limit for limit, peak in zip(limits, peaks, strict=True)]

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
        worst = max(range(len(fullest)), key=lambda d: (self.problem.limits[d] is not None, fullest[d]))
        there = [i for i, device in enumerate(choice.devices) if device == worst]
        return self.random.choice(there) if there else self.random.randrange(len(choice.devices))

    def polish(self) -> None:
        """Try each group everywhere, until no change of one helps."""
        groups = self.problem.groups
        better = True
        while better:
            better = False
            for i, group in enumerate(groups):
                for device in group.devices:
                    for stored in dict.fromkeys((KEEP, self.best.stored[i], *group.stored)):
                        if stored == device or (device == self.best.devices[i] and stored == self.best.stored[i]):
                            continue
                        if device != self.best.devices[i] and stored not in (KEEP, self.best.stored[i], AGAIN):
                            continue
                        before = self.least
                        changed = Choice(
                            (*self.best.devices[:i], device, *self.best.devices[i + 1 :]),
                            (*self.best.stored[:i], stored, *self.best.stored[i + 1 :]),
                            self.best.state,
                        )
                        self.tried(self.allowed(changed))
                        better |= self.least < before
                better |= self.polish_state(i)

    def polish_state(self, i: int) -> bool:
        """Try the state of a group everywhere; whether that helps."""
        before = self.least
        state = self.best.state or (KEEP,) * len(self.best.devices)
        for to in (KEEP, *self.problem.groups[i].away) if self.aways else ():
            if to != state[i]:
                self.tried(self.allowed(self.best._replace(state=(*state[:i], to, *state[i + 1 :]))))
        return self.least < before
