"""A search with all options, and searches with fewer of them::

    options                 shift, park, recompute      N placements are looked at
    each of its beginnings  shift, park                 N placements are looked at
                            shift                       N placements are looked at

A search with more options looks at other placements, and may miss a placement that a search with fewer options finds in
an equal number of looks. So where a number of placements is the budget, there is a search of its own for each beginning
of the options, in their one order: one more option at the end of them never makes a step longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import get_args

from graphir.errors import PassError

from .asked import Asked, Option
from .balancing import Balancing
from .refusals import Refused
from .report import Balanced

__all__ = ["best_of"]


def best_of(balancing: Balancing) -> Balanced:
    """The best placement that is found, of all searches.

    Args:
        balancing: the search with all options.

    Raises:
        Refused: none is within the limits.
    """
    found: list[Balanced] = []
    refused: Refused | None = None
    try:
        found.append(balancing.run())
    except Refused as refusal:
        refused = refusal
    for asked in _with_fewer(balancing.asked):
        if balancing.stopped:
            break
        try:
            with suppress(PassError):  # an option that is left out may be what a pin needs
                fewer = Balancing(asked, balancing.figures.since)
                one = fewer.found(fewer.searched())
                found += [] if one is None else [one]
        except KeyboardInterrupt:  # as in a search: the best so far
            if not found:
                raise
            balancing.interrupted = True
    if not found:
        assert refused is not None
        try:
            raise refused
        finally:
            del refused  # else this frame and the traceback of the refusal would hold each other
    best = min(found, key=lambda one: one.after)
    others = [attempt.grouped.problem for attempt in balancing.searches.begun()]  # the bound is of all options
    return replace(best, evaluated=sum([one.evaluated for one in found]), reasons=best.reasons._replace(others=others))


def _with_fewer(asked: Asked) -> Iterator[Asked]:
    """The same with each beginning of the options, the longest first; none where seconds are the budget, or where one
    placement alone will do."""
    options = [option for option in get_args(Option) if option in asked.options]
    if asked.budget.evaluations is not None and not asked.only:
        for most in range(len(options) - 1, 0, -1):
            yield asked._replace(options=tuple(options[:most]))
