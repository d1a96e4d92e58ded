"""How many bytes each device holds, when, and what for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import GraphirError, counted, nearest
from ..ir.blob import STATE_ROLES, Blob
from ..ir.device import Device
from ..ir.infer import is_known
from ..ir.net import Net
from ..ir.optypes.sized import SizedOperator, UnknownShape
from ..ir.plan import Plan, program_of, sizes_of
from ..ir.program import Program
from ..ir.size import LARGEST, Dims, size_dims
from ..ir.text import nbytes_text
from ..ir.verify import Planned, require, subject_of
from .caveats import caveats_with_bytes
from .formulas.kept import KEPT
from .liveness import Lifetime, liveness, stays
from .profile_files import at_hand
from .profiles import Measured, Profile
from .refused import refused_at
from .sources import OperatorScratch, Source, measured_of, scratch_of

__all__ = [
    "CATEGORIES",
    "Frees",
    "Memory",
    "StorageUse",
    "check_dims",
    "check_profile",
    "check_threads",
    "live_bytes",
    "memory",
    "storage_nbytes",
]

CATEGORIES: Final = (
    "parameters",
    "buffers",
    "optimizer state",
    "constants",
    "inputs",
    "activations",
    "gradients",
    "temporaries",
    "copies",
    "receive buffers",
    "outputs",
    "scratch",
)
"""What bytes are for: the role of the storage's blob; what a ``Copy`` makes is a copy, whatever its role, unless it is
state that the copy overwrites. A receive buffer is the memory that the copies of one number in ``Plan.buffers`` fill.
Scratch is what operators allocate inside: no blob has it, and it is gone when the operator is done."""

_CATEGORY: Final[Mapping[str, str]] = {
    "param": "parameters",
    "buffer": "buffers",
    "state": "optimizer state",
    "constant": "constants",
    "input": "inputs",
    "activation": "activations",
    "gradient": "gradients",
    "temporary": "temporaries",
    "output": "outputs",
}
Frees: TypeAlias = Literal["last use", "operators"]
"""What frees a storage: its last use, or only operators of the type ``Free``, as in a Caffe2 workspace."""

_MOST_BYTES: Final = LARGEST * 16
"""Of one storage: as many elements as any has, of the largest type."""
_MOST_COUNTED: Final = (1 << 63) - 1
"""Of all together: what a column of 64-bit integers holds."""
_MOST_TYPES: Final = 4
_COLUMNS: Final = 7
"""Devices side by side in the table, so that it stays within 100 columns."""


class StorageUse(NamedTuple):
    """A storage that takes bytes on a device, for positions ``start <= position < end``.

    Attributes:
        blob: the blob that owns it; of a receive buffer, the first that it receives; of scratch, the first that its
            operator makes.
        category: what it is for.
        nbytes: its bytes; 0 where they are not known.
        device: where it lives.
        start: the first position at which it is live.
        end: the first one after that at which it isn't.
        maker: the device of the operator that makes it, in ``init`` or in the step; None for what callers feed, and for
            scratch.
        module: the module of the operator of the step that makes it first.
    """

    blob: str
    category: str
    nbytes: int
    device: Device
    start: int
    end: int
    maker: Device | None = None
    module: str = ""


@dataclass(frozen=True)
class Memory:
    """The bytes of a step, by device, category and position.

    Positions count the operators of a program's step, or a plan's instructions. Bytes are those of storages, and of
    what operators allocate inside, as :mod:`.scratch` has it for the host; what an allocator rounds up is not in them.
    State and inputs are there throughout, for whoever calls a step holds its arguments until it returns; and so are a
    plan's receive buffers, which executors keep from step to step. What such a buffer receives takes nothing beside it.

    Attributes:
        name: of the program.
        dims: the value of each dimension.
        peak: by device, the most bytes that are live at once; state, inputs and scratch included.
        state: by device, the bytes of parameters, buffers, optimizer state and constants.
        total: by device, the bytes of every storage that the step's operators name, each once, however long it lives:
            what a Caffe2 workspace comes to.
        high_water: by device, the most bytes that are live at once of what the operators of that device make, those of
            ``init`` included. What callers feed is not in it, and what a gpu's operator makes on the host is. With
            ``frees="operators"`` this is the figure of ``memonger.estimate_memory_usage``.
        at_peak: by device, the bytes of each category at the (first) position of the peak; without empty categories.
        positions: how many positions there are.
        unknown: storages whose size is not known, as those of a Caffe2 net without shapes. They count as nothing.
        uses: every storage and receive buffer, in the order in which they begin, and then all scratch.
        scratch: what each operator that is called allocates inside, and whence that is known. Where some of it is
            unknown, the peak of its device may be higher.
        refused: why no session runs a step at these dimensions, as outside of the program's guards; empty where one
            does.
        caveats: the program's, each with the bytes by which it can matter where that is known.
    """

    name: str
    dims: Mapping[str, int]
    peak: Mapping[str, int]
    state: Mapping[str, int]
    total: Mapping[str, int]
    high_water: Mapping[str, int]
    at_peak: Mapping[str, Mapping[str, int]]
    positions: int
    unknown: tuple[str, ...] = field(repr=False)
    uses: tuple[StorageUse, ...] = field(repr=False)
    scratch: tuple[OperatorScratch, ...] = field(repr=False, default=())
    refused: str = ""
    caveats: tuple[str, ...] = ()

    def sources(self, device: str | None = None) -> dict[Source, int]:
        """Of how many operators scratch was measured, bounded, computed, or is unknown; on one device or on all.

        Raises:
            GraphirError: there is no such device.
        """
        if device is not None:
            self._check("device", device, self.peak)
        counts = Counter(call.source for call in self.scratch if device in (None, call.device))
        return {source: counts[source] for source in get_args(Source)}

    def timeline(self, device: str, category: str | None = None) -> NDArray[np.int64]:
        """The live bytes on *device* at each position, of one category or of all.

        Raises:
            GraphirError: there is no such device or category.
        """
        self._check("device", device, self.peak)
        self._check("category", category, (None, *CATEGORIES))
        return live_bytes(
            [u for u in self.uses if u.device == device and category in (None, u.category)], self.positions
        )

    def _check(self, what: str, name: str | None, known: Iterable[str | None]) -> None:
        if name not in known:
            names = ", ".join(map(str, filter(None, known)))
            raise GraphirError(f"no {what} {name!r}", where=f"memory of {self.name!r}", fix=f"there are: {names}")

    def peak_of_storages(self, device: str) -> int:
        """The most bytes that storages alone take on *device* at once: the peak without scratch."""
        return int((self.timeline(device) - self.timeline(device, "scratch")).max())

    def peak_position(self, device: str) -> int:
        """The first position at which *device* holds the most."""
        return int(self.timeline(device).argmax())

    def _peak_text(self, device: str) -> str:
        return nbytes_text(self.peak[device]) + "+" * bool(self.sources(device)["unknown"])

    def _unknown_at_peak(self, device: str) -> bool:
        at = self.peak_position(device)
        return any(c.position == at and c.device == device for c in self.scratch if c.nbytes is None)

    def largest(self, device: str, n: int = 10) -> list[StorageUse]:
        """The *n* largest storages that *device* holds at its peak, largest first, of those whose size is known.

        Raises:
            GraphirError: there is no such device, or *n* is no whole number.
        """
        if not isinstance(n, int) or n < 0:
            raise GraphirError(f"n={n!r} is no number of storages", fix="give a whole number, 10 by default")
        at, unknown = self.peak_position(device), set(self.unknown)
        live = [u for u in self.uses if u.device == device and u.start <= at < u.end and u.blob not in unknown]
        return sorted(live, key=lambda u: -u.nbytes)[:n]

    def largest_text(self, device: str, n: int = 10) -> str:
        """A table of the *n* largest storages that *device* holds at its peak, with the modules that made them."""
        at = self.peak_position(device)
        head = f"the largest of {self._peak_text(device)} on {device} at its peak, position {at}"
        uses = self.largest(device, n)
        wide = max((len(use.blob) for use in uses), default=0)
        return "\n".join([
            head,
            *(f"  {nbytes_text(u.nbytes):>10}  {u.category:<15}  {u.blob:<{wide}}  {u.module}".rstrip() for u in uses),
            *self._whence(device),
            *self._not_counted(),
        ])  # fmt: skip

    def __str__(self) -> str:
        sizes = ", ".join(f"{dim}={value}" for dim, value in self.dims.items())
        if len(sizes) > 60:
            sizes = f"{len(self.dims)} dimensions"
        head = f"memory of {self.name!r}" + (f" at {sizes}" if sizes else "") + ": bytes at each device's peak"
        devices = list(self.peak)
        blocks = [devices[i : i + _COLUMNS] for i in range(0, len(devices), _COLUMNS)]
        tables = ("\n".join(self._table(block)) for block in blocks)
        refused = [f"  no session runs this step: {self.refused}"] if self.refused else []
        caveats = [f"  caveat: {caveat}" for caveat in self.caveats]
        return "\n".join([head, *refused, *tables, *self._whence(), *self._not_counted(), *caveats])

    def _whence(self, device: str | None = None) -> list[str]:
        """What the text says of where scratch is known from."""
        said = {"measured": "measured", "bound": "an upper bound", "computed": "computed", "unknown": "unknown"}
        counts = self.sources(device)
        parts = [f"{count} {said[source]}" for source, count in counts.items() if count]
        total = counted(sum(counts.values()), "operator")
        lines = [f"  scratch of {total}: {', '.join(parts)}"] if parts else []
        if counts["unknown"]:
            types = Counter(c.type for c in self.scratch if c.nbytes is None and device in (None, c.device))
            shown = [f"{type} ({count})" for type, count in types.most_common(_MOST_TYPES)]
            others = f" and {len(types) - len(shown)} more types" if len(types) > len(shown) else ""
            hint = "; graphir.profile measures it" if any(map(is_known, types)) else ""
            lines += [f"  +: without what is unknown, of {', '.join(shown)}{others}{hint}"]
        return lines

    def _not_counted(self) -> list[str]:
        if not self.unknown:
            return []
        others = f" and {len(self.unknown) - 1} more" if len(self.unknown) > 1 else ""
        return [f"  not counted, their sizes not known: {self.unknown[0]}{others}"]

    def _table(self, devices: list[str]) -> list[str]:
        def row(label: str, cells: list[str]) -> str:
            return f"  {label:<16}" + "".join(f"{cell:>11}" for cell in cells)

        lines = [row("", devices)]
        for category in CATEGORIES:
            values = [self.at_peak[device].get(category, 0) for device in devices]
            marks = [category == "scratch" and self._unknown_at_peak(device) for device in devices]
            if any(values) or any(marks):
                texts = [nbytes_text(v) if v else "" for v in values]
                lines.append(row(category, [text + "+" * mark or "-" for text, mark in zip(texts, marks, strict=True)]))
        lines.append(row("peak", [self._peak_text(device) for device in devices]))
        lines.append(row("of which state", [nbytes_text(self.state[device]) for device in devices]))
        return lines


def memory(
    subject: Program | Plan | Planned,
    dims: Dims | None = None,
    *,
    frees: Frees = "last use",
    threads: int | None = None,
    earlier: Iterable[Dims] = (),
    profile: Profile | Literal["cached"] | None = "cached",
    consumed: Collection[str] = (),
) -> Memory:
    """Predict the bytes that a step holds on each device.

    Args:
        subject: a program, whose operators are taken in program order, and whose copies live as everything else does;
            or a plan, whose own frees count, and whose receive buffers are kept; or a session or a compiled step, which
            stand for their plan.
        dims: the value of each dimension; the captured ones, or those that the plan was emitted for, by default.
        frees: what frees the storages of a program: the ``"last use"`` of each, as emit does; or ``"operators"``, that
            is nothing but the type ``Free``, as a Caffe2 net is executed, where everything else stays.
        threads: how many threads one kernel uses, each with scratch of its own; as many as torch now uses by default,
            as in a session.
        earlier: the values of dimensions in earlier steps of a session: a receive buffer is as large as the largest of
            all its steps takes.
        profile: what :func:`graphir.profile` measured, which goes before what formulas say; by default what files have
            of this host, and where cards are seen of the one of each gpu's number. None: formulas alone.
        consumed: inputs that nobody holds beside the step, which frees them behind their last use, as
            :class:`graphir.runtime.Function` does.

    Raises:
        GraphirError: *subject* is neither, *frees* is something else, or does not go with a plan, *threads* is no
            positive whole number, *profile* is no profile, *dims* or one of *earlier* is no mapping to whole numbers or
            names what is no dimension, a dimension has no value, or a size is negative or absurd.

    Warns:
        ProfileWarning: this machine's file cannot be used; it says so once.
    """
    subject = subject_of(subject)
    _check_arguments(subject, frees, threads, profile)
    others = tuple(earlier) if isinstance(earlier, Iterable) else (earlier,)
    check_dims("dims", {} if dims is None else dims, subject)
    for other in others:
        check_dims("one of earlier", other, subject)
    sizes = {**sizes_of(subject), **(dims or {})}
    net = subject.step
    positions = max(len(subject.instructions if isinstance(subject, Plan) else net.ops), 1)
    count = threads or torch.get_num_threads()
    figures = at_hand() if profile == "cached" else profile
    try:
        taken = measured_of(net, sizes, count, figures)
        if isinstance(subject, Program) and frees == "operators":
            uses = _uses(subject, sizes, stays(subject), taken)
        else:
            uses = _uses(subject, sizes, _with_inputs_kept(net, liveness(subject), positions, consumed), taken)
        totals = _total(net, uses)
        if isinstance(subject, Plan):
            uses = _received(subject, uses, [{**sizes, **other} for other in others], positions)
        calls = scratch_of(subject, sizes, count, taken)
        uses += _inside(subject, calls)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        what = f"the memory of {subject.name!r} cannot be computed: {type(e).__name__}: {e}"
        raise GraphirError(what, fix="verify it: it is not well-formed") from None
    return _summed(subject, sizes, uses, totals, positions, calls)


def _check_arguments(subject: Program | Plan, frees: str, threads: int | None, profile: object) -> None:
    require(subject, (Program, Plan), "memory")
    check_profile(profile)
    if frees not in get_args(Frees):
        raise GraphirError(f"frees is {frees!r}", fix="give 'last use' or 'operators'")
    if isinstance(subject, Plan) and frees != "last use":
        raise GraphirError("a plan frees its storages itself", fix="leave frees out, or give the plan's program")
    check_threads(threads)


def check_profile(profile: object) -> None:
    """Refuse what no prediction takes as a profile."""
    if not (profile is None or profile == "cached" or isinstance(profile, Profile)):
        fix = "give what graphir.profile returned, 'cached', or None"
        raise GraphirError(f"profile is a {type(profile).__name__}, not a Profile", fix=fix)


def check_threads(threads: int | None) -> None:
    """Refuse what is no number of threads."""
    if threads is not None and (type(threads) is not int or threads < 1):
        raise GraphirError(
            f"threads={threads!r}: a kernel needs at least one thread", fix="give a whole number from 1 up"
        )


def _summed(
    subject: Program | Plan,
    sizes: Dims,
    uses: list[StorageUse],
    totals: Mapping[str, int],
    positions: int,
    calls: list[OperatorScratch],
) -> Memory:
    """The figures of each device, from what takes bytes on it."""
    blobs = subject.step.blobs
    by_device: dict[str, list[StorageUse]] = {device: [] for device in subject.step.devices}
    by_maker: dict[str, list[StorageUse]] = {device: [] for device in subject.devices}
    for use in uses:
        by_device[use.device].append(use)
        if use.maker is not None:
            by_maker[use.maker].append(use)

    peak: dict[str, int] = {}
    state: dict[str, int] = {}
    at_peak: dict[str, dict[str, int]] = {}
    kept = {_CATEGORY[role] for role in STATE_ROLES}
    for device, held in by_device.items():
        timeline = live_bytes(held, positions)
        at = int(timeline.argmax())
        peak[device] = int(timeline[at])
        state[device] = sum(u.nbytes for u in held if u.category in kept)
        found = dict.fromkeys(CATEGORIES, 0)
        for use in held:
            if use.start <= at < use.end:
                found[use.category] += use.nbytes
        at_peak[device] = {category: nbytes for category, nbytes in found.items() if nbytes}
    high_water = {device: int(live_bytes(made, positions).max()) for device, made in by_maker.items()}
    unknown = dict.fromkeys(use.blob for use in uses if (b := blobs[use.blob]).shape is None or b.dtype is None)
    figures = peak, state, totals, high_water, at_peak
    refused = refused_at(program_of(subject), sizes)
    caveats = caveats_with_bytes(program_of(subject).caveats, subject.step, sizes)
    details = tuple(unknown), tuple(uses), tuple(calls), refused, caveats
    return Memory(subject.name, sizes, *figures, positions, *details)


def _uses(
    subject: Program | Plan,
    dims: Dims,
    lifetimes: Iterable[tuple[str, Lifetime]],
    taken: Mapping[int, Measured],
) -> list[StorageUse]:
    net = subject.step
    kept = _kept(net, dims, taken)
    copies = {op.outputs[0] for op in net.ops if op.type in net.dialect.copies} - set(net.external_inputs)
    makers: dict[str, Device] = {}
    modules: dict[str, str] = {}
    for op in subject.init.ops:
        makers.update(dict.fromkeys(op.outputs, op.device))
        modules.update(dict.fromkeys(op.outputs, op.module))
    for op in net.ops:
        for name in op.outputs:
            makers.setdefault(name, op.device)
            modules.setdefault(name, op.module)
    uses = []
    for storage, (start, end) in lifetimes:
        blob: Blob = net.blobs[storage]
        category = "copies" if storage in copies else _CATEGORY[blob.role]
        nbytes = storage_nbytes(net, blob, dims) + kept.get(storage, 0)
        maker = makers.get(storage)
        module = modules.get(storage, "")
        uses.append(StorageUse(storage, category, nbytes, blob.device, start, max(end, start + 1), maker, module))
    total = sum(use.nbytes for use in uses)
    if total > _MOST_COUNTED:
        raise GraphirError(f"the blobs of {net.name!r} would take {total} bytes", fix="check their sizes")
    return uses


def _kept(net: Net, dims: Dims, taken: Mapping[int, Measured]) -> dict[str, int]:
    """By storage, the bytes that results keep beyond those of their geometry.

    A type's formula says which result keeps them. What was measured of a call of another type counts as its first
    result's.
    """
    found: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        if (formula := KEPT.get(op.type)) is not None:
            try:
                beyond = dict(formula(SizedOperator(op, net.blobs, dims, threads=1)))
            except UnknownShape:
                continue
        elif i in taken:
            beyond = {0: taken[i].kept} if taken[i].kept else {}
        else:
            continue
        found.update({net.blobs[op.outputs[result]].storage: nbytes for result, nbytes in beyond.items()})
    return found


def storage_nbytes(net: Net, blob: Blob, dims: Dims) -> int:
    """Bytes of a storage of a net.

    Raises:
        GraphirError: there are less than none, or absurdly many.
    """
    nbytes = blob.nbytes(dims)
    if not 0 <= nbytes <= _MOST_BYTES:
        fix = "check its sizes and the values of dimensions"
        raise GraphirError(f"blob {blob.name!r} would take {nbytes} bytes", where=f"{net.name!r}", fix=fix)
    return nbytes


def check_dims(name: str, given: object, subject: Program | Plan) -> None:
    """Refuse what are no values of the dimensions that *subject* has; errors call them *name*."""
    if not isinstance(given, Mapping):
        what = f"{name} is a {type(given).__name__}, not a mapping"
        raise GraphirError(what, fix="give a dict from names of dimensions to their sizes")
    program = program_of(subject)
    for dim, size in given.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise GraphirError(f"{name} has {dim!r} at {size!r}", fix="give whole numbers as sizes")
    if given.keys() <= program.dims.keys():
        return
    sizes = {size for blob in program.step.blobs.values() for size in blob.shape or ()}
    known = list(dict.fromkeys([*program.dims, *sorted(dim for size in sizes for dim in size_dims(size))]))
    for dim in given:
        if dim not in known:
            raise GraphirError(
                f"{name} has {dim!r}, which no size of {program.name!r} follows{nearest(dim, known)}",
                fix=f"its dimensions: {', '.join(known)}" if known else "its sizes are plain numbers; leave it out",
            )


def _with_inputs_kept(
    net: Net, lifetimes: Mapping[str, Lifetime], positions: int, consumed: Collection[str]
) -> Iterator[tuple[str, Lifetime]]:
    given = {net.blobs[name].storage for name in net.external_inputs if name not in consumed}
    for storage, lifetime in lifetimes.items():
        yield storage, lifetime._replace(end=positions) if storage in given else lifetime


def _received(plan: Plan, uses: list[StorageUse], others: Iterable[Dims], positions: int) -> list[StorageUse]:
    """The uses where each receive buffer stands for all that copies into it make."""
    net, numbers = plan.step, plan.buffers
    found: list[StorageUse] = []
    buffers: dict[tuple[Device, int], StorageUse] = {}
    for use in uses:
        if use.blob in numbers:
            nbytes = max([use.nbytes, *[storage_nbytes(net, net.blobs[use.blob], other) for other in others]])
            kept = use._replace(category="receive buffers", nbytes=nbytes, start=0, end=positions)
            buffer = use.device, numbers[use.blob]
            buffers[buffer] = max(buffers.get(buffer, kept), kept, key=lambda use: use.nbytes)
        else:
            found.append(use)
    return sorted([*found, *buffers.values()], key=lambda use: use.start)


def _inside(subject: Program | Plan, calls: Iterable[OperatorScratch]) -> Iterator[StorageUse]:
    """The bytes of scratch that are known, as what a device holds while the operator runs."""
    modules = {name: op.module for op in subject.step.ops for name in op.outputs}
    for call in calls:
        if call.nbytes:
            where = call.device, call.position, call.position + 1, None, modules[call.blob]
            yield StorageUse(call.blob, "scratch", call.nbytes, *where)


def _total(net: Net, uses: list[StorageUse]) -> dict[str, int]:
    named = {net.blobs[name].storage for op in net.ops for name in (*op.inputs, *op.outputs)}
    found: dict[str, int] = dict.fromkeys(net.devices, 0)
    for blob, use in {use.blob: use for use in uses}.items():
        found[use.device] += use.nbytes if blob in named else 0
    return found


def live_bytes(uses: Sequence[StorageUse], positions: int) -> NDArray[np.int64]:
    """The bytes that are live at each position."""
    change = np.zeros(positions + 1, np.int64)
    if uses:
        nbytes = np.array([u.nbytes for u in uses], np.int64)
        np.add.at(change, [u.start for u in uses], nbytes)
        np.subtract.at(change, [min(u.end, positions) for u in uses], nbytes)
    return change[:-1].cumsum()
