"""A balance of a program with replicas that also chooses their shares of the batch::

    likely shares ──▶ a short balance by each ──▶ a longer one by the best of them

Shares come first: ``replicate{devices=[0, 1], shares=[3, 1]}`` on the replicas that there are, then the placement.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from graphir.ir.names import replica_index
from graphir.ir.program import Program

from ..base import build
from ..replicas import batches_of
from ..replicate import Replicate
from .asked import Asked
from .balancing import Balancing
from .fewer import best_of
from .figures import Before
from .proven import proven
from .refusals import Refused
from .report import Balanced
from .shares import likely_shares

__all__ = ["balanced"]

_EACH: Final = 0.5
"""The part of the budget in which all shares are tried; the best has the rest."""

_FAR: Final = 1.1
"""How many times the limits the nearest plans hold where no further shares are tried."""


def balanced(asked: Asked) -> Balanced:
    """The best placement that is found; by other shares, too, where options allow them.

    Raises:
        Refused: none is within the limits.
        PassError: options allow other shares, and the program takes none.
    """
    if "shares" not in asked.options:
        return best_of(Balancing(asked))
    found = ByShares(asked).run()
    changed = () if found.program.shares == asked.program.shares else found.program.shares
    return replace(found, pipeline=" | ".join(found.program.history[len(asked.program.history) :]), shares=changed)


class ByShares:
    """Balances of a program by several shares.

    Args:
        asked: what a caller asks.

    Attributes:
        tries: the program as it is, and by each likely share.
        since: the step as it is.
        found: the placements.
        refused: why there are none by some shares.
        interrupted: whether the user has had enough of it.

    Raises:
        PassError: the program takes no other shares.
    """

    def __init__(self, asked: Asked) -> None:
        self.asked, program = asked, asked.program
        self.tries = [program, *[_reshared(program, shares) for shares in likely_shares(asked)]]
        self.since: Before | None = None
        self.found: list[Balanced] = []
        self.interrupted = False
        self.refused: list[Refused] = []

    def run(self) -> Balanced:
        """The best placement.

        Raises:
            Refused: none is within the limits.
        """
        given, *others = self.tries
        each = _EACH / len(self.tries) if others else 1.0
        self.by(given, each)
        for program in others if self.found else others[::-1]:  # the last ones hold the least of the limits
            if not self.ended():
                self.by(program, each)
        if others and not self.ended():
            best = self.best().program if self.found else self.nearest().program
            self.by(next(program for program in self.tries if program.shares == best.shares), 1 - _EACH)
        if not self.found:
            raise self.nearest()
        return replace(self.best(), evaluated=sum([one.evaluated for one in self.found]))

    def ended(self) -> bool:
        """Whether the user has had enough of it, or the shares that hold the least exceed the limits by far, too."""
        far = not self.found and len(self.refused) > 1 and _times(self.nearest()) > _FAR
        return self.interrupted or far

    def best(self) -> Balanced:
        """The fastest placement so far."""
        return min(self.found, key=lambda one: one.after)

    def by(self, program: Program, part: float) -> None:
        """Find the best placement of a program by its shares in a part of the budget, or why there is none."""
        balancing = self.balancing(program, part)
        self.since = self.since or balancing.before()
        try:
            self.found.append(best_of(balancing))
        except Refused as refused:
            self.refused.append(refused)
        except KeyboardInterrupt:  # as in a search: the best so far
            if not self.found:
                raise
            self.interrupted = True
        self.interrupted = self.interrupted or balancing.stopped

    def balancing(self, program: Program, part: float) -> Balancing:
        """What places a program in a part of the budget."""
        budget = self.asked.budget
        looks = None if budget.evaluations is None else max(round(part * budget.evaluations), 1)
        budget = budget._replace(seconds=part * budget.seconds, evaluations=looks)
        return Balancing(self.asked._replace(program=program, budget=budget), self.since)

    def nearest(self) -> Refused:
        """The refusal that names the least limits. Of all shares is certain what is of one row for each replica."""
        refused = min(self.refused, key=_times)
        program, wanted = self.asked.program, self.asked.wanted()
        rows = dict.fromkeys(batches_of(program, program.dims, program.replicas), 1)
        least = program.with_(dims={**program.dims, **rows})
        refused.proven = proven(least, wanted.limits, wanted.devices, wanted.options)
        refused.reckoned = 1.0
        return refused


def _times(refused: Refused) -> float:
    """How many times the limits the least are within which a plan keeps."""
    return min(map(refused.times, refused.nearest))


def _reshared(program: Program, shares: tuple[int, ...]) -> Program:
    """The program by other shares, as its history says it."""
    devices = tuple(map(replica_index, program.replicas))
    return build(Replicate, devices=devices, reduction=program.reduction, shares=shares).recorded(program)
