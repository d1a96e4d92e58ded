"""Orders of micro-batches within limits, against the schedules' own orders, and against less room."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean
from typing import Final, NamedTuple

from limits import limited
from random_cuts import SCHEDULES, Planned, cut, least_of, planned

from graphir import passes
from graphir.ir.program import Program

__all__ = ["rows"]

CUTS: Final = 200
MULTIPLES: Final = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Of the least limits."""

MACHINES: Final[dict[str, str | None]] = {"threads, nominal costs": None, "8 H200s, as issued": "h200x8"}


class _Found(NamedTuple):
    """Of one cut, by the schedule that was asked for: steps within the peaks of an own order, as shares of the shortest
    own order that keeps within them; and by how much the longest exceeds the shortest within smaller limits."""

    shares: dict[str, list[float]]
    more: float


def rows(count: int = CUTS) -> Iterator[str]:
    """A row for each machine and schedule."""
    yield (
        "| machine | schedule | cuts | step against the shortest own order, mean | longest | at most "
        "| cuts of longer steps with more room | by at most |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, machine in MACHINES.items():
        found = [_found(cut(seed), machine) for seed in range(count)]
        longer = [one.more for one in found if one.more > 1 + 1e-9]
        for schedule in SCHEDULES:
            shares = [share for one in found for share in one.shares[schedule]]
            default = schedule == "zero_bubble"
            yield (
                f"| {name} | {schedule} | {count} | {mean(shares):.3f} | {limited(f'{max(shares):.4f}', at_most=1.0)} "
                f"| 1.00 | {len(longer) if default else ''} "
                f"| {f'{max(longer, default=1.0) - 1:.2%}' if default else ''} |"
            )


def _found(program: Program, machine: str | None) -> _Found:
    own = {
        name: planned(passes.pipeline(program, name, topology=machine), machine)  # type: ignore[arg-type]
        for name in SCHEDULES
    }
    shares = {name: [_share(program, name, machine, own, own[name])] for name in SCHEDULES}
    shares["zero_bubble"] += [_share(program, "zero_bubble", machine, own, own[name]) for name in SCHEDULES[:2]]
    least = least_of(program, machine)
    taken = []
    for multiple in MULTIPLES:
        limits = {device: int(multiple * nbytes) for device, nbytes in least.items()}
        taken.append(planned(passes.pipeline(program, limits=limits, topology=machine), machine).seconds)
    return _Found(shares, max([seconds / min(taken[: n + 1]) for n, seconds in enumerate(taken)]))


def _share(program: Program, schedule: str, machine: str | None, own: dict[str, Planned], of: Planned) -> float:
    """The step within the peaks of one plan, as a share of the shortest own order that the schedule may take."""
    found = passes.pipeline(program, schedule, limits=of.peaks, topology=machine)  # type: ignore[arg-type]
    allowed = SCHEDULES if schedule == "zero_bubble" else (schedule,)
    best = min([own[name].seconds for name in allowed if own[name].keeps(of.peaks)])
    return planned(found, machine).seconds / best
