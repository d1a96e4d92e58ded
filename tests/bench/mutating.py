"""What notices single changes of a plan's waits, records, frees, copies and receive buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import models
import mutants
import nets
from runnable import captured, sgd, spread

from graphir import passes
from graphir.ir.plan import Plan


def _plans() -> Iterator[Plan]:
    for seed in range(1, 4):
        yield passes.emit(spread(nets.random_program(seed, ops=12)))
    example = models.mlp()
    yield passes.emit(spread(captured(example, sgd(example.model.parameters()))))
    for seed in range(16):
        yield mutants.to_and_fro(seed)


def rows() -> Iterator[str]:
    """The verdicts on every mutant of four plans with two replicas on four devices, and of 16 with many copies."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for plan in _plans():
        for change, counted in mutants.counts(plan).items():
            found.setdefault(change, Counter()).update(counted)
    yield f"| instruction | change | mutants | {' | '.join(mutants.VERDICTS)} |"
    yield "| --- | --- " + "| ---: " * (len(mutants.VERDICTS) + 1) + "|"
    total: Counter[str] = Counter()
    for kind, change in [(kind, change) for kind in mutants.KINDS for change in mutants.CHANGES]:
        if (kind, change) not in found:
            continue
        total += found[kind, change]
        yield _row(kind, change, found[kind, change])
    yield _row("all", "", total)


def _row(kind: str, change: str, counted: Counter[str]) -> str:
    numbers = [counted[column] for column in ("mutants", *mutants.VERDICTS)]
    return f"| {kind} | {change} | {' | '.join(map(str, numbers))} |"
