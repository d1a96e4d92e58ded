"""Which device each placed module goes to: as it is said, in turn, or so that bytes are balanced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.program import Program

from .module_patterns import claims, outermost

__all__ = ["STRATEGIES", "homes_of", "module_nbytes"]

STRATEGIES: Final = ("round_robin", "balanced")
"""How devices are chosen where none is said: one after the other in the order of the paths, or the largest module
first, each to the device with the fewest bytes."""


def homes_of(program: Program, placement: Mapping[str, str], devices: Sequence[Device]) -> dict[str, Device]:
    """The device of each module that patterns of *placement* name, in the order of the paths.

    Raises:
        PassError: a pattern names no module, two name the same one, or a device is none of *devices*.
    """
    claimed = claims(program, placement)
    roots = outermost(claimed)
    for pattern, target in placement.items():
        if target not in STRATEGIES and target not in devices:
            raise PassError(
                f"{pattern!r} cannot be placed on {target}: no replica is there",
                fix=f"devices: {', '.join(devices)}; or {' or '.join(map(repr, STRATEGIES))}",
            )
    nbytes = module_nbytes(program, roots)
    held = dict.fromkeys(devices, 0)
    found: dict[str, Device] = {}

    def place(root: str, device: Device) -> None:
        found[root] = device
        held[device] += nbytes[root]

    for root in roots:
        if placement[claimed[root]] not in STRATEGIES:
            place(root, Device.parse(placement[claimed[root]]))
    for pattern, target in placement.items():
        mine = [root for root in roots if claimed[root] == pattern]
        if target == "round_robin":
            for i, root in enumerate(mine):
                place(root, devices[i % len(devices)])
        elif target == "balanced":
            for root in sorted(mine, key=nbytes.__getitem__, reverse=True):
                place(root, min(devices, key=held.__getitem__))
    return {root: found[root] for root in roots}


def module_nbytes(program: Program, roots: Iterable[str]) -> dict[str, int]:
    """The bytes of parameters, buffers and optimizer state of each module, all that is inside of it included."""
    found = dict.fromkeys(roots, 0)
    owner = dict(program.interface.owners())
    for name in program.step.external_inputs:
        blob = program.step.blobs[name]
        if blob.role in STATE_ROLES:
            path = owner.get(name, name).rpartition(".")[0]
            while path and path not in found:
                path = path.rpartition(".")[0]
            if path:
                found[path] += dense_nbytes(blob, program.dims)
    return found
