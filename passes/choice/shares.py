"""Shares of a batch that are worth a balance: by how fast replicas are, and by how much their devices may hold.

::

    rows of every replica      1     2     4  …  all     the program as it is, at a few sizes
    seconds of replica r       t1    t2    t4 …  tn      rows that take equally long for all replicas
    part of its limit          p1    p2    p4 …  pn      rows that fill all devices alike, or that fit
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from graphir.analysis.cost import operator_costs
from graphir.analysis.memory import memory
from graphir.analysis.refused import refused_at
from graphir.errors import PassError
from graphir.ir.device import Device
from graphir.ir.program import Program
from graphir.ir.shares import divided, read_shares

from ..replicas import batches_of
from .asked import Asked

__all__ = ["likely_shares"]

_SIZES: Final = 9
"""How many sizes of a replica are reckoned, from one row to all."""

_LARGEST: Final = 64
"""The largest sum of shares that are tried as the ratio of some rows."""

_CLOSE: Final = 1.005
"""How many times as many rows as by the nearest shares a replica may have by smaller ones."""

_HALVINGS: Final = 50

Rows: TypeAlias = NDArray[np.float64]
"""Of each replica, not rounded."""


class Curves(NamedTuple):
    """What a number of rows comes to for each replica.

    Attributes:
        rows: some sizes of a replica, ascending; the last is that of all replicas together.
        seconds: for each replica, how long its device computes at each size, until all wait for each other.
        parts: for each replica, what its device holds at each size, as a part of its limit; 0 without one.
    """

    rows: Rows
    seconds: NDArray[np.float64]
    parts: NDArray[np.float64]

    def likely(self) -> list[tuple[Rows, Rows]]:
        """Rows for which replicas compute equally long, of those that fit, if all do; the same, whatever devices hold;
        rows that fill all devices alike; and the mean of the last two. Each with the most rows of a replica."""
        total = self.rows[-1]
        fit, any_ = np.floor(self._at(self.parts, 1.0)), np.full(len(self.parts), total)
        fast, even = self._level(self.seconds, any_), self._level(self.parts, any_)
        fitting = [(self._level(self.seconds, fit), fit)] if fit.sum() >= total else []
        return [*fitting, (fast, any_), ((fast + even) / 2, any_), (even, any_)]

    def _level(self, curves: NDArray[np.float64], most: Rows) -> Rows:
        """All rows, so divided that the largest value of the replicas' *curves* is the least; none has more than
        *most*."""
        low, high = 0.0, float(curves.max())
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = np.minimum(self._at(curves, middle), most).sum() >= self.rows[-1]
            low, high = (low, middle) if enough else (middle, high)
        found = np.minimum(self._at(curves, high), most)
        scaled: Rows = found * self.rows[-1] / found.sum()
        return scaled

    def _at(self, curves: NDArray[np.float64], value: float) -> Rows:
        """The most rows at which each curve is no larger than a value; one at least."""
        return np.array([np.interp(value, curve, self.rows) for curve in curves])


def likely_shares(asked: Asked) -> list[tuple[int, ...]]:
    """Unlike shares that are worth a balance beside those of the program, the most likely first.

    Raises:
        PassError: the program has one replica, or sizes that do not follow the batch.
    """
    program = asked.program
    try:
        if len(program.replicas) == 1:
            fix = "replicate it over several devices, or leave shares out"
            raise PassError(f"program {program.name!r} has one replica, which takes all of the batch", fix=fix)
        batches = batches_of(program, program.dims, program.replicas)
        curves = _curves(asked, batches)
    except PassError as e:
        raise PassError(f"balance: {e.what}", fix=f"{e.fix} of options") from None
    found = [_least(program, batches, rows, most) for rows, most in curves.likely()]
    return [shares for shares in dict.fromkeys(found) if shares not in ((), program.shares)]


def _curves(asked: Asked, batches: Sequence[str]) -> Curves:
    """What the program as it is comes to at some sizes."""
    program, topology, limits = asked.program, asked.topology, asked.wanted().limits
    total = sum([program.dims[batch] for batch in batches])
    sizes = sorted({round(size) for size in np.geomspace(1, total, _SIZES)})
    homes = [_home(program, prefix) for prefix in program.replicas]
    seconds, parts = np.zeros((2, len(batches), len(sizes)))
    for column, size in enumerate(sizes):
        dims = {**program.dims, **dict.fromkeys(batches, size)}
        speeds = {device: topology.speed(device).rates() for device in program.devices}
        costs = operator_costs(program.step, dims, speeds.__getitem__, asked.profile, asked.threads)
        busy: dict[Device, float] = defaultdict(float)
        for op, cost in zip(program.step.ops, costs, strict=True):
            if op.phase in ("forward", "backward"):  # reductions wait for the slowest replica, and updates for them
                busy[op.device] += cost.seconds
        held = memory(program, dims, threads=asked.threads, profile=asked.profile).peak
        seconds[:, column] = [busy[home] for home in homes]
        parts[:, column] = [held[home] / limits[home] if home in limits else 0.0 for home in homes]
    return Curves(np.array(sizes, float), np.maximum.accumulate(seconds, axis=1), np.maximum.accumulate(parts, axis=1))


def _home(program: Program, prefix: str) -> Device:
    """The gpu on which most of a replica's operators are."""
    own = [op for op in program.step.ops if any(name.startswith(prefix) for name in op.outputs)]
    return Counter([op.device for op in own if not op.device.is_host]).most_common(1)[0][0]


def _least(program: Program, batches: Sequence[str], rows: Rows, most: Rows) -> tuple[int, ...]:
    """The smallest shares, in lowest terms, that divide all *rows* about so, give no replica more than *most*, and
    leave each as many as the program takes; none where all would be equal, or there are none."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for number in range(len(rows), _LARGEST + 1):
        shares = tuple([max(round(share), 1) for share in (rows * number / rows.sum()).tolist()])
        counts = divided(round(rows.sum()), shares)
        dims = {**program.dims, **dict(zip(batches, counts, strict=True))}
        if 0 not in counts and (counts <= most).all() and not refused_at(program, dims):
            found.append((max(counts / rows), shares))
    nearest = min([excess for excess, _ in found], default=0.0)
    return next((read_shares(shares, len(shares)) for excess, shares in found if excess <= _CLOSE * nearest), ())
