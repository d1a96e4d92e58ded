"""Listing what a step copies between devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property

from ...collector import collector_paused
from ...errors import GraphirError, PlacementError, counted
from ...ir.blob import Blob, dense_nbytes
from ...ir.device import Device
from ...ir.net import Net
from ...ir.operator import Operator
from ...ir.placement import required_devices, same_memory
from ...ir.plan import Plan, program_of, sizes_of
from ...ir.program import Program
from ...ir.size import Dims
from ...ir.text import operator_text
from ...ir.verify import Planned, require, subject_of
from ..memory import check_dims
from ..overlap import flows, overlap
from .crossings import Crossing, Crossings, Kind, crossings, is_copy, kind_of
from .detours import detours
from .moves import Moves, Placed, Reason
from .results import Copied, Link, Reduced, Traffic

__all__ = ["traffic"]


def traffic(subject: Program | Plan | Net | Planned, dims: Dims | None = None) -> Traffic:
    """What a step copies between devices, and which move of which pass made each copy necessary.

    Bytes are those of the elements that are copied, as a session's report has them. What several devices reduce
    together is listed apart.

    Args:
        subject: a program with its copies, a plan, or a net; a session and a compiled step stand for their plan.
        dims: the value of each dimension; the captured ones, or those that the plan was emitted for, by default.

    Raises:
        GraphirError: *subject* is none of these, *dims* is no mapping to whole numbers or names what is no dimension,
            or a dimension has no value.
        PlacementError: operands are on other devices than their operators, and have no copies yet.
    """
    subject = subject_of(subject)
    require(subject, (Program, Plan, Net), "traffic")
    program = _program(subject)
    check_dims("dims", {} if dims is None else dims, program)
    sizes = {**({} if isinstance(subject, Net) else sizes_of(subject)), **(dims or {})}
    try:
        with collector_paused():
            found = _traffic(program, sizes)
            if isinstance(subject, Plan) and flows(subject):
                return found.model_copy(update={"overlap": overlap(subject)})
            return found
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as e:
        what = f"the traffic of {program.name!r} cannot be computed: {type(e).__name__}: {e}"
        raise GraphirError(what, fix="verify it: it is not well-formed") from None


def _program(subject: Program | Plan | Net) -> Program:
    if isinstance(subject, Net):
        return Program(subject.name, Net(f"{subject.name}.init", (), {}), subject)
    return program_of(subject)


def _traffic(program: Program, sizes: Dims) -> Traffic:
    net = program.step
    _require_copies(program)
    found = crossings(net)
    measure = _Measure(net, sizes)
    copies = _Explained(program, found, measure).copies()
    kinds: Counter[Kind] = Counter()
    for copied in copies:
        kinds[copied.kind] += copied.nbytes or 0
    return Traffic(
        name=program.name,
        dims=dict(sizes),
        copies=tuple(copies),
        links=tuple(_links(copies)),
        kinds={kind: nbytes for kind, nbytes in kinds.most_common() if nbytes},
        reduced=tuple(_reduced(net, measure)),
        warnings=tuple(detours(program, found, measure)),
    )


def _require_copies(program: Program) -> None:
    """Refuse a program some of whose operands are elsewhere, for what has no copy yet would count nothing."""
    blobs, away, first = program.step.blobs, 0, None
    for op in program.step.ops:
        device = op.device
        for name in op.inputs:
            if blobs[name].device is not device:
                break
        else:
            continue
        needed, _ = required_devices(op, blobs, program.step.dialect)
        missing = sum(not same_memory(blobs[n].device, d) for n, d in zip(op.inputs, needed, strict=True))
        away += missing
        if missing and first is None:
            first = op
    if first is not None:
        raise PlacementError(
            f"{counted(away, 'operand')} of {program.name!r} are elsewhere than their operators and have no copies yet",
            at=operator_text(first, program.step),
            fix="give passes.inject_copies(program)",
        )


class _Measure:
    """What a copy of a blob moves, by the blob's shape and element type."""

    def __init__(self, net: Net, dims: Dims) -> None:
        self.net, self.dims = net, dims
        self.known: dict[object, int | None] = {}

    def __call__(self, name: str) -> int | None:
        blob: Blob = self.net.blobs[name]
        key = blob.shape, blob.dtype
        if key not in self.known:
            self.known[key] = None if None in key else dense_nbytes(blob, self.dims)
        return self.known[key]


