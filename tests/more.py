"""Seeded problems, and series of what a balance may use, each of which allows more than the one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from random import Random
from typing import Any, Final, NamedTuple

import by_hand

import graphir
from graphir import Program, passes
from graphir.errors import PassError
from graphir.ir.device import DeviceName

__all__ = ["BUDGETS", "LIMITS", "OPTIONS", "Asked", "problem", "steps", "worst"]

BUDGETS: Final = (60, 125, 250, 500)
LIMITS: Final = (1.0, 1.1, 1.25, 1.5)
OPTIONS: Final = tuple(accumulate([(option,) for option in ("shift", "park", "recompute", "state", "share_storage")]))

_SHARES: Final = (0.9, 0.8, 0.7, 0.6, 0.55)
_UNLIKE: Final = graphir.Topology.of("rtx4090", "rtx3090", "rtx4090", "rtx3090")


class Asked(NamedTuple):
    """A program, and where it is to be placed."""

    program: Program
    limits: Mapping[str, int]
    topology: graphir.Topology

    def step(self, evaluations: int, times: float = 1.0, **options: Any) -> float:
        """Seconds of the step that a balance finds within so many times the limits; infinite ones where it refuses."""
        limits: dict[DeviceName, int | str] = {device: int(times * nbytes) for device, nbytes in self.limits.items()}
        try:
            found = passes.balance(self.program, limits, topology=self.topology, evaluations=evaluations, **options)
        except PassError as refusal:
            assert "no placement within the limits was found" in refusal.what
            return inf
        return found.after


def problem(seed: int) -> Asked:
    """A small step on one to four devices, in one, two or four micro-batches."""
    rng = Random(seed)
    parts = rng.choice([1, 1, 2, 4])
    program = by_hand.unlike(rng.choice(by_hand.KINDS), rng, rng.randint(3, 3 + 4 // parts), parts)
    share, devices = rng.choice(_SHARES), rng.choice([1, 2, 2, 3, 4])
    topology = rng.choice([graphir.Topology.named("h200x8"), _UNLIKE])
    need = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
    return Asked(program, {f"gpu:{device}": int(share * need) for device in range(devices)}, topology)


def steps(asked: Asked, evaluations: int) -> dict[str, list[float]]:
    """By what grows, seconds of steps."""
    now = asked.step(evaluations)
    return {
        "budget": [now if budget == evaluations else asked.step(budget) for budget in BUDGETS],
        "limits": [now, *[asked.step(evaluations, times) for times in LIMITS[1:]]],
        "options": [*[asked.step(evaluations, options=options) for options in OPTIONS[:-1]], now],
    }


def worst(seconds: Sequence[float]) -> float:
    """The longest step, in steps that less was enough for; infinite where only less was enough."""
    least = list(accumulate(seconds, min))
    return max([now / before if before < inf else 1.0 for before, now in zip(least, seconds[1:], strict=False)])
