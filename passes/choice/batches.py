"""The batches that a program takes: how many rows a step has, and what its dimensions are then."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import lcm
from typing import Final

from graphir.analysis.refused import refused_at
from graphir.errors import PassError
from graphir.ir.program import Program
from graphir.ir.size import BATCH, LARGEST

__all__ = ["Batches"]

_MOST_BYTES: Final = 16 * LARGEST
"""Of all storages of a step together, each once: 4 PiB."""


class Batches:
    """The batches of a program, each by its number.

    The number of a batch is the rows of one share of one micro-batch, or of another part into which a step cuts its
    batch: at number 5 and shares 3 and 1, two micro-batches have 15 and 5 rows each, and a step has 40.

    Args:
        program: captured, replicated or sharded.

    Attributes:
        unit: the rows of a step for each number.

    Raises:
        PassError: the sizes of the program do not follow its batch, or its guards do not take the captured sizes.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.shares = dict(zip(program.replicas, program.shares or (1,) * len(program.replicas), strict=True))
        if fixed := [f"{prefix}{BATCH}" for prefix in self.shares if f"{prefix}{BATCH}" not in program.dims]:
            raise PassError(
                f"largest_batch: no size of {program.name!r} follows {fixed[0]!r}"
                + (f"; sizes are fixed: {program.covers.fixed}" if program.covers.fixed else ""),
                fix="capture the model so that its sizes follow the batch; "
                f"dimensions of the program: {', '.join(program.dims) or 'none'}",
            )
        if refused := refused_at(program, program.dims):
            raise PassError(f"largest_batch: {refused}", fix="give program.with_(dims=…) sizes that it takes")
        self.unit = program.parts * sum(self.shares.values())

    def rows(self, number: int) -> int:
        """The rows of a step, of all replicas and parts."""
        return number * self.unit

    def at(self, number: int) -> Program:
        """The program at a batch."""
        return self.program.with_(dims=self.dims(number))

    def dims(self, number: int) -> dict[str, int]:
        """The value of each dimension at a batch."""
        return {
            **self.program.dims,
            **{f"{prefix}{BATCH}": share * number for prefix, share in self.shares.items()},
        }

    @property
    def others(self) -> dict[str, int]:
        """The dimensions that no batch changes."""
        ours = {f"{prefix}{BATCH}" for prefix in self.shares}
        return {dim: size for dim, size in self.program.dims.items() if dim not in ours}

    def after(self, number: int) -> int:
        """The next larger batch that the guards take; 0 where there is none."""
        first = max(number + 1, self.least)
        return self._first(range(first, min(first + self._period, self.most + 1)))

    def up_to(self, number: int) -> int:
        """The largest batch that the guards take, of those up to a number; 0 where there is none."""
        return self._first(range(number, max(number - self._period, self.least - 1), -1))

    @property
    def end(self) -> str:
        """Why the program takes no batch above :attr:`most`."""
        beyond = self.dims(self.most + 1)
        return refused_at(self.program, beyond) or f"{self.rows(self.most + 1)} rows are more than any machine holds"

    @cached_property
    def least(self) -> int:
        """The number from which on batches are looked at: below it a guard does not hold."""
        return self._now - self._reach(self._now - 1, lambda more: self._holds(self._now - more))

    @cached_property
    def most(self) -> int:
        """The number up to which batches are looked at: above it a guard does not hold, or sizes are absurd."""
        return self._now + self._reach(LARGEST, lambda more: self._holds(self._now + more))

    @property
    def _now(self) -> int:
        """The captured batch."""
        prefix, share = next(iter(self.shares.items()))
        return max(self.program.dims[f"{prefix}{BATCH}"] // share, 1)

    @cached_property
    def _period(self) -> int:
        """Of so many neighbours, guards of remainders and of single numbers take one, if they take any."""
        guards = self.program.covers.guards
        return lcm(*[guard.modulus for guard in guards if guard.modulus]) + sum(g.relation == "!=" for g in guards)

    def _first(self, numbers: range) -> int:
        """The first of some numbers that the guards take."""
        return next((number for number in numbers if not refused_at(self.program, self.dims(number))), 0)

    def _holds(self, number: int) -> bool:
        """Whether guards that bound sizes hold at a batch, and sizes are real ones."""
        dims = self.dims(number)
        if max(dims.values()) > LARGEST:
            return False
        bounds = [guard for guard in self.program.covers.guards if not guard.modulus and guard.relation != "!="]
        if not all(guard.holds(dims) for guard in bounds):
            return False
        blobs = self.program.step.blobs
        return sum([blob.nbytes(dims) for name, blob in blobs.items() if blob.storage == name]) <= _MOST_BYTES

    @staticmethod
    def _reach(most: int, holds: Callable[[int], bool]) -> int:
        """The largest number up to *most* from 0 to which all hold, where all that hold stand together."""
        low, high = 0, 1
        while high <= most and holds(high):
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low
