"""What is found of a step's traffic, and how it is printed.

The text has the totals by link, and then the copies: those of one move together, equal ones once. It fits 80 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from ...errors import counted
from ...ir.names import base_name
from ...ir.operator import Phase
from ...ir.text import nbytes_text, type_name
from ..overlap import Overlap
from .crossings import Kind
from .detours import Detour
from .moves import Reason
from .wording import shortened, some, without_indices

__all__ = ["Copied", "Link", "Reduced", "Traffic"]


_WIDTH: Final = 80
_MOST_LINKS: Final = 16
_MOST_KINDS: Final = 3
_MOST_GROUPS: Final = 10
_MOST_NAMED: Final = 3
_LONGEST: Final = 50
"""Of what a reason says."""
_MOST_WARNINGS: Final = 6
_MOST_LINES: Final = 4
"""Of a mend."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy between two devices.

    Attributes:
        blob: what it copies, with ``;version`` where that isn't 0.
        copy: what it makes.
        source: the device that it reads.
        destination: the device that it writes.
        nbytes: what it moves; None where shape or element type are not known.
        kind: what the value is, however often it was copied since.
        phase: the copy's.
        reader: the first operator that computes with the copied value, by its first output; empty where only the next
            step or the caller has it.
        operator: the type of that operator.
        module: the module of that operator; without one, of the operator that made the value.
        reasons: the moves that put the two operators on two devices; several where several can have done it. Empty
            where no pass did.
    """

    blob: str
    copy: str
    source: str
    destination: str
    nbytes: int | None
    kind: Kind
    phase: Phase
    reader: str
    operator: str
    module: str
    reasons: tuple[Reason, ...]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class Link(_Entry):
    """The copies from one device to another.

    Attributes:
        source: the device that they read.
        destination: the device that they write.
        copies: how many there are.
        nbytes: what those move whose size is known.
        unknown: how many there are of which it is not.
        kinds: the bytes of each kind.
    """

    source: str
    destination: str
    copies: int
    nbytes: int
    unknown: int
    kinds: dict[Kind, int]


class Reduced(_Entry):
    """The values that collectives reduce over the same devices.

    How their bytes cross is up to who runs the step: they are in no link.

    Attributes:
        devices: of the participants.
        collectives: how many there are.
        nbytes: what one participant gives to all of them whose size is known.
        unknown: how many there are of which it is not.
        kind: what the values are.
    """

    devices: tuple[str, ...]
    collectives: int
    nbytes: int
    unknown: int
    kind: Kind


class Traffic(_Entry):
    """What a step copies between devices, and why.

    Attributes:
        name: of the program, plan or net.
        dims: the value of each dimension.
        copies: every copy, in program order.
        links: by pair of devices.
        kinds: the bytes of each kind, over all links.
        reduced: what collectives reduce over several devices.
        warnings: what crosses for nothing, with the mend of each, the largest first.
        overlap: of a plan, which micro-batch each device works on, and when, at nominal costs; None where the step has
            one, or one device.
    """

    name: str
    dims: dict[str, int]
    copies: tuple[Copied, ...]
    links: tuple[Link, ...]
    kinds: dict[Kind, int]
    reduced: tuple[Reduced, ...]
    warnings: tuple[Detour, ...]
    overlap: Overlap | None = None

    @property
    def nbytes(self) -> int:
        """What a step copies, without the copies whose size is not known."""
        return sum(link.nbytes for link in self.links)

    @property
    def unknown(self) -> int:
        """How many copies there are whose size is not known."""
        return sum(link.unknown for link in self.links)

    def to_json(self) -> str:
        """All of it as JSON text."""
        return self.model_dump_json()

    def __str__(self) -> str:
        return _text(self)


def _text(traffic: Traffic) -> str:
    """A table of links, and the copies by the moves that made them necessary, each with what they cost."""
    sizes = ", ".join(f"{dim}={value}" for dim, value in traffic.dims.items())
    head = f"traffic of {traffic.name!r}" + (f" at {sizes}" if sizes else "")
    if len(head) > _WIDTH - 12:
        head = f"traffic of {shortened(repr(traffic.name), 40)} at {counted(len(traffic.dims), 'dimension')}"
    if not traffic.copies:
        return "\n".join([f"{head}:", "  nothing is copied between devices", *_reductions(traffic.reduced)])
    return "\n".join([
        f"{head}:",
        *_links(traffic),
        *_reductions(traffic.reduced),
        *_copies(traffic.copies),
        *_warnings(traffic.warnings),
        *([] if traffic.overlap is None else traffic.overlap.lines()),
    ])  # fmt: skip


def _links(traffic: Traffic) -> Iterator[str]:
    kinds = list(traffic.kinds)
    shown = kinds if len(kinds) <= _MOST_KINDS + 1 else kinds[:_MOST_KINDS]
    others = kinds[len(shown) :]

    def row(label: str, copies: object, cells: Iterable[str]) -> str:
        return f"  {shortened(label, 16):<16}{copies:>7}" + "".join(f"{cell:>11}" for cell in cells)

    heads = ["optimizer" if kind == "optimizer state" else kind for kind in shown]
    yield row("", "copies", ["bytes", *heads, *(["others"] if others else [])])
    for link in traffic.links[:_MOST_LINKS]:
        cells = [link.kinds.get(kind, 0) for kind in shown]
        cells += [sum(link.kinds.get(kind, 0) for kind in others)] if others else []
        total = _total(link.nbytes, link.unknown, link.copies)
        yield row(f"{link.source} -> {link.destination}", link.copies, [total, *(_cell(cell) for cell in cells)])
    hidden = traffic.links[_MOST_LINKS:]
    if hidden:
        count = sum(link.copies for link in hidden)
        yield row(f"{len(hidden)} more", count, [nbytes_text(sum(link.nbytes for link in hidden))])
    if len(traffic.links) > 1:
        sums = [traffic.kinds[kind] for kind in shown] + ([sum(traffic.kinds[k] for k in others)] if others else [])
        total = _total(traffic.nbytes, traffic.unknown, len(traffic.copies))
        yield row("together", len(traffic.copies), [total, *map(_cell, sums)])
    if 0 < traffic.unknown < len(traffic.copies):
        yield f"  +: without {_counted(traffic.unknown, 'copy')} whose size is not known"


def _cell(nbytes: int) -> str:
    return nbytes_text(nbytes) if nbytes else "-"


def _total(nbytes: int, unknown: int, copies: int) -> str:
    return "unknown" if unknown == copies else nbytes_text(nbytes) + "+" * bool(unknown)


def _counted(number: int, thing: str) -> str:
    return counted(number, thing) if number == 1 else f"{number} {thing[:-1]}ies"


def _reductions(reduced: Sequence[Reduced]) -> Iterator[str]:
    for one in reduced[:_MOST_NAMED]:
        size = _total(one.nbytes, one.unknown, one.collectives)
        size = "an unknown number of bytes" if size == "unknown" else size
        kind = "temporaries" if one.kind == "temporary" else f"{one.kind}s"
        yield from _wrapped(f"  reduced over {some(one.devices, 8)}: {size} of {kind}", 4)
    if len(reduced) > _MOST_NAMED:
        yield f"  and over {len(reduced) - _MOST_NAMED} more groups of devices"
    if reduced:
        yield "  (how what is reduced crosses is up to the session; it is not in the table)"


class _Group(NamedTuple):
    """Copies that are equal but for the replica and the index of a layer."""

    copies: list[Copied]

    @property
    def nbytes(self) -> int:
        return sum(copied.nbytes or 0 for copied in self.copies)

    def lines(self) -> Iterator[str]:
        first, count = self.copies[0], len(self.copies)
        each = "unknown" if first.nbytes is None else nbytes_text(first.nbytes)
        size = f"{count} x {each}" if count > 1 else each
        links = dict.fromkeys(f"{c.source} -> {c.destination}" for c in self.copies)
        head = f"    {size:>13}  {next(iter(links)) + ', …' * (len(links) > 1):<17}  "
        yield head + shortened(f"{first.kind} {base_name(first.blob)}", _WIDTH - len(head))
        reader = "the next step"
        if first.reader:
            reader = type_name(first.operator).removeprefix("aten.") + " in " * bool(first.module)
            reader += shortened(first.module, _WIDTH - len(head) - len(f"for {reader}"))
        yield " " * len(head) + shortened(f"for {reader}", _WIDTH - len(head))


def _copies(copies: Sequence[Copied]) -> Iterator[str]:
    by_reason: dict[tuple[tuple[int, str], ...], list[Copied]] = {}
    for copied in copies:
        key = tuple(sorted({_generic(reason) for reason in copied.reasons}))
        by_reason.setdefault(key, []).append(copied)
    ranked = sorted(by_reason.values(), key=lambda found: -sum(copied.nbytes or 0 for copied in found))
    left = _MOST_GROUPS
    hidden: list[_Group] = []
    for found in ranked:
        groups = _groups(found)
        shown, rest = groups[: max(left, 0)], groups[max(left, 0) :]
        left -= len(shown)
        hidden += rest
        if shown:
            known = [c.nbytes for c in found if c.nbytes is not None]
            total = _total(sum(known), len(found) - len(known), len(found))
            yield from _wrapped(f"  {total}, {_because(found)}", 4)
            for group in shown:
                yield from group.lines()
    if hidden:
        count = sum(len(group.copies) for group in hidden)
        unknown = sum(copied.nbytes is None for group in hidden for copied in group.copies)
        nbytes = _total(sum(group.nbytes for group in hidden), unknown, count)
        yield f"  and {_counted(count, 'copy')} more, {nbytes}; to_json() has all"


def _warnings(warnings: Sequence[Detour]) -> Iterator[str]:
    if warnings:
        yield "warnings, with mends for the program before inject_copies:"
    for warning in warnings[:_MOST_WARNINGS]:
        size = "" if warning.nbytes is None else f" ({nbytes_text(warning.nbytes)})"
        yield from _wrapped(f"  {warning.kind}{size}: {warning.what}", 4)
        mend = _wrapped(f"    mend: {warning.mend}", 10)
        yield from mend[:_MOST_LINES]
        if len(mend) > _MOST_LINES:
            yield f"          … and {len(mend) - _MOST_LINES} lines more; .warnings has all"
    if len(warnings) > _MOST_WARNINGS:
        yield f"  and {len(warnings) - _MOST_WARNINGS} more; .warnings has all"


def _generic(reason: Reason) -> tuple[int, str]:
    """What reasons have in common that one line says: the pass, and the module that it was given."""
    return reason.position, "" if "->" in reason.where else reason.what


def _because(copies: Sequence[Copied]) -> str:
    """The moves of copies whose reasons are alike: of each pass, what it moved, and whereto."""
    passes: dict[tuple[int, str], dict[str, dict[str, None]]] = {}
    for reason in dict.fromkeys([reason for copied in copies for reason in copied.reasons]):
        moved = passes.setdefault((reason.position, reason.by), {})
        moved.setdefault(shortened(reason.what, _LONGEST), {})[shortened(reason.where, _LONGEST)] = None
    parts = []
    for (_, by), moved in sorted(passes.items()):
        together: dict[tuple[str, ...], list[str]] = {}
        for what, wheres in moved.items():
            together.setdefault(tuple(wheres), []).append(what)
        moves = [str(Reason(0, "", some(filter(None, whats)), some(wheres))) for wheres, whats in together.items()]
        parts.append(f"{by} {some(moves)}".rstrip())
    return f"because of {' and '.join(parts)}" if parts else "placed so before any pass"


def _groups(copies: Iterable[Copied]) -> list[_Group]:
    """Copies that are alike, the largest groups first."""
    found: dict[tuple[object, ...], list[Copied]] = {}
    for copied in copies:
        names = (without_indices(base_name(name)) for name in (copied.blob, copied.reader))
        found.setdefault((*names, copied.operator, copied.kind, copied.nbytes), []).append(copied)
    return sorted(map(_Group, found.values()), key=lambda group: -group.nbytes)


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of a text; a link stays in one."""
    kept = text.replace(" -> ", "\xa0->\xa0")
    lines = textwrap.wrap(kept, _WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
