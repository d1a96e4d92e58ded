"""The largest batch for which a balance finds a placement within limits.

::

    bytes
    limit ─┬────────────────────/────────/───        what was found at 100
           │                  /       /
           │                /      /                 what was found at 800, and is the nearest to the limit
           │              /     /
           └─────┬──────────────┬────────┬───  batch
                100            200      400

What a placement holds grows nearly as a straight line with the batch. So plans of a placement at a few batches say at
which one devices are full; no search is needed. Balances are made at that batch and above. In the end one of the
largest batch keeps within the limits, and one of the next larger batch is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from graphir.ir.program import Program

from .asked import Asked
from .balancing import Balancing
from .batches import Batches
from .plans import Plans
from .refusals import Refused
from .report import Balanced

__all__ = ["Full", "Largest", "Tried", "last_within"]

_BY_LINES: Final = 6
"""How many plans of a placement are made where straight lines say that devices are full, before the rest is halved."""


class Full(NamedTuple):
    """The largest batch at which a placement keeps within the limits, by its plans.

    Attributes:
        number: of the batch; 0 where there is none.
        pipeline: the passes of the placement, as text.
    """

    number: int = 0
    pipeline: str = ""


class Tried(NamedTuple):
    """A balance at one batch.

    Attributes:
        balanced: the placement; None where none was found.
        missing: what was missing then, as text.
        full: of the placement, or of the nearest ones the largest.
    """

    balanced: Balanced | None
    missing: str
    full: Full


class Largest:
    """Looks for the largest batch of a program, with some options.

    Args:
        asked: of each balance; its program is the one at the captured batch.
        batches: of the program.

    Attributes:
        tried: by the number of a batch, its balance.
    """

    def __init__(self, asked: Asked, batches: Batches) -> None:
        self.asked, self.batches = asked, batches
        self.tried: dict[int, Tried] = {}

    def search(self, sure: Full) -> Full:
        """The largest batch at which a balance finds a placement, and at the next larger one does not; 0 where it finds
        none at the least batch.

        Args:
            sure: the largest batch for which a placement is known, if there is one.
        """
        batches, fits, refused = self.batches, Full(), 0
        growth = 2 if self.asked.options else 1  # without options there is one placement: its own plans say it all
        number = 0
        while True:
            after = batches.after(sure.number)
            if not after or after == refused:
                if fits.number == sure.number:
                    return fits
                number = sure.number
            elif not refused:
                number = max(after, batches.up_to(min(growth * sure.number, batches.most)))
            elif fits.number == number:  # it is larger than any plan has said: the next try is in the middle
                number = max(after, batches.up_to((sure.number + refused) // 2))
            else:
                number = after
            tried = self.tried[number] = self.at(number, sure.pipeline)
            found = tried.full
            if tried.balanced is not None:
                fits = Full(number, tried.balanced.pipeline)
            else:
                refused = number
                if number == sure.number:  # its passes do not make a placement that was known at that batch
                    sure, found = fits, Full()
            if refused and found.number >= refused:
                found = found._replace(number=batches.up_to(refused - 1))
            sure = max(fits, sure, found, key=_number)

    def beyond(self, number: int) -> str:
        """Why the batch that was found is the largest."""
        after = self.batches.after(number)
        return f"{self.batches.rows(after):,} rows: {self.tried[after].missing}" if after else self.batches.end

    def at(self, number: int, known: str = "") -> Tried:
        """A balance at a batch.

        Args:
            number: of the batch.
            known: the passes of a placement, to be tried first.

        Raises:
            KeyboardInterrupt: Ctrl-C ended its search.
        """
        balancing = Balancing(self.asked._replace(program=self.batches.at(number), known=known))
        try:
            balanced = balancing.run()
        except Refused as refused:
            if refused.interrupted:
                raise KeyboardInterrupt from None
            full = [self.full(balancing.plans, placed, number) for placed in refused.placed]
            return Tried(None, refused.missing, max(full, default=Full(), key=_number))
        if balancing.stopped:
            raise KeyboardInterrupt
        return Tried(balanced, "", self.full(balancing.plans, balanced.program, number))

    def full(self, plans: Plans, placed: Program, number: int) -> Full:
        """The largest batch at which the plan of a placement keeps within the limits.

        Args:
            plans: of the program.
            placed: the placement.
            number: of the batch at which it was found.
        """
        batches, given = self.batches, {str(device): limit for device, limit in plans.limits.items()}

        def excess(number: int) -> int:
            """By how many bytes the device that is the fullest exceeds its limit; less than 0 where it does not."""
            peaks = plans.judged(placed.with_(dims=batches.dims(number)), timed=False).peaks
            return max([nbytes - given[device] for device, nbytes in peaks.items() if device in given], default=0)

        last = last_within(excess, number, batches.least, batches.most)
        return Full(batches.up_to(last), " | ".join(placed.history[len(self.asked.program.history) :]))


def _number(full: Full) -> int:
    """The number of a batch."""
    return full.number


def last_within(excess: Callable[[int], int], start: int, least: int, most: int) -> int:
    """The last number at which there is no excess, beside one at which there is; *least* - 1 where there is excess at
    all.

    Args:
        excess: grows nearly as a straight line with the number.
        start: the number to begin with.
        least: the first number.
        most: the last one.
    """
    low, high, number = least - 1, most + 1, start
    known: dict[int, int] = {}
    while high - low > 1:
        known[number] = excess(number)
        low, high = (number, high) if known[number] <= 0 else (low, number)
        number = _by_line(known, number) if len(known) <= _BY_LINES else _halved(low, high, known)
        number = min(max(number, low + 1), high - 1)
    return low


def _halved(low: int, high: int, known: Mapping[int, int]) -> int:
    """The middle between the two, or beyond what is known where one of them is not."""
    if high not in known:
        return 2 * low
    return (low + high) // 2 if low in known else high // 2


def _by_line(known: Mapping[int, int], number: int) -> int:
    """The last number without excess on the line through the two known ones between which excess begins, or that are
    nearest to where it does; twice the number, or half of it, where no line says so."""
    points = sorted(known.items())
    fit = sum([excess <= 0 for _, excess in points])
    first = min(max(fit - 1, 0), max(len(points) - 2, 0))
    (a, least), (b, most) = points[first], points[min(first + 1, len(points) - 1)]
    if most <= least:
        return 2 * number if known[number] <= 0 else number // 2
    return a + (b - a) * -least // (most - least)
