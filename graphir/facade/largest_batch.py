"""The largest batch that fits: as the program is, and with each way to make room.

::

    found = graphir.largest_batch(program, {"gpu:0": "40 GiB"})
    print(found)                     a row for each option: batch, seconds of a step, rows a second, peaks
    found.best.balanced.program      placed, at its batch, for the passes in found.best.balanced.then
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from graphir.passes import Balanced
from graphir.passes.balance import Balance, requested
from graphir.passes.choice.asked import OPTIONS, Asked, Option
from graphir.passes.choice.batches import Batches
from graphir.passes.choice.largest import Full, Largest
from graphir.passes.saved import require_captured

from ..analysis.profiles import Profile
from ..analysis.tables import cut, seconds_text, spoken_of, table
from ..analysis.topology import Topology
from ..collector import collector_paused
from ..errors import GraphirError, PassError
from ..ir.device import CPU, DeviceName
from ..ir.program import Program
from ..ir.text import nbytes_text
from ..ir.verify import blamed

__all__ = ["BatchRow", "LargestBatch", "largest_batch"]

_PLAIN: Final = "as it is"
_ALL: Final = "all"
_NAME: Final = 44
_DEVICES: Final = 4
_LEAST: Final = 0.001
"""How many devices' limits and peaks are printed: of those that have a limit, or hold at least this part of what the
fullest does."""


class BatchRow(NamedTuple):
    """The largest batch that some options make room for.

    Attributes:
        allowed: the option; ``as it is``, or ``all`` options together.
        batch: the rows of a step, of all replicas and micro-batches; 0 where no batch fits.
        seconds: that the step is predicted to take.
        peaks: by device, the bytes that it holds.
        beyond: why no larger batch was found, or none.
        balanced: the placement at that batch; None where no batch fits.
    """

    allowed: str
    batch: int
    seconds: float
    peaks: Mapping[str, int]
    beyond: str
    balanced: Balanced | None

    @property
    def rows_per_second(self) -> float:
        """The rows of a step by its seconds."""
        return self.batch / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class LargestBatch:
    """The largest batches of a program within limits. Prints as a table.

    Attributes:
        name: of the program.
        machine: that was predicted for, with whence its figures are, as reports say it.
        limits: by device, in bytes, as they were given or found to be free.
        dims: the value of each dimension that is not the batch.
        unit: batches are multiples of so many rows: each replica has its share of each micro-batch.
        rows: ``as it is``, with each option, and with all.
    """

    name: str
    machine: str
    limits: Mapping[str, int]
    dims: Mapping[str, int]
    unit: int
    rows: tuple[BatchRow, ...]

    @property
    def best(self) -> BatchRow:
        """The row with the largest batch; of several, the one with the shortest step."""
        return max(self.rows, key=lambda row: (row.batch, -row.seconds))

    def to_json(self) -> str:
        """All but the programs, as JSON text: of placements, the passes."""
        rows = [
            {
                **{name: getattr(row, name) for name in ("allowed", "batch", "seconds", "rows_per_second", "beyond")},
                "peaks": dict(row.peaks),
                "pipeline": row.balanced.pipeline if row.balanced else None,
                "then": row.balanced.then if row.balanced else None,
            }
            for row in self.rows
        ]
        found: dict[str, Any] = {"name": self.name, "machine": self.machine, "unit": self.unit, "rows": rows}
        return json.dumps({**found, "limits": dict(self.limits), "dims": dict(self.dims)}, ensure_ascii=False)

    def __str__(self) -> str:
        limits = ", ".join([f"{device} {nbytes_text(most)}" for device, most in list(self.limits.items())[:_DEVICES]])
        others = len(self.limits) - _DEVICES
        limits += f" and {others} more" if others > 0 else ""
        best, sizes = self.best, ", ".join([f"{dim}={size}" for dim, size in self.dims.items()])
        name, devices = cut(self.name, _NAME), self._devices()
        head = ("", "batch", "step", "rows a second", *[f"peak {device}" for device in devices])
        lines = [
            spoken_of(self.machine),
            f"the largest batch of {name!r}{f' at {sizes}' if sizes else ''} within {limits}: {best.batch:,} rows",
            *table(head, [self._cells(row, devices) for row in self.rows]),
        ]
        if any(row.balanced is not None and not row.balanced.exact for row in self.rows):
            lines.append("  peaks and steps are reckoned by groups: the program has too many operators for plans")
        if self.unit > 1:
            lines.append(f"  a step's rows are those of all replicas and micro-batches: multiples of {self.unit}")
        return "\n".join([*lines, *[f"  {row.allowed}: {row.beyond}" for row in self.rows]])

    def _devices(self) -> list[str]:
        """Those that hold the most in some row, and those with a limit."""
        peaks = Counter[str]()
        for row in self.rows:
            peaks |= Counter(row.peaks)
        most = max(peaks.values(), default=0)
        fullest = [
            device for device, nbytes in peaks.most_common(_DEVICES) if nbytes >= _LEAST * most or device in self.limits
        ]
        return [device for device in peaks if device in fullest]

    def _cells(self, row: BatchRow, devices: Sequence[str]) -> tuple[str, ...]:
        """A row of the table."""
        if row.balanced is None:
            return (row.allowed, *["-" for _ in ("batch", "step", "rows a second", *devices)])
        peaks = [nbytes_text(row.peaks.get(device, 0)) for device in devices]
        return row.allowed, f"{row.batch:,}", seconds_text(row.seconds), f"{row.rows_per_second:,.1f}", *peaks


def largest_batch(
    program: Program,
    limits: Mapping[DeviceName, int | str] | Literal["auto"],
    *,
    topology: Topology | str | None = None,
    options: Sequence[Option] = OPTIONS,
    devices: Sequence[DeviceName] = (),
    seconds: float = 0.5,
    evaluations: int | None = None,
    profile: Profile | Literal["cached"] | None = None,
    threads: int | None = 1,
) -> LargestBatch:
    """Find the largest batch that keeps within limits: as the program is, with each option of
    :func:`graphir.passes.balance`, and with all of them.

    A batch is found where a balance with these options finds a placement at it, and finds none at the next larger one.
    Where the bytes of a placement do not grow with the batch, as those of convolutions whose algorithm depends on
    sizes, a batch beyond that may fit again; none is looked for. Guards of the program are kept; other dimensions stay
    as they are.

    A batch is the rows of a whole step, of all micro-batches and replicas: what a step is called with. Each replica has
    its share of each micro-batch, so batches are multiples of as many rows. To go on, place the program at its batch
    with more time, ``passes.balance(program.with_(dims=row.balanced.program.dims), limits)``, emit the plan of
    ``row.balanced.program``, or compile the model with inputs of that batch and these limits.

    Args:
        program: captured, replicated or sharded, whose sizes follow the batch.
        limits: as :func:`graphir.passes.balance` takes them.
        topology: likewise.
        options: likewise, without ``shares``; each is a row.
        devices: likewise.
        seconds: how long each placement is searched for; some 25 are.
        evaluations: how many placements are looked at instead, each time: equal numbers give equal results for equal
            figures of the machine.
        profile: as :func:`graphir.passes.balance` takes it.
        threads: likewise.

    Raises:
        PassError: the sizes of the program are fixed, no batch fits, with any option, or as
            :func:`graphir.passes.balance`.
    """
    given, count = requested(
        "largest_batch",
        program,
        profile,
        threads,
        limits=limits,
        topology=topology,
        options=options,
        devices=devices,
        seconds=seconds,
        evaluations=evaluations,
    )
    if "shares" in given.options:
        raise PassError(
            "largest_batch: options have 'shares', and every batch is divided by the program's own shares",
            fix="leave 'shares' out; passes.replicate(program, devices, shares=…) gives replicas other shares first",
        )
    given.require_order(program)
    require_captured(program, "largest_batch")
    with collector_paused(), blamed(program):
        batches = Batches(program)
        try:
            asked = given.asked(program, profile, count)
            _require_limits(asked)
            rows = tuple(_rows(asked, batches))
        except GraphirError as e:  # a reduction lacks a link
            raise e if isinstance(e, PassError) else PassError(f"largest_batch: {e.what}", at=e.at, fix=e.fix) from None
    if not any(row.balanced for row in rows):
        raise _nothing(given, batches, profile, count, rows[-1].beyond)
    return LargestBatch(program.name, asked.topology.about, asked.limits, batches.others, batches.unit, rows)


def _require_limits(asked: Asked) -> None:
    """Refuse devices of the program that may hold any number of bytes: there is no largest batch.

    Raises:
        PassError: there is one.
    """
    known = asked.wanted().limits
    if endless := [str(device) for device in asked.used() if device not in known]:
        raise PassError(
            f"largest_batch: the program is on {endless[0]}, which has no limit, and topology {asked.topology.name!r} "
            "does not say how much memory it has",
            fix=f"give limits {{{endless[0]!r}: …}} too, or the device of the topology its 'memory'",
        )


def _rows(asked: Asked, batches: Batches) -> Iterator[BatchRow]:
    """A row for the program as it is, one for each option, and one for all where there are several."""
    plain, options = Full(), tuple(dict.fromkeys(asked.options))
    best = plain
    for name, allowed in ((_PLAIN, ()), *[(option, (option,)) for option in options], (_ALL, options)):
        if name == _ALL and len(options) < 2:
            continue
        hosts = asked._replace(options=allowed).wanted().hosts
        if allowed == ("shift",) and not hosts and len({*asked.used(), *asked.usable()} - {CPU}) < 2:
            there = ", ".join(asked.used())
            yield BatchRow(name, 0, 0.0, {}, f"limits and devices name no device beside {there}", None)
            continue
        largest = Largest(asked._replace(options=allowed), batches)
        found = largest.search(best if name == _ALL else Full(plain.number))
        best = max(best, found, key=lambda full: full.number)
        if name == _PLAIN:
            plain = found
        yield _row(name, largest, found.number)


def _row(name: str, largest: Largest, number: int) -> BatchRow:
    beyond, rows = largest.beyond(number), largest.batches.rows(number)
    balanced = largest.tried[number].balanced if number else None
    if balanced is None:
        return BatchRow(name, 0, 0.0, {}, beyond, None)
    peaks = {use.device: use.after for use in balanced.devices}
    return BatchRow(name, rows, balanced.after, peaks, beyond, balanced)


def _nothing(
    given: Balance, batches: Batches, profile: Profile | Literal["cached"] | None, threads: int, beyond: str
) -> PassError:
    """What a balance at the least batch refuses."""
    least = batches.after(0)
    what = f"largest_batch: not even a batch of {batches.rows(least)} is within the limits: "
    try:
        given.balanced(batches.at(least), profile, threads)
    except PassError as e:
        return PassError(what + e.what.removeprefix("balance: "), at=e.at, where=e.where, fix=e.fix)
    return PassError(what + beyond, fix="search for longer: give more seconds or evaluations")
