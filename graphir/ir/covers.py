"""Covers: for which sizes a program is the step that eager PyTorch takes.

A recording at a few sizes says nothing about a branch that the model's Python takes at another one. What Python asked
of sizes says more: each test that compares polynomials or remainders is a guard. What Python computed otherwise has
no guard, and the program holds for the recorded sizes alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from .fitting import point_text
from .frozen import freeze, frozen_all
from .guard import Guard
from .names import base_name, prefix_of
from .size import Dims

__all__ = ["Covers"]

_SHOWN: Final = 4


@dataclass(frozen=True)
class Covers:
    """The sizes for which a program holds: those for which every guard holds, and the recorded ones.

    ``print(program.covers)`` says it in words.

    Attributes:
        guards: what the dimensions must satisfy.
        fixed: why sizes are plain numbers where they are; empty where they follow every named dimension.
        only: why the guards are not all that Python asks, so that the program holds for recorded sizes alone; empty
            where the guards are.
        recorded: sizes at which the step was recorded and that the guards don't cover, or all where *only* says why.
            One replica's, a value for each dimension, without prefix.
    """

    guards: tuple[Guard, ...] = ()
    fixed: str = ""
    only: str = ""
    recorded: tuple[Dims, ...] = ()

    def __post_init__(self) -> None:
        freeze(self, recorded=frozen_all)

    def __hash__(self) -> int:
        return hash((self.guards, self.fixed, self.only))

    def __str__(self) -> str:
        """For which sizes the program holds, and why not for others; a line for each reason."""
        lines = [f"{guard} ({guard.reason})" for guard in self.guards]
        if self.recorded:
            lines.append(f"{'recorded sizes alone' if self.only else 'and recorded'}: {self.recorded_text()}")
        lines += [reason for reason in (self.only, self.fixed and f"fixed: {self.fixed}") if reason]
        return "\n".join(lines) or "all sizes"

    def with_guards(self, guards: Iterable[Guard]) -> Covers:
        """The same with other guards."""
        return replace(self, guards=tuple(guards))

    def with_recorded(self, points: Iterable[Dims]) -> Covers:
        """The same with recorded sizes, as far as it does not cover them."""
        new = [point for point in points if self.unknown(point) or self.broken(point) is not None]
        return replace(self, recorded=(*self.recorded, *new))

    def broken(self, dims: Dims) -> Guard | None:
        """The first guard that does not hold at sizes that were not recorded; None where there is none."""
        failing = next((guard for guard in self.guards if not guard.holds(dims)), None)
        return None if failing is None or self._is_recorded(dims) else failing

    def unknown(self, dims: Dims) -> str:
        """Why nobody knows without a witness whether the program holds at *dims*; empty where it is known."""
        if not self.only or self._is_recorded(dims):
            return ""
        return f"the program holds for recorded sizes alone ({self.recorded_text()}): {self.only}"

    def recorded_text(self) -> str:
        """``batch 4, length 10; batch 11, length 9``, the first few."""
        texts = [point_text(point) for point in self.recorded]
        more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        return "; ".join([*texts[:_SHOWN], *more])

    def _is_recorded(self, dims: Dims) -> bool:
        """Whether the sizes of each replica were recorded."""
        replicas: dict[str, dict[str, int]] = defaultdict(dict)
        for dim, size in dims.items():
            replicas[prefix_of(dim)][base_name(dim)] = size
        return all(any(sizes.items() <= point.items() for point in self.recorded) for sizes in replicas.values())
