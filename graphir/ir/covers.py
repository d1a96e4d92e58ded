"""Covers: for which sizes a program is the step that eager PyTorch takes.

A recording at a few sizes does not show which branch the model's Python takes at another size. The tests that Python
made of sizes do: each test that compares polynomials or remainders is a guard. A test of any other number has no guard,
and the program then holds for the recorded sizes alone.
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
    """The sizes for which a program holds: the sizes for which every guard holds, and the recorded sizes.

    ``print(program.covers)`` says them in words.

    Attributes:
        guards: what the dimensions must satisfy.
        fixed: why some sizes are plain numbers; empty if sizes follow every named dimension.
        only: why guards do not say all that Python asks, so that the program holds for recorded sizes alone; empty if
            they do.
        recorded: sizes at which the step was recorded and that the guards don't cover; all recorded sizes if *only* is
            set. Each is a value for each dimension of one replica, without prefix.
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
        """These covers with other guards."""
        return replace(self, guards=tuple(guards))

    def with_recorded(self, points: Iterable[Dims]) -> Covers:
        """These covers with more recorded sizes: those that are not covered yet."""
        new = [point for point in points if self.unknown(point) or self.broken(point) is not None]
        return replace(self, recorded=(*self.recorded, *new))

    def broken(self, dims: Dims) -> Guard | None:
        """The first guard that does not hold at *dims*; None if all hold, or if *dims* were recorded."""
        failing = next((guard for guard in self.guards if not guard.holds(dims)), None)
        return None if failing is None or self._is_recorded(dims) else failing

    def unknown(self, dims: Dims) -> str:
        """Why only a witness can tell whether the program holds at *dims*; empty if guards or recordings tell."""
        if not self.only or self._is_recorded(dims):
            return ""
        return f"the program holds for recorded sizes alone ({self.recorded_text()}): {self.only}"

    def recorded_text(self) -> str:
        """The first few recorded sizes: ``batch 4, length 10; batch 11, length 9``."""
        texts = [point_text(point) for point in self.recorded]
        more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        return "; ".join([*texts[:_SHOWN], *more])

    def _is_recorded(self, dims: Dims) -> bool:
        """Whether the sizes of each replica were recorded."""
        replicas: dict[str, dict[str, int]] = defaultdict(dict)
        for dim, size in dims.items():
            replicas[prefix_of(dim)][base_name(dim)] = size
        return all(any(sizes.items() <= point.items() for point in self.recorded) for sizes in replicas.values())
