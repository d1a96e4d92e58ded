"""Training steps as people write them, against the same functions run eagerly."""

from __future__ import annotations

import time
from collections.abc import Iterator

from limits import limited
from steps import STEPS, as_eager, replicated

__all__ = ["rows"]

REPLICATED = 18
"""How many of the steps at least two replicas stand for."""


def rows() -> Iterator[str]:
    """A row a step, and how many are equal and replicated."""
    yield "| step | five steps, two sizes, a short last batch | two replicas | seconds |"
    yield "| --- | --- | --- | ---: |"
    equal = spread = 0
    for name, make in STEPS.items():
        begun = time.perf_counter()
        differs, refused = as_eager(make), replicated(make)
        equal, spread = equal + (not differs), spread + (not refused)
        shown = differs or "equal to the last bit"
        yield f"| {name} | {shown} | {refused or 'alike'} | {time.perf_counter() - begun:.1f} |"
    whole = limited(str(equal), at_least=len(STEPS))
    yield f"| of {len(STEPS)} | {whole} equal | {limited(str(spread), at_least=REPLICATED)} replicated | |"
