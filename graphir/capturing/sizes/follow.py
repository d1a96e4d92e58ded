"""Sizes that follow named dimensions: which recordings of a step are taken, and which dimensions its sizes follow.

Where operators differ or a number is no polynomial, the program keeps the captured sizes and says why. It keeps them in
the dimensions that cause this alone, if the others follow without them. Where Python asks about sizes what no guard can
say, the program holds for the recorded sizes alone.

Half a batch is no polynomial of the batch. If a step cuts the batch into equal parts, sizes follow the size of a part::

    x : [2*batch, 8] ──chunk(2)──▶ [batch, 8], [batch, 8]
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import lcm, prod
from typing import Final, NamedTuple

from ...errors import CaptureError
from ...ir.covers import Covers
from ...ir.fitting import Grid, NotPolynomial, point_text
from ...ir.guard import Guard
from ...ir.size import BATCH, Dims, dimension
from ..step.again import run_until_alike
from ..step.recorded_step import Recording
from ..step.recording import Step
from .copies import copies_kept
from .fit import Sizes, grown_dims
from .guards import simplified
from .thresholds import threshold_in

__all__ = ["Followed", "follow_dims"]

_MOST_CUTS: Final = 4
"""How many numbers of parts are tried at most; each costs a recording or more."""

_IN_A_ROW: Final = 3
"""The number of recordings in a row that must be of one step. A step that takes this many turns, or fewer, is seen."""


class _Threshold(NotPolynomial):
    """The step's operators change at a threshold of some size, so that only the captured size is sure."""


class Followed(NamedTuple):
    """A step whose sizes follow dimensions, from recordings at several sizes.

    Attributes:
        step: that was recorded: as given, or with ``batch`` as the size of a part.
        sizes: of the step.
        dims: the captured value of each dimension that the sizes follow.
        covers: the sizes for which the step holds.
        recordings: all that were taken.
        batch_dims: for each leaf that a forward-only step returns, the first dimension that grows with the batch; None
            where the step could be recorded at one batch only.
    """

    step: Step
    sizes: Sizes
    dims: dict[str, int]
    covers: Covers
    recordings: tuple[Recording, ...] = ()
    batch_dims: Sequence[int | None] | None = None

    def release(self) -> None:
        """Take the recordings apart. Nothing may read them afterwards."""
        for recording in self.recordings:
            recording.release()


