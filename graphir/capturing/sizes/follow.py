"""Sizes that follow named dimensions: which recordings of a step are taken, and which dimensions its sizes follow.

Where operators differ or a number is no polynomial, the program keeps the captured sizes and says why: in the
dimensions where that shows, if the others follow without them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from math import lcm
from typing import Final, NamedTuple

from ...errors import CaptureError
from ...ir.fitting import Grid, NotPolynomial, point_text
from ...ir.guard import Guard
from ...ir.size import BATCH, Dims, dimension
from ..step.again import run_until_alike
from ..step.recorded_step import Recording
from ..step.recording import Step
from .fit import Sizes, grown_dims
from .guards import guards_of, simplified, steady_in
from .thresholds import threshold_in

__all__ = ["Followed", "follow_dims"]

_IN_A_ROW: Final = 3
"""As many recordings in a row are of one step: one that alternates in so many turns, or fewer, is seen."""

_MOST_FURTHER: Final = 4
"""How many further recordings are taken."""


class _Threshold(NotPolynomial):
    """The operators follow a threshold of some size, so that none but the captured one is sure."""


class Followed(NamedTuple):
    """A step whose sizes follow dimensions, from recordings at several sizes.

    Attributes:
        sizes: of a step.
        dims: the captured value of each dimension that they follow.
        fixed: why they don't follow others; empty where there are none.
        guards: what the dimensions must satisfy.
        recordings: all that were taken.
        batch_dims: of each leaf that a forward-only step returns, the first dimension that grows with the batch; None
            where the step could be recorded at one batch only.
    """

    sizes: Sizes
    dims: dict[str, int]
    fixed: str
    guards: tuple[Guard, ...] = ()
    recordings: tuple[Recording, ...] = ()
    batch_dims: Sequence[int | None] | None = None

    def release(self) -> None:
        """Take the recordings apart, which nothing is to read any more."""
        for recording in self.recordings:
            recording.release()


def follow_dims(step: Step) -> Followed:
    """Record *step* at the sizes that are needed, and fit its numbers.

    Raises:
        CaptureError: no program can express the step.
    """
    taken = _Taken(step)
    followed = _follow(taken, dict(step.arguments.dims))
    missing = taken.missing_in_a_row(followed.sizes)
    run_until_alike(step, step.arguments.dims, named=False, times=missing, like=followed.sizes.recording)
    batch_dims: Sequence[int | None] | None
    if BATCH in followed.dims or BATCH not in step.arguments.dims or not followed.sizes.recording.returned:
        batch_dims = followed.sizes.batch_dims()
    else:
        grown = (grown_dims(followed.sizes.recording, other) for other in taken.at_other_batches())
        batch_dims = next((found for found in grown if found is not None), None)
    return followed._replace(recordings=tuple(taken.at.values()), batch_dims=batch_dims)


def _follow(taken: _Taken, dims: dict[str, int]) -> Followed:
    if not dims:
        return Followed(taken.sizes({}), {}, "no argument has a batch dimension")
    try:
        sizes, guards = taken.guarded(dims)
        return Followed(sizes, dims, "", guards)
    except NotPolynomial as e:
        if len(dims) == 1:
            return Followed(taken.sizes({}), {}, str(e))
        reason = str(e)
    alone: dict[str, int] = {}
    fixed: list[str] = []
    for dim, value in dims.items():
        try:
            taken.sizes({dim: value})
            alone[dim] = value
        except NotPolynomial as e:
            fixed.append(f"{dim} is fixed at {value}: {e}")
    if len(alone) == len(dims):
        fixed = [f"all but {BATCH} are fixed: {reason}"]
        alone = {BATCH: dims[BATCH]}
    try:
        sizes, guards = taken.guarded(alone)
        return Followed(sizes, alone, "; ".join(fixed), guards)
    except NotPolynomial as e:
        return Followed(taken.sizes({}), {}, "; ".join([*fixed, str(e)]))


class _Taken:
    """The recordings of a step, each taken once; the first is compared with another one at the same sizes.

    Attributes:
        step: what is recorded.
        at: the recordings, by the sizes of all dimensions.
        order: the sizes of all that were taken, in time, those that failed and the second one of the first included.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.at: dict[tuple[int, ...], Recording] = {}
        self.order: list[tuple[int, ...]] = []

    def guarded(self, dims: Mapping[str, int]) -> tuple[Sizes, tuple[Guard, ...]]:
        """The step's sizes as polynomials in *dims*, and what these must satisfy.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        sizes, otherwise = self._above_one(dims)
        above_one = [Guard(dimension(dim), ">=", 2, reason=why) for dim, why in otherwise.items()]
        return sizes, simplified([*above_one, *sizes.guards])

    def _above_one(self, dims: Mapping[str, int]) -> tuple[Sizes, dict[str, str]]:
        """The step's sizes as polynomials in *dims*, and what is otherwise where one of these is 1.

        A tensor with a dimension of 1 may be contiguous in several ways, so PyTorch may take a view of it where it
        copies larger ones; and some modules refuse it.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        ones = dict.fromkeys(dims, 1)
        try:
            return self.sizes(dims, ones), {}
        except _Threshold:
            raise
        except NotPolynomial as e:
            reason = str(e)
        sizes = self.sizes(dims)
        if len(dims) == 1:
            return sizes, dict.fromkeys(dims, reason)
        found = {}
        for dim in dims:
            try:
                self.sizes(dims, {**dims, dim: 1})
            except NotPolynomial as e:
                found[dim] = str(e)
        return sizes, found or {dim: reason for dim in dims if dim != BATCH}

    def sizes(self, dims: Mapping[str, int], check: Mapping[str, int] | None = None) -> Sizes:
        """The step's sizes as polynomials in *dims*; see :class:`graphir.ir.fitting.Grid` for *check*.

        Raises:
            NotPolynomial: they are none.
            CaptureError: no program can express the step.
        """
        grid = Grid(dims, check)
        try:
            return self._sizes(grid)
        except _Threshold:
            raise
        except NotPolynomial:
            nearer = self._nearer(grid, dims, check)
            if nearer is None:
                raise
        return self._sizes(nearer)

    def _nearer(self, grid: Grid, dims: Mapping[str, int], check: Mapping[str, int] | None) -> Grid | None:
        """Other points than those of *grid*, where Python's tests come out otherwise; None where these would not help.

        Which axis follows which dimension is guessed by their sizes: a wrong guess makes another grid, no wrong sizes.

        Raises:
            NotPolynomial: they come out otherwise at *check*.
        """
        extents = self.recording(self.step.arguments.dims).extents
        named = {size: dimension(dim) for dim, size in dims.items()}
        try:
            guards = list(guards_of(extents, lambda axis: named.get(axis.size, axis.size), [dims]))
        except NotPolynomial:
            return None
        chosen = slice(None if check is None else -1)  # of the points, those that the grid has chosen
        if all(guard.holds(point) for guard in guards for point in grid.points[chosen]):
            return None
        if check is not None and (broken := next((guard for guard in guards if not guard.holds(check)), None)):
            raise NotPolynomial(f"{broken} does not hold at {point_text(check)}: {broken.reason}")
        period = lcm(*(guard.modulus or 1 for guard in guards))
        for step in (period, -period):
            nearer = Grid(dims, check, step)
            points = nearer.points[chosen]
            if min(min(point.values()) for point in points) > 0 and all(g.holds(p) for g in guards for p in points):
                return nearer
        return None

    def _sizes(self, grid: Grid) -> Sizes:
        """The step's sizes from recordings at the points of a grid, and at further ones.

        What Python makes of sizes may be one number at all points, as ``n // 64`` is: where the step is the same with
        another number, it only tests it, and otherwise the number has to stay.
        """
        sizes = self._sizes_at(grid)
        here, stay = grid.points[0], list[tuple[Guard, ...]]()
        for steady in steady_in(sizes.recording.extents, sizes.axis, grid.points):
            if steady.guards in stay or not all(steady.stays(here, point) for point in sizes.grid.points):
                continue
            point = steady.elsewhere(here, sizes.guards)
            if point is None and steady.guards is None:
                continue
            few = len(sizes.grid.points) - len(grid.points) < _MOST_FURTHER
            further = self._sizes_if_alike(sizes.grid.with_point(point)) if point is not None and few else None
            if further is not None:
                sizes = further
            elif steady.guards is not None:
                stay.append(steady.guards)
            else:
                raise NotPolynomial(f"Python makes a number of it in {steady.place}, which no guard can say")
        sizes.guards += [guard for guards in stay for guard in guards]
        return sizes

    def _sizes_if_alike(self, grid: Grid) -> Sizes | None:
        """The step's sizes from recordings at the points of a grid; None where it is another one at some of them."""
        with contextlib.suppress(NotPolynomial):
            return self._sizes_at(grid)
        return None

    def _sizes_at(self, grid: Grid) -> Sizes:
        captured, *others = grid.points
        recordings = [self.recording({**self.step.arguments.dims, **captured})]
        for point in others:
            try:
                recordings.append(self.recording({**self.step.arguments.dims, **point}))
            except CaptureError as e:
                raise NotPolynomial(f"at {point_text(point)}: {e.what}") from None
        if threshold := threshold_in(recordings):
            raise _Threshold(threshold)
        return Sizes(recordings, grid)

    def missing_in_a_row(self, sizes: Sizes) -> int:
        """How many more recordings at the captured sizes there have to be until enough in a row were of one step.

        Those at the points of *sizes* were. Others may have been another step, which was put down to their sizes.
        """
        dims = self.step.arguments.dims
        alike = {tuple({**dims, **point}.values()) for point in sizes.grid.points}
        runs = [0]
        for key in self.order:
            runs.append(runs[-1] + 1 if key in alike else 0)
        return 0 if max(runs) >= _IN_A_ROW else _IN_A_ROW - runs[-1]

    def at_other_batches(self) -> Iterator[Recording]:
        """Recordings at other batches, all else as captured, as far as there are any; larger ones first."""
        here = self.step.arguments.dims
        captured, *larger = (point[BATCH] for point in Grid({BATCH: here[BATCH]}).points)
        for batch in dict.fromkeys((*larger, captured - 1, captured // 2)):
            if batch > 0:
                with contextlib.suppress(CaptureError):
                    yield self.recording({**here, BATCH: batch})

    def recording(self, dims: Dims) -> Recording:
        key = tuple(dims.values())
        if key not in self.at:
            first = not self.at
            self.order += [key, key] if first else [key]
            self.at[key] = run_until_alike(self.step, dims, named=first, times=2 if first else 1)
        return self.at[key]
