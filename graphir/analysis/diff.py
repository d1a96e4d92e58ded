"""What differs between two programs, plans or nets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias

from pydantic import BaseModel, ConfigDict

from ..errors import GraphirError
from ..ir.blob import Blob, dense_nbytes
from ..ir.device import Device
from ..ir.net import Net
from ..ir.operator import Operator, map_arg
from ..ir.plan import Plan, program_of, sizes_of
from ..ir.program import Program
from ..ir.size import Dims
from ..ir.text import nbytes_text, type_name
from ..ir.verify import Planned, require, subject_of, verify
from .memory import memory

__all__ = ["BlobChange", "Diff", "OperatorChange", "OperatorEntry", "OperatorMove", "Peak", "diff", "words"]

_Subject: TypeAlias = Program | Plan | Net
_Nets: TypeAlias = Sequence[tuple[str, Net]]

_MOST_PRINTED: Final = 12
_WIDTH: Final = 100


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True)


class OperatorEntry(_Entry):
    """An operator that one side has alone; *nbytes* is what a copy moves, 0 for others.

    An operator is known by its first output, with ``;version`` where that isn't 0.
    """

    output: str
    type: str
    device: str
    by: str = ""
    nbytes: int = 0

    def __str__(self) -> str:
        size = f", {nbytes_text(self.nbytes)}" if self.nbytes else ""
        return f"{self.output} = {type_name(self.type)} @{self.device}{size}"


class OperatorMove(_Entry):
    """An operator that runs on another device."""

    output: str
    type: str
    before: str
    after: str
    by: str = ""

    def __str__(self) -> str:
        by = f" by {self.by}" if self.by else ""
        return f"{self.output} = {type_name(self.type)}: {self.before} -> {self.after}{by}"


class OperatorChange(_Entry):
    """An operator whose type, inputs, arguments, phase, seed, effects, issue or receive memory differ."""

    output: str
    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.output}: {self.field} {self.before} -> {self.after}"


class BlobChange(_Entry):
    """A blob whose shape, type, role, device or layout differs, or that one side has alone (*field* is ``blob``)."""

    name: str
    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.field} {self.before} -> {self.after}"


class Peak(_Entry):
    """The most bytes that a device holds at once."""

    device: str
    before: int
    after: int

    def __str__(self) -> str:
        sign = "-" if self.after < self.before else "+"
        delta = nbytes_text(abs(self.after - self.before))
        return f"{self.device:<8}{nbytes_text(self.before):>12} -> {nbytes_text(self.after):>12}  {sign}{delta}"


class Diff(_Entry):
    """What differs between *before* and *after*.

    Attributes:
        before: name of the first.
        after: name of the second.
        moved: operators on another device.
        copies: copies that were added, with their bytes.
        added: other operators that the second has alone.
        removed: operators that the first has alone, copies among them.
        changed: operators that read or do something else.
        order: how many operators of both come in another order.
        blobs: blobs of both that changed, in another way than by moving with the operator that makes them.
        peaks: by device; none for bare nets, or where sizes are not known.
        guards: those of one alone, ``+`` before those of *after*; none for bare nets.
        program: how far ahead copies are issued, how gradients are reduced and by which shares a batch is divided,
            where the programs differ in it, as ``ahead None -> 0``; why sizes are fixed, and the caveats, of one alone;
            none for bare nets.
    """

    before: str
    after: str
    moved: tuple[OperatorMove, ...] = ()
    copies: tuple[OperatorEntry, ...] = ()
    added: tuple[OperatorEntry, ...] = ()
    removed: tuple[OperatorEntry, ...] = ()
    changed: tuple[OperatorChange, ...] = ()
    order: int = 0
    blobs: tuple[BlobChange, ...] = ()
    peaks: tuple[Peak, ...] = ()
    guards: tuple[str, ...] = ()
    program: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        operators = (self.moved, self.copies, self.added, self.removed, self.changed)
        lists = (*operators, self.blobs, self.guards, self.program)
        return not any(lists) and not self.order and all(p.before == p.after for p in self.peaks)

    def to_json(self) -> str:
        """The whole difference as JSON text."""
        return self.model_dump_json()

    def __str__(self) -> str:
        lines = [f"diff {self.before!r} -> {self.after!r}"]
        if self.is_empty:
            return lines[0] + ": no difference"
        copied = sum(copy.nbytes for copy in self.copies)
        for title, entries in (
            ("operators moved", self.moved),
            (f"copies added, {nbytes_text(copied)}" if copied else "copies added", self.copies),
            ("operators added", self.added),
            ("operators removed", self.removed),
            ("operators changed", self.changed),
            ("blobs changed", self.blobs),
            ("guards changed", self.guards),
            ("program changed", self.program),
        ):
            lines += _section(title, entries)
        if self.order:
            lines.append(f"operators in another order: {self.order}")
        if self.peaks:
            lines.append("peak bytes")
            lines += [f"  {peak}" for peak in self.peaks]
        return "\n".join(lines)


def _section(title: str, entries: Sequence[_Entry | str]) -> list[str]:
    if not entries:
        return []
    lines = [f"{title}: {len(entries)}"]
    lines += [_clip(f"  {entry}") for entry in entries[:_MOST_PRINTED]]
    hidden = len(entries) - _MOST_PRINTED
    return lines + ([f"  … and {hidden} more"] if hidden > 0 else [])


def _clip(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def diff(before: _Subject | Planned, after: _Subject | Planned) -> Diff:
    """What differs between two programs, plans or nets: operators are matched by what they make.

    A session and a compiled step stand for their plan.

    Raises:
        GraphirError: one of them is something else, or broken.
    """
    before, after = subject_of(before), subject_of(after)
    for subject in (before, after):
        require(subject, (Program, Plan, Net), "diff")
    ours, theirs = _nets(before), _nets(after)
    dims: Dims = {} if isinstance(before, Net) else sizes_of(before)
    found = _Compared({} if isinstance(after, Net) else {**dims, **sizes_of(after)})
    pairs = dict(theirs)
    for name, net in ours:
        if name in pairs:
            try:
                found.nets(net, pairs[name])
            except (LookupError, ValueError):  # of an operator or a blob that is none, as a file made by hand may hold
                for subject in (before, after):
                    verify(subject, placed=False)
                raise
    return Diff(
        before=before.name,
        after=after.name,
        moved=tuple(found.moved),
        copies=tuple(found.copies),
        added=tuple(found.added),
        removed=tuple(found.removed),
        changed=tuple(found.changed),
        order=found.order,
        blobs=tuple(found.blobs),
        peaks=_peaks(before, after),
        guards=_guards(before, after),
        program=_program(before, after),
    )


def _nets(subject: _Subject) -> _Nets:
    """The nets to compare; a bare net is compared with a step."""
    return [("step", subject)] if isinstance(subject, Net) else [("init", subject.init), ("step", subject.step)]


def _guards(before: _Subject, after: _Subject) -> tuple[str, ...]:
    if isinstance(before, Net) or isinstance(after, Net):
        return ()
    return _alone(*[list(map(str, program_of(subject).covers.guards)) for subject in (before, after)])


def _program(before: _Subject, after: _Subject) -> tuple[str, ...]:
    if isinstance(before, Net) or isinstance(after, Net):
        return ()
    a, b = program_of(before), program_of(after)
    values = [(name, getattr(a, name), getattr(b, name)) for name in ("ahead", "reduction", "shares")]
    changed = [f"{name} {x} -> {y}" for name, x, y in values if x != y]
    return (*changed, *_alone(_said(a), _said(b)))


def _said(program: Program) -> list[str]:
    """Why sizes are fixed, or recorded ones alone are covered, and the caveats."""
    covers = program.covers
    reasons = [f"{name}: {reason}" for name, reason in (("fixed", covers.fixed), ("only", covers.only)) if reason]
    return [*reasons, *[f"caveat: {text}" for text in program.caveats]]


def _alone(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """The lines of one alone."""
    return (
        *(f"- {line}" for line in ours if line not in theirs),
        *(f"+ {line}" for line in theirs if line not in ours),
    )


def _peaks(before: _Subject, after: _Subject) -> tuple[Peak, ...]:
    if isinstance(before, Net) or isinstance(after, Net):
        return ()
    ours, theirs = memory(before), memory(after)
    if ours.unknown or theirs.unknown:
        return ()
    a, b = ours.peak, theirs.peak
    devices = sorted({*before.devices, *after.devices}, key=Device.order)
    return tuple(Peak(device=d, before=a.get(d, 0), after=b.get(d, 0)) for d in devices)


class _Compared:
    """What was found to differ so far."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims
        self.moved: list[OperatorMove] = []
        self.copies: list[OperatorEntry] = []
        self.added: list[OperatorEntry] = []
        self.removed: list[OperatorEntry] = []
        self.changed: list[OperatorChange] = []
        self.blobs: dict[BlobChange, None] = {}
        self.carried: set[str] = set()  # what operators that moved make
        self.order = 0

    def nets(self, before: Net, after: Net) -> None:
        ours, theirs = _by_output(before.ops), _by_output(after.ops)
        for key, op in ours.items():
            if key not in theirs:
                self.removed.append(self.entry(key, op, before))
            elif op is not theirs[key]:
                self.operator(key, op, theirs[key])
        for key, op in theirs.items():
            if key not in ours:
                (self.copies if op.kind == "copy" else self.added).append(self.entry(key, op, after))
        self.order += _displaced(ours, theirs)
        for name, blob in before.blobs.items():
            other = after.blobs.get(name)
            if other is not None and other is not blob and other != blob:
                self.blob(blob, other)

    def operator(self, key: str, a: Operator, b: Operator) -> None:
        if a.device != b.device:
            self.moved.append(OperatorMove(output=key, type=b.type, before=a.device, after=b.device, by=b.by))
            self.carried.update(b.outputs)
        for name in ("type", "inputs", "outputs", "args", "phase", "seed", "effects", "issue", "received"):
            x, y = getattr(a, name), getattr(b, name)
            same = x == y if name != "args" else repr(x) == repr(y)  # 1, 1.0 and True are different arguments
            if not same and not (name == "effects" and a.type != b.type):
                was, now = (type_name(x), type_name(y)) if name == "type" else _differing(x, y)
                self.changed.append(OperatorChange(output=key, field=name, before=was, after=now))

    def blob(self, a: Blob, b: Blob) -> None:
        for name, x, y in zip(a._fields, a, b, strict=True):
            if x != y and not (name == "device" and (a.name in self.carried or a.storage in self.carried)):
                self.blobs[BlobChange(name=a.name, field=name, before=words(x), after=words(y))] = None

    def entry(self, key: str, op: Operator, net: Net) -> OperatorEntry:
        nbytes = 0
        if op.kind == "copy":
            try:
                nbytes = dense_nbytes(net.blobs[op.outputs[0]], self.dims)
            except GraphirError:  # a dimension without a value
                nbytes = 0
        return OperatorEntry(output=key, type=op.type, device=op.device, by=op.by, nbytes=nbytes)