class _Explained:
    """The copies of a program, each with its reasons."""

    def __init__(self, program: Program, found: Crossings, measure: _Measure) -> None:
        self.program, self.net, self.found, self.measure = program, program.step, found, measure
        self.moves = Moves(program)
        self.filled = {name: op for op in program.init.ops for name in op.outputs}
        self.gradient_of: dict[str, list[str]] = {}
        for name, gradient in self.net.gradients.items():
            self.gradient_of.setdefault(self.net.blobs[gradient].storage, []).append(name)
        self.placed: dict[tuple[int, Device], tuple[Reason, ...]] = {}

    def copies(self) -> list[Copied]:
        return [self.copied(crossing) for crossing in self.found.copies]

    def copied(self, crossing: Crossing) -> Copied:
        op, ops, blobs = self.net.ops[crossing.position], self.net.ops, self.net.blobs
        (read,), (made,) = op.reads, op.makes
        reader = ops[crossing.reader] if crossing.reader >= 0 else None
        maker = ops[crossing.maker] if crossing.maker >= 0 else self.filled.get(crossing.origin)
        return Copied(
            blob=_versioned(*read),
            copy=_versioned(*made),
            source=blobs[read[0]].device,
            destination=blobs[made[0]].device,
            nbytes=self.measure(made[0]),
            kind=crossing.kind,
            phase=op.phase,
            reader=reader.outputs[0] if reader and reader.outputs else "",
            operator=reader.type if reader else "",
            module=reader.module if reader else maker.module if maker else "",
            reasons=self.reasons(crossing, maker, reader),
        )

    def reasons(self, crossing: Crossing, maker: Operator | None, reader: Operator | None) -> tuple[Reason, ...]:
        """The moves of the reader, and those of the value; where two replicas meet, that there are replicas."""
        op, blobs = self.net.ops[crossing.position], self.net.blobs
        if op.by == "park":
            return self.moves.parked(op.of or crossing.origin, maker.module if maker else "")
        found: list[Reason] = []
        if reader is not None and reader.outputs:
            found += self.of(crossing.reader, reader, blobs[op.outputs[0]].device)
        source = blobs[op.inputs[0]].device
        if maker is not None and crossing.maker >= 0:
            found += self.of(crossing.maker, maker, source)
        else:
            by, module = (maker.by, maker.module) if maker else ("", "")
            found += self.moves.of(Placed(crossing.origin, source, by, module, (crossing.origin,)))
        if reader is not None and reader.outputs:
            found += self.moves.between_replicas(crossing.origin, reader.outputs[0])
        there = next((end for end in (reader, maker) if end is not None and end.by == "park"), None)
        if not found and there is not None:
            found += self.moves.parked(crossing.origin, there.module)
        if not found and self.moves.entries:
            found += self.of_blob(op.inputs[0])
            if blobs[op.outputs[0]].storage in self.lasting:
                found += self.of_blob(op.outputs[0])
        return tuple(dict.fromkeys(found))

    def of_blob(self, name: str) -> tuple[Reason, ...]:
        """The moves that put a blob where it lives, wherever its values are made and read."""
        storage = self.net.blobs[name].storage
        by = self.filled[storage].by if storage in self.filled else ""
        return self.moves.of(Placed(storage, self.net.blobs[storage].device, by, "", (storage,)))

    @cached_property
    def lasting(self) -> set[str]:
        """The storages that are more than copies."""
        blobs, dialect = self.net.blobs, self.net.dialect
        named = [name for op in self.net.ops if not is_copy(op, dialect) for name in op.outputs]
        return {blobs[name].storage for name in (*self.net.external_inputs, *named)}

    def of(self, position: int, op: Operator, device: Device) -> tuple[Reason, ...]:
        """The moves that put an operator on a device."""
        key = position, device
        if key not in self.placed:
            name = op.outputs[0] if op.outputs else ""
            handled = self.handled(op) if self.moves.entries else ()
            self.placed[key] = self.moves.of(Placed(name, device, op.by, op.module, handled))
        return self.placed[key]

    def handled(self, op: Operator) -> tuple[str, ...]:
        """The storages that an operator reads and makes, and the activations whose gradients they are."""
        found: list[str] = []
        for name in (*op.inputs, *op.outputs, *([op.of] if op.of in self.net.blobs else [])):
            storage = self.net.blobs[name].storage
            storage = self.found.origins.get(storage, storage)
            found += [*self.gradient_of.get(storage, ()), storage]
        return tuple(found)


def _versioned(name: str, version: int) -> str:
    return f"{name};{version}" if version else name


def _links(copies: Iterable[Copied]) -> list[Link]:
    """The totals by link, in the order of their devices."""
    found: dict[tuple[str, str], list[Copied]] = {}
    for copied in copies:
        found.setdefault((copied.source, copied.destination), []).append(copied)
    links = []
    for source, destination in sorted(found, key=lambda pair: [Device.parse(device).order() for device in pair]):
        on = found[source, destination]
        kinds: Counter[Kind] = Counter()
        for copied in on:
            kinds[copied.kind] += copied.nbytes or 0
        links.append(
            Link(
                source=source,
                destination=destination,
                copies=len(on),
                nbytes=sum(kinds.values()),
                unknown=sum(copied.nbytes is None for copied in on),
                kinds={kind: nbytes for kind, nbytes in kinds.most_common() if nbytes},
            )
        )
    return links


def _reduced(net: Net, measure: _Measure) -> list[Reduced]:
    """What collectives reduce over several devices."""
    gradients = {net.blobs[name].storage for name in net.gradients.values()}
    found: dict[tuple[tuple[str, ...], Kind], list[int | None]] = {}
    for op in net.ops:
        if op.type in net.dialect.stays and op.type != "Free" and op.inputs:
            devices = tuple(dict.fromkeys([net.blobs[name].device for name in op.inputs]))
            if len(devices) > 1:
                given = op.inputs[0]
                kind = kind_of(net.blobs[given].storage, net, gradients)
                found.setdefault((devices, kind), []).append(measure(given))
    return [
        Reduced(
            devices=devices,
            collectives=len(sizes),
            nbytes=sum(size or 0 for size in sizes),
            unknown=sizes.count(None),
            kind=kind,
        )
        for (devices, kind), sizes in found.items()
    ]