def follow_dims(step: Step) -> Followed:
    """Record *step* at the sizes that are needed, and fit its numbers.

    Raises:
        CaptureError: no program can express the step.
    """
    followed = _followed(step)
    batch = step.arguments.dims.get(BATCH)
    if batch is None or BATCH in followed.dims:
        return followed
    for parts in _cuts(followed.sizes.recording, batch):
        dims = {**step.arguments.dims, BATCH: batch // parts}
        loops = step.function is not None and followed.sizes.recording.backwards == parts
        again = _followed(step._replace(parts=parts, loops=loops, arguments=step.arguments._replace(dims=dims)))
        if BATCH in again.dims and not again.covers.only:
            followed.release()
            return again
        again.release()
    return followed


def _cuts(recording: Recording, batch: int) -> list[int]:
    """Numbers of equal parts into which a step may cut its batch: Python divides by them, operators make such parts, or
    views have them beside the size of a part."""
    found = set(recording.extents.divisors(operator.mod, operator.floordiv, operator.truediv))
    for call in recording.calls:
        if call.type.startswith(("aten.split", "aten.slice.")):
            sizes = [size for part in call.outputs for size in part.shape if size and batch % size == 0]
            found.update([batch // size for size in sizes if batch in call.inputs[0].shape])
        elif call.type in ("aten.view.default", "aten._unsafe_view.default"):
            given = call.args["size"]
            whole = [size for size in (given if isinstance(given, tuple) else ()) if type(size) is int]
            found.update([n for pair in pairwise(whole) if -1 in pair or prod(pair) == batch for n in pair])
    found.add(lcm(*filter(None, found)))
    fit = [parts for parts in sorted(found) if parts > 1 and batch % parts == 0]
    return fit if len(fit) <= _MOST_CUTS else [*fit[: _MOST_CUTS - 1], fit[-1]]


def _followed(step: Step) -> Followed:
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
        return taken.fixed("no argument has a batch dimension")
    try:
        return taken.followed(dims)
    except NotPolynomial as e:
        if len(dims) == 1:
            return taken.fixed(str(e))
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
        return taken.followed(alone, "; ".join(fixed))
    except NotPolynomial as e:
        return taken.fixed("; ".join([*fixed, str(e)]))


class _Taken:
    """The recordings of a step, one for each point; the first is compared with another one at the same sizes.

    Attributes:
        step: the step that is recorded.
        at: the recordings, by the sizes of all dimensions.
        order: the sizes of all recordings in the order in which they were taken, failed ones included; the first sizes
            twice.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.at: dict[tuple[int, ...], Recording] = {}
        self.order: list[tuple[int, ...]] = []

    def fixed(self, reason: str) -> Followed:
        """The step at the captured sizes alone."""
        return Followed(self.step, self.sizes({}), {}, Covers(fixed=reason))

    def followed(self, dims: dict[str, int], fixed: str = "") -> Followed:
        """The step with sizes that are polynomials in *dims*, and the sizes that it covers.

        Args:
            dims: the captured value of each dimension.
            fixed: why the sizes don't follow other dimensions.

        Raises:
            NotPolynomial: the sizes are no polynomials.
            CaptureError: no program can express the step.
        """
        sizes, above_one, recorded = self._above_one(dims)
        guards = [Guard(dimension(dim), ">=", 2, reason=why) for dim, why in above_one.items()]
        guards += copies_kept(sizes)
        covers = Covers(simplified(guards), fixed)
        try:
            covers = covers.with_guards(simplified([*guards, *sizes.guards()]))
        except NotPolynomial as e:  # Python's questions about sizes are no guards
            covers = replace(covers, only=str(e))
        return Followed(self.step, sizes, dims, covers.with_recorded([*sizes.grid.points, *recorded]))

    def _above_one(self, dims: Mapping[str, int]) -> tuple[Sizes, dict[str, str], list[Dims]]:
        """The step's sizes as polynomials in *dims*; why some dimensions may not be 1; and further recorded points.

        A tensor with a dimension of 1 may be contiguous in several ways, so PyTorch may take a view of the tensor where
        it copies larger ones. Some modules refuse a dimension of 1.

        Raises:
            NotPolynomial: the sizes are no polynomials.
            CaptureError: no program can express the step.
        """
        ones = dict.fromkeys(dims, 1)
        try:
            sizes = self.sizes(dims, ones)
        except _Threshold:
            raise
        except NotPolynomial as e:
            return self.sizes(dims), self._otherwise_at_one(dims, str(e)), []
        if sizes.asked_otherwise:  # perhaps Python asks differently at 1 alone
            with contextlib.suppress(NotPolynomial):
                larger = self.sizes(dims)
                if not larger.asked_otherwise:
                    same = larger.grid.points[:-1] == sizes.grid.points[:-1]  # they determine the same polynomials
                    return larger, {}, [ones] if same else []
        return sizes, {}, []

    def _otherwise_at_one(self, dims: Mapping[str, int], reason: str) -> dict[str, str]:
        """For each dimension that may not be 1, why; *reason* says why they may not all be 1 together."""
        if len(dims) == 1:
            return dict.fromkeys(dims, reason)
        found = {}
        for dim in dims:
            try:
                self.sizes(dims, {**dims, dim: 1})
            except NotPolynomial as e:
                found[dim] = str(e)
        return found or {dim: reason for dim in dims if dim != BATCH}

    def sizes(self, dims: Mapping[str, int], check: Mapping[str, int] | None = None) -> Sizes:
        """The step's sizes as polynomials in *dims*; see :class:`graphir.ir.fitting.Grid` for *check*.

        If Python's tests come out differently at some of the usual points, the step is recorded at points next to the
        captured one, which may all be on one side of the tests. The guards have to exclude the usual points at which
        the step differs.

        Raises:
            NotPolynomial: the sizes are no polynomials.
            CaptureError: no program can express the step.
        """
        usual = Grid(dims, check)
        error: NotPolynomial | None = None
        try:
            found = self._sizes_at(usual)
            if not found.asked_otherwise:
                return found
        except _Threshold:
            raise
        except NotPolynomial as e:
            error = e
        chosen = usual.points[: None if check is None else -1]
        for step in self._steps() if self._tests_differ(chosen) else ():
            grid = Grid(dims, check, step)
            if min(min(point.values()) for point in grid.points) < 1:
                continue
            with contextlib.suppress(NotPolynomial):
                guards = self._sizes_at(grid).guards()
                held = [point for point in chosen if all(guard.holds(point) for guard in guards)]
                nearer = self._sizes_at(Grid(dims, check, step, held))
                nearer.guards()
                return nearer
        if error is not None:
            raise error
        return found

    def _tests_differ(self, points: Sequence[Dims]) -> bool:
        """Whether a test of Python's comes out differently at some of the points, or the step fails there."""
        try:
            first, *others = (self.recording({**self.step.arguments.dims, **point}).extents for point in points)
        except CaptureError:
            return True
        return any(first.other_outcome(other) for other in others)

    def _steps(self) -> tuple[int, int]:
        """Distances between points next to the captured one, above it and below, at which remainders are the same."""
        period = lcm(*self.recording(self.step.arguments.dims).extents.divisors(operator.mod))
        return period, -period

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
        """The number of recordings at the captured sizes that are missing until enough in a row were of one step.

        Recordings at the points of *sizes* were of one step. Other recordings may have been of another step, for which
        their sizes were held responsible.
        """
        dims = self.step.arguments.dims
        alike = {tuple({**dims, **point}.values()) for point in sizes.grid.points}
        runs = [0]
        for key in self.order:
            runs.append(runs[-1] + 1 if key in alike else 0)
        return 0 if max(runs) >= _IN_A_ROW else _IN_A_ROW - runs[-1]

    def at_other_batches(self) -> Iterator[Recording]:
        """Recordings at other batches, all else as captured; larger ones first. Recordings that fail are left out."""
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