def _by_output(ops: Iterable[Operator]) -> dict[str, Operator]:
    found: dict[str, Operator] = {}
    for op in ops:
        name, version = next(op.makes, (f"{op.type}({', '.join(op.inputs)})", 0))
        key = f"{name};{version}" if version else name
        while key in found:
            key += "'"
        found[key] = op
    return found


def _displaced(ours: Mapping[str, Operator], theirs: Mapping[str, Operator]) -> int:
    """How many of the operators of both come in another order: all but the longest run that keeps it."""
    places = {key: i for i, key in enumerate(theirs)}
    common = [places[key] for key in ours if key in places]
    ends: list[int] = []
    for place in common:
        at = bisect_left(ends, place)
        ends[at : at + 1] = [place]
    return len(common) - len(ends)


def _differing(a: object, b: object) -> tuple[str, str]:
    """Two values of a field as text; of arguments and operands, what differs alone."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        names = [n for n in {**a, **b} if n not in a or n not in b or repr(a[n]) != repr(b[n])]
        was, now = (", ".join(f"{n}={words(m[n])}" for n in names if n in m) or "-" for m in (a, b))
        return was, now
    if isinstance(a, tuple) and isinstance(b, tuple) and not hasattr(a, "_fields") and len(a) == len(b):
        pairs = dict.fromkeys((x, y) for x, y in zip(a, b, strict=True) if x != y)
        return ", ".join(words(x) for x, _ in pairs), ", ".join(words(y) for _, y in pairs)
    return words(a), words(b)


def words(value: object) -> str:
    """A field of a blob or an operator as text."""
    return map_arg(value, str, lambda items: f"[{', '.join(items)}]")  # type: ignore[no-any-return]  # it is text
