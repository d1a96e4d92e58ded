"""Plain choices: everything as it is, contiguous parts, and single options for all groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from .outcome import Outcomes
from .problem import KEEP, Choice, Group

__all__ = ["Plain", "allowed"]


def allowed(groups: Sequence[Group], choice: Choice) -> Choice:
    """A choice with each group where it may be, and stored as it may be, as its state is."""
    state = choice.state or (KEEP,) * len(groups)
    devices = [d if d in g.devices else g.devices[0] for g, d in zip(groups, choice.devices, strict=True)]
    stored = [s if s in g.stored and s != d else KEEP for g, s, d in zip(groups, choice.stored, devices, strict=True)]
    state = tuple([s if s in g.away and s != d else KEEP for g, s, d in zip(groups, state, devices, strict=True)])
    return Choice(tuple(devices), tuple(stored), state if any(s != KEEP for s in state) else ())


class Plain:
    """The plain choices of a problem.

    Args:
        outcomes: of the problem.
    """

    def __init__(self, outcomes: Outcomes) -> None:
        self.problem, self.outcomes = outcomes.problem, outcomes

    def placed(self) -> list[Choice]:
        """Everything as it is and kept, and every cut into contiguous parts."""
        now, count = self.problem.now(), len(self.problem.groups)
        devices = sorted({device for group in self.problem.groups for device in group.devices})
        found = [now, *[self.filled(order) for order in (devices, devices[::-1])]]
        found += [Choice(spread, now.stored) for spread in self.spreads(devices)]
        for device, other in pairwise((*devices, devices[0])) if len(devices) > 1 else ():
            cuts = range(1, count, max(len(devices) - 1, 1))
            found += [Choice((device,) * i + (other,) * (count - i), now.stored) for i in cuts]
        return list(dict.fromkeys([self.allowed(choice) for choice in found]))

    def stored(self, placed: Sequence[Choice]) -> Iterator[Choice]:
        """Some choices with each option for all groups, and with state parked beside each."""
        aways = dict.fromkeys(to for group in self.problem.groups for to in group.away)
        options = dict.fromkeys(stored for group in self.problem.groups for stored in group.stored if stored != KEEP)
        for choice in placed:
            for stored in options:
                yield self.allowed(choice._replace(stored=(stored,) * len(choice.stored)))
            for to in aways:
                for stored in (KEEP, *options):
                    both = (stored,) * len(choice.stored), (to,) * len(choice.stored)
                    yield self.allowed(Choice(choice.devices, *both))

    def allowed(self, choice: Choice) -> Choice:
        return allowed(self.problem.groups, choice)

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
