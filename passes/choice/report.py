"""What a balanced placement is, was, and would have cost otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from graphir.analysis.tables import cut, seconds_text, spoken_of, table
from graphir.ir.history import pass_name
from graphir.ir.program import Program
from graphir.ir.size import BATCH
from graphir.ir.text import nbytes_text

from .places import GroupPlace, Reasons

__all__ = ["Balanced", "DeviceUse", "LinkBytes"]

_MOST_GROUPS: Final = 12
_NAME: Final = 44


class DeviceUse(NamedTuple):
    """A device before and after.

    Attributes:
        device: its name.
        limit: the most bytes that it may hold; None: any number.
        before, after: the most that it holds.
        busy_before, busy_after: seconds of a step for which it computes.
    """

    device: str
    limit: int | None
    before: int
    after: int
    busy_before: float
    busy_after: float


class LinkBytes(NamedTuple):
    """Bytes of a step that cross from one device to another, before and after."""

    source: str
    destination: str
    before: int
    after: int


@dataclass(frozen=True)
class Balanced:
    """A placement within limits. Prints as tables.

    Attributes:
        machine: for which it was chosen, with whence its figures are, as reports say it.
        measured: the date of these figures; empty where they were not measured.
        program: placed; it needs :func:`graphir.passes.inject_copies` before it can be emitted.
        limits: by device, in bytes, as they were given or found to be free.
        pipeline: the passes that placed it, as text that :class:`graphir.passes.Pipeline` and
            ``graphir.compile(passes=…)`` take; empty where nothing had to move.
        then: the passes that come next: ``inject_copies``; of several micro-batches ``pipeline``, where an order in
            which they flow keeps within the limits; and ``share_storage`` where the limits take it.
        devices: each before and after.
        links: those that something crosses.
        before, after: predicted seconds of a step.
        exact: whether peaks and seconds are those of plans that were emitted for it; else of the groups, which is what
            programs with very many operators get.
        evaluated: how many placements were looked at.
        device_map: by module, its device as Accelerate writes it: the number of a gpu, or ``cpu``.
        reasons: what the bound and the groups are reckoned from when they are asked for.
        shares: of the batch, where others than the program's were chosen; :attr:`pipeline` begins with them.
    """

    program: Program = field(repr=False)
    machine: str
    measured: str
    limits: Mapping[str, int]
    pipeline: str
    then: str
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkBytes, ...]
    before: float
    after: float
    exact: bool
    evaluated: int
    device_map: Mapping[str, int | str] = field(repr=False)
    reasons: Reasons = field(repr=False, compare=False)
    shares: tuple[int, ...] = ()

    @cached_property
    def bound(self) -> float:
        """Seconds below which no placement within the limits can be, of these groups, shares and options, as their
        simulation has it; what the plan takes where it is faster than its groups."""
        return min(self.after, self.reasons.bound())

    @cached_property
    def groups(self) -> tuple[GroupPlace, ...]:
        """Where each group is and why, in the order of the forward; none where the placement is one that a person
        would have tried, which the report says instead."""
        return tuple(self.reasons.places())

    @property
    def flows(self) -> bool:
        """Whether micro-batches flow: :attr:`then` orders them, and the figures are of that order."""
        return "pipeline" in map(pass_name, self.then.split(" | "))

    @property
    def gap(self) -> float:
        """By what part of the bound the step is longer."""
        return self.after / self.bound - 1 if self.bound else 0.0

    def to_json(self) -> str:
        """All but the program, as JSON text."""
        lists = {name: [row._asdict() for row in getattr(self, name)] for name in ("devices", "links", "groups")}
        names = ("machine", "measured", "pipeline", "then", "before", "after", "bound", "gap", "exact", "evaluated")
        maps = {"limits": dict(self.limits), "device_map": dict(self.device_map)}
        found = {**{name: getattr(self, name) for name in names}, **lists, **maps, "shares": list(self.shares)}
        return json.dumps(found, ensure_ascii=False)

    def __str__(self) -> str:
        whence = "of the emitted plan" if self.exact else "reckoned by groups"
        lines = [
            spoken_of(self.machine),
            f"placement of {cut(self.program.name, _NAME)!r}: {seconds_text(self.after)} a step, "
            f"{seconds_text(self.before)} before ({whence})",
        ]
        rows = [
            (
                use.device,
                "-" if use.limit is None else nbytes_text(use.limit),
                nbytes_text(use.before),
                nbytes_text(use.after),
                seconds_text(use.busy_before),
                seconds_text(use.busy_after),
            )
            for use in self.devices
        ]
        lines += table(("device", "limit", "peak before", "peak after", "busy before", "busy after"), rows)
        links = [
            (f"{link.source} -> {link.destination}", nbytes_text(link.before), nbytes_text(link.after))
            for link in self.links
        ]
        lines += table(("link", "bytes before", "bytes after"), links)
        lines.append(f"  at least {seconds_text(self.bound)} within these limits: the gap is {self.gap:.1%}")
        lines += [f"  by hand: {self.reasons.by_hand}"] if self.reasons.by_hand else self._groups()
        if self.shares:
            counts = ", ".join([f"{self.program.dims[prefix + BATCH]:,}" for prefix in self.program.replicas])
            lines.append(f"  rows of the replicas: {counts}; other shares give other means, and so other bits")
        lines.append(f"  passes: {self.pipeline}" if self.pipeline else "  nothing has to move")
        lines.append(f"  then: {self.then}")
        return "\n".join(lines)

    def _groups(self) -> list[str]:
        """What was changed, and what else it could have been; the dearest alternatives first."""
        moved = [group for group in self.groups if group.moved]
        moved.sort(key=lambda group: (-bool(group.over), -group.seconds))
        rows = []
        for group in moved[:_MOST_GROUPS]:
            cost = (
                f"{group.over} over by {nbytes_text(group.excess)}"
                if group.over
                else f"+{seconds_text(max(group.seconds, 0.0))}"
            )
            rows.append((cut(group.modules, _NAME), group.device, group.saved, group.otherwise, cost))
        lines = table(("modules", "on", "saved", "next best", "it would cost"), rows, left=4)
        more = len(moved) - _MOST_GROUPS
        return lines + ([f"  and {more} more"] if more > 0 else [])
