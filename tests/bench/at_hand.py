"""What a placement costs on the machine at hand: the one by default, and the one that was chosen for another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from limits import limited
from linked import MODELS, captured
from linked import limits as limits_of
from pretended import MACHINES, pretended

import graphir
from graphir import Topology, passes
from graphir.errors import PassError
from graphir.ir.program import Program

__all__ = ["rows"]

LAYERS: Final = 8
SHARES: Final = (0.6, 0.7, 0.8, 0.9, 0.95)
"""Of what one device needs: limits are the least of these within which a placement is found."""

EVALUATIONS: Final = 300


def rows() -> Iterator[str]:
    """The table: three pretended machines, six models."""
    yield "| machine | model | limit each | step, ms | by default | at most | for h200x8 |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for name, probe in MACHINES.items():
        with pretended(probe):
            for model in MODELS:
                yield _row(name, model, captured(model, LAYERS), len(probe.there))


def _row(name: str, model: str, program: Program, cards: int) -> str:
    for share in SHARES:
        limits = limits_of(program, cards, share)
        own = _seconds(program, limits, Topology.here())
        if own is None:
            continue
        by_default, elsewhere = (_seconds(program, limits, topology) for topology in (None, "h200x8"))
        ratio = limited(f"{0 if by_default is None else by_default / own:.2f}", at_most=1.0, at_least=1.0)
        other = "none found" if elsewhere is None else f"{elsewhere / own:.2f}"
        return f"| {name} | {model} | {share} | {own * 1e3:.2f} | {ratio} | 1.00 | {other} |"
    return f"| {name} | {model} | none found within {SHARES[-1]} | | | | |"


def _seconds(program: Program, limits: dict[str, int], topology: Topology | str | None) -> float | None:
    """What a step takes at hand, whatever machine it was placed for; None where no placement is found."""
    try:
        found = passes.balance(program, limits, topology=topology, evaluations=EVALUATIONS)
    except PassError:
        return None
    return graphir.estimate(passes.emit(passes.Pipeline(found.then)(found.program))).seconds
