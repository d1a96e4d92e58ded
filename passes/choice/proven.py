"""What every placement of a program holds, whatever its groups and options: below it limits cannot be kept.

* An operator runs on one device, and what it reads and makes is there while it runs. Of a view it reads, no more than
  the view has to be there.
* State and inputs are on some device throughout, and at each operator so is what it makes and what it reads of that.
  State that the update alone touches may be parked on the host, and its updates may run there, where options say so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.plan import issued_as
from graphir.ir.program import Program

from ..storage import overwritable
from .step import Step

__all__ = ["needed", "proven"]


def proven(
    program: Program, limits: Mapping[Device, int], devices: Sequence[Device], options: Collection[str]
) -> float:
    """What limits have to be multiplied by, at least.

    Args:
        program: to be placed.
        limits: by device, the most that it may hold; of others it may be any number.
        devices: that may be used beside those of the program, and beside the host if that has a limit.
        options: what may be done to place it.
    """
    step, moves = program.step, "shift" in options
    used = list(dict.fromkeys([*[d for d in step.devices if not d.is_host], *devices]))
    used += [device for device in limits if device.is_host and moves]  # the host may run modules
    found, most = 1.0, 0
    steps = Step(program, None, 1)
    parked = {steps.names[k] for k in steps.updated.nonzero()[0].tolist()} if {*options} & {"state", "updates"} else ()
    for op in step.ops:
        if "updates" in options and op.phase == "update" and any(step.blobs[n].storage in parked for n in op.inputs):
            continue
        if op.device.is_host or issued_as(op) != "run" or op.effects.shows:
            continue
        most = max(most, needed(op, program, standing=False))
        on = used if moves else [op.device]
        found = max(found, _over(needed(op, program), [limits.get(device) for device in on]))
    standing: dict[Device, int] = dict.fromkeys(used, 0)
    for name in step.external_inputs:
        blob = step.blobs[name]
        if not blob.is_view and not blob.device.is_host and _stands(blob) and name not in parked:
            standing[blob.device] += blob.nbytes(program.dims)
    if not moves:
        return max([found, *[_over(nbytes, [limits.get(device)]) for device, nbytes in standing.items()]])
    known = [limit for device in used if (limit := limits.get(device)) is not None]
    together = (sum(standing.values()) + most) / max(sum(known), 1) if len(known) == len(used) else 0.0
    return max(found, together)


def _over(nbytes: int, limits: Sequence[int | None]) -> float:
    """What the largest of some limits has to be multiplied by to be so many bytes."""
    known = [limit for limit in limits if limit is not None]
    return nbytes / max(max(known), 1) if known and len(known) == len(limits) else 0.0


def needed(op: Operator, program: Program, *, standing: bool = True) -> int:
    """The bytes that an operator needs where it runs: what it reads and makes; without state and inputs, unless they
    are *standing* there for it alone."""
    blobs, dims = program.step.blobs, program.dims
    read: dict[str, int] = {}
    for name in op.inputs:
        blob = blobs[name]
        if blob.device == op.device:
            least = min(blob.nbytes(dims), blobs[blob.storage].nbytes(dims))
            read[blob.storage] = max(read.get(blob.storage, 0), least)
    makes = sum([blobs[name].nbytes(dims) for name in op.outputs if blobs[name].storage == name and name not in read])
    if (over := overwritable(op, blobs)) is not None and over.storage in read:
        makes = 0  # its result may take the place of its operand
    return makes + sum([nbytes for storage, nbytes in read.items() if standing or not _stands(blobs[storage])])


def _stands(blob: Blob) -> bool:
    """Whether a blob is there throughout a step."""
    return blob.role in STATE_ROLES or blob.role == "input"
