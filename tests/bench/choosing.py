"""How near a search comes to the best placement there is, on seeded problems; and how near the bound is to that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf, isfinite
from typing import Final, NamedTuple

import torch
from graphir.passes.choice.bound import lower_bound
from graphir.passes.choice.groups import Wanted, grouped
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import Problem
from graphir.passes.choice.search import search
from instances import INSTANCES, instance
from limits import limited
from oracle.exact import solve
from test_zoo import ROWS, capture, model_of

import graphir
from graphir import passes
from graphir.ir.device import gpu

__all__ = ["rows", "zoo_rows"]

SECONDS: Final = 20.0
"""That the solver may take for one problem."""

PROVEN: Final = 20
"""Of how many problems the solver has to prove the optimum."""

NEAR: Final = 1.0
FAR: Final = 3.0
"""Per cent above the optimum that a search may end: on nine of ten problems, and on any."""

NEAR_PART: Final = 0.9


class Compared(NamedTuple):
    """A problem: seconds that a step takes at least, or infinite ones where nothing keeps within the limits.

    Attributes:
        searched: of what the search finds.
        best: of what the solver finds.
        bound: of any, by the linear program.
        least: of any, by the solver.
        proven: whether the solver has proven its own to be the best.
        spent: seconds of the solver.
    """

    searched: float
    best: float
    bound: float
    least: float
    proven: bool
    spent: float

    @property
    def above(self) -> float:
        """By how many per cent the search is above the best; 0 where both have found none."""
        return 0.0 if self.searched == self.best else 100 * (self.searched / self.best - 1)

    @property
    def gap(self) -> float:
        """By how many per cent the best is above the bound."""
        return 100 * (self.best / self.bound - 1)

    def __str__(self) -> str:
        proof = "yes" if self.proven else f"at least {_ms(self.least)}"
        above = limited(f"{self.above:.2f}", at_most=FAR) if isfinite(self.best) else ""
        gap = f"{self.gap:.1f}" if isfinite(self.best) else ""
        figures = (_ms(self.searched), _ms(self.best), proof, f"{self.spent:.1f}", above, _ms(self.bound), gap)
        return " | ".join(figures)


def rows() -> Iterator[str]:
    """A row for each problem: first the search, then the solver, which begins with what the search has found."""
    yield "| problem | search, ms | best, ms | proven | solver, s | search above, % | bound, ms | best above that, % |"
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"
    found = []
    for given in INSTANCES:
        found.append(_compared(instance(given)))
        yield f"| {given.name} | {found[-1]} |"
    proven = [one for one in found if one.proven]
    gaps = [one.gap for one in found if isfinite(one.best)]
    near = sum(one.above <= NEAR for one in proven) / max(len(proven), 1)
    yield ""
    part = limited(f"{near:.2f}", at_least=NEAR_PART)
    yield (
        f"{limited(str(len(proven)), at_least=PROVEN)} are proven; on {part} of these the search ends within "
        f"{NEAR:.0f} % of the best. The best is {max(gaps):.1f} % above the bound at most, "
        f"{sum(gaps) / len(gaps):.1f} % on average."
    )


ZOO: Final = 9
"""Every which model of the zoo is placed."""

GROUPS: Final = 12
ZOO_SECONDS: Final = 60.0
"""How many groups its problems have, and what the solver may take for one, with one thread: all take an hour."""


def zoo_rows() -> Iterator[str]:
    """Models of the zoo on 2, 4 and 8 devices of the topology ``cpu``, each with a share of what one would need."""
    yield (
        "| model | operators | placed | of | proven | search above the solver, at most, % | only the solver placed "
        "| best above the bound, at most, % |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in list(ROWS)[::ZOO]:
        row = ROWS[name]
        model = model_of(row)
        optimizer = torch.optim.AdamW(model.parameters())
        program = capture(row, model, optimizer, row.batch_dims)
        found = [_compared(problem, ZOO_SECONDS, workers=1) for problem in _problems(program)]
        placed = [one for one in found if isfinite(one.best) and isfinite(one.searched)]
        missed = sum(isfinite(one.best) and not isfinite(one.searched) for one in found)
        above = max([one.above for one in placed], default=0.0)
        gap = max([one.gap for one in placed], default=0.0)
        yield (
            f"| {name} | {len(program.step.ops)} | {len(placed)} | {len(found)} | {sum(one.proven for one in found)} "
            f"| {limited(f'{above:.2f}', at_most=FAR)} | {limited(str(missed), at_most=0)} | {gap:.1f} |"
        )


def _problems(program: graphir.Program) -> Iterator[Problem]:
    topology = graphir.Topology.named("cpu")
    need = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
    for count in (2, 4, 8):
        devices = tuple([gpu(index) for index in range(count)])
        for share in (0.9, 0.7, 0.5):
            limits = dict.fromkeys(devices, int(share * need))
            wanted = Wanted(limits, devices, ("shift", "park", "recompute"), {}, {})
            yield grouped(program, wanted, topology, None, 1, GROUPS).problem


def _compared(problem: Problem, seconds: float = SECONDS, workers: int = 2) -> Compared:
    found = search(Outcomes(problem), seconds=2.0, evaluations=None, seed=0)
    hint = None if found.outcome.over else found.choice
    begun = time.perf_counter()
    best = solve(problem, seconds, hint, workers)
    return Compared(
        searched=found.outcome.seconds if hint else inf,
        best=best.outcome.seconds if best.outcome else inf,
        bound=lower_bound(problem).seconds,
        least=best.bound,
        proven=best.proven,
        spent=time.perf_counter() - begun,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if isfinite(seconds) else "none"
