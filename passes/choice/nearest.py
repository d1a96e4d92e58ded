"""The limits that a refusal names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from .asked import Asked
from .balancing import Balancing
from .refusals import Refused

__all__ = ["nearest_limits"]

_TRIES: Final = 4
_TRYING: Final = 0.2
_LARGER: Final = 1.05
_EMITTED_AGAIN: Final = 0.25
"""How many limits a refusal may try before it names some, and the part of the budget for all of them and for each:
there is a placement within them, and a balance that begins anew has to find one. Where it finds none within any limits
that are known, limits so many times as large come next. No more are tried behind so large a part of the plans that were
judged before."""

_ENDS: Final = 1.45
_OF_THE_REST: Final = 0.5
_SHORTEST: Final = 0.02
"""How many times the seconds of the search a refusal may take, of what is left of these the part for a search within
other limits, which has a reading and plans beside it, and how long that has to be at least, in seconds of the search:
in large programs, one plan takes as long as a search among few groups."""


def nearest_limits(asked: Asked, refused: Refused, since: float) -> tuple[Mapping[str, int], bool]:
    """Limits for a refusal to name, and whether a placement within them is found: those within which plans keep are
    tried, the least first, and then larger ones.

    Args:
        asked: what was asked.
        refused: why there is no placement.
        since: when the balance began, as :func:`time.perf_counter` has it.
    """
    begun, budget = time.perf_counter(), asked.budget
    left = _ENDS * budget.seconds - (begun - since)
    shorter = budget._replace(seconds=min(_TRYING * budget.seconds, _OF_THE_REST * left))
    if budget.evaluations is not None:
        shorter = budget._replace(evaluations=max(round(_TRYING * budget.evaluations), 1))
    limits: Mapping[str, int] = min(refused.nearest, key=refused.times)
    if budget.evaluations is None and shorter.seconds < _SHORTEST * budget.seconds:
        return limits, False
    emitted = 0
    for number in range(_TRIES):
        late = time.perf_counter() - begun > shorter.seconds if budget.evaluations is None else False
        if refused.interrupted or (number and (late or emitted > _EMITTED_AGAIN * refused.emitted)):
            break
        try:
            trial = Balancing(asked._replace(program=refused.program, limits=limits, budget=shorter))
            if trial.keeps():
                return limits, True
            emitted += trial.plans.emitted
        except KeyboardInterrupt:  # there is something to say already
            break
        tried = refused.times(limits)
        more = [one for one in refused.nearest if refused.times(one) > tried]
        larger = {device: int(_LARGER * nbytes) for device, nbytes in limits.items()}
        limits = min(more, key=refused.times, default=larger)
    return limits, False
