"""Which device each placed module goes to: as it is said, in turn, or so that bytes are balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES, dense_nbytes
from graphir.ir.device import CPU, Device
from graphir.ir.program import Program

from .module_patterns import roots

__all__ = ["STRATEGIES", "homes_of", "module_nbytes"]

STRATEGIES: Final = ("round_robin", "balanced")
"""How devices are chosen where none is said: one after the other in the order of the paths, or the largest module
first, each to the device with the fewest bytes."""


def homes_of(
    program: Program, claimed: Mapping[str, str], placement: Mapping[str, str], devices: Sequence[Device]
) -> dict[str, Device]:
    """The device of each placed module, in the order of the paths.

    Args:
        program: captured.
        claimed: by placed module, the pattern that holds for it.
        placement: by pattern, a device or a strategy. Modules that one pattern claims with those inside of them go to
            one device.
        devices: of the replicas. What goes to the host is the first one's.

    Raises:
        PassError: a device is none of *devices*, and not the host.
    """
    within = roots(claimed)
    for pattern, target in placement.items():
        if target not in (*STRATEGIES, *devices, CPU):
            raise PassError(
                f"{pattern!r} cannot be placed on {target}: no replica is there",
                fix=f"devices: {', '.join(devices)}, {CPU}; or {' or '.join(map(repr, STRATEGIES))}",
            )
    nbytes = dict.fromkeys(within.values(), 0)
    for module, own in module_nbytes(program).items():
        if module in within:
            nbytes[within[module]] += own
    held = dict.fromkeys(devices, 0)
    found: dict[str, Device] = {}

    def place(root: str, device: Device) -> None:
        found[root] = devices[0] if device.is_host else device
        if not device.is_host:
            held[device] += nbytes[root]

    for root in nbytes:
        if placement[claimed[root]] not in STRATEGIES:
            place(root, Device.parse(placement[claimed[root]]))
    for pattern, target in placement.items():
        mine = [root for root in nbytes if claimed[root] == pattern]
        if target == "round_robin":
            for i, root in enumerate(mine):
                place(root, devices[i % len(devices)])
        elif target == "balanced":
            for root in sorted(mine, key=nbytes.__getitem__, reverse=True):
                place(root, min(devices, key=held.__getitem__))
    return {module: found[root] for module, root in within.items()}


def module_nbytes(program: Program) -> dict[str, int]:
    """By module, the bytes of its own parameters and buffers, and of their optimizer state."""
    found: dict[str, int] = {}
    owner = dict(program.interface.owners())
    for name in program.step.external_inputs:
        blob = program.step.blobs[name]
        if blob.role in STATE_ROLES:
            module = owner.get(name, name).rpartition(".")[0]
            found[module] = found.get(module, 0) + dense_nbytes(blob, program.dims)
    return found
