"""What each operator of a step allocates inside, and whence that is known: measured, computed, or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from ..ir.device import Device
from ..ir.net import Net
from ..ir.plan import Plan, parts_of
from ..ir.program import Program
from ..ir.size import Dims
from .alike import Kinds
from .profiles import Measured, Profile
from .scratch import is_called, scratch

__all__ = ["OperatorScratch", "Source", "held_inside", "measured_of", "scratch_of"]

Source: TypeAlias = Literal["measured", "bound", "computed", "unknown"]
"""Whence what an operator allocates inside is known: it was *measured*; measured too, but follows from values, so that
the most that was found is a *bound*; *computed* by a formula; or it is *unknown*, and counts nothing."""


class OperatorScratch(NamedTuple):
    """What a call of an operator allocates inside, on one device.

    Attributes:
        position: of the operator in a program's step, of the instruction in a plan.
        blob: the first one that it makes.
        type: of the operator.
        device: where the blob lives.
        source: whence the bytes are known.
        nbytes: at most at once; None where they are unknown.
    """

    position: int
    blob: str
    type: str
    device: Device
    source: Source
    nbytes: int | None


def measured_of(net: Net, dims: Dims, threads: int, profile: Profile | None) -> dict[int, Measured]:
    """What was measured of the operators at these positions."""
    if profile is None:
        return {}
    found = ((i, profile.find(op, net.blobs, dims, threads)) for i, op in enumerate(net.ops) if is_called(op))
    return {i: measured for i, measured in found if measured is not None}


def scratch_of(
    subject: Program | Plan, dims: Dims, threads: int, taken: Mapping[int, Measured]
) -> list[OperatorScratch]:
    """What each operator allocates inside, at its position; of a collective each participant for itself."""
    net = subject.step
    known: dict[int, tuple[Source, int | None]] = {}
    for i, op in enumerate(net.ops):
        if i in taken:
            known[i] = "bound" if taken[i].bound else "measured", taken[i].scratch
        elif is_called(op):
            nbytes = scratch(op, net.blobs, dims, threads)
            known[i] = "unknown" if nbytes is None else "computed", nbytes
    if isinstance(subject, Plan):
        calls = [(at, i.op, i.part) for at, i in enumerate(subject.instructions) if i.op in known]
    else:
        calls = [(i, i, part) for i in known for part in range(parts_of(net.ops[i]))]
    found = []
    for at, position, part in calls:
        op = net.ops[position]
        blob = net.blobs[op.outputs[part]]
        found.append(OperatorScratch(at, blob.name, op.type, blob.device, *known[position]))
    return found


def held_inside(
    net: Net, dims: Dims, threads: int, taken: Mapping[int, Measured], kinds: Kinds
) -> Iterator[tuple[int, Device, int]]:
    """The operators of a net that are known to allocate something inside, by position, each with a device and bytes:
    what :func:`scratch_of` has, without what is nothing or unknown; *kinds* says which operators are alike."""
    known: list[int] = []
    for i, (op, first) in enumerate(zip(net.ops, kinds, strict=True)):
        if first != i:
            known.append(known[first])
        else:
            known.append(scratch(op, net.blobs, dims, threads) or 0 if is_called(op) else 0)
        nbytes = taken[i].scratch if i in taken else known[i]
        if nbytes:
            for name in op.outputs[: parts_of(op)]:
                yield i, net.blobs[name].device, nbytes
