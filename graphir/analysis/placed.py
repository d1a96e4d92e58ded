"""Where the modules are that one device has alone, what they hold, and what they exchange with the replicas."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from ..ir.blob import dense_nbytes
from ..ir.device import Device
from ..ir.names import prefix_of
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.plan import Plan, program_of, sizes_of
from ..ir.program import Program
from ..ir.size import Dims
from ..ir.text import nbytes_text
from ..ir.verify import Planned, require, subject_of

__all__ = ["PlacedModule", "PlacedModules", "exchanged", "placed"]

_LONGEST: Final = 30
"""Of a module's path, in the table."""


class PlacedModule(NamedTuple):
    """A module that one device has alone.

    Attributes:
        module: its path.
        device: where it is.
        parameters: bytes of its parameters and buffers.
        state: bytes of its optimizer state.
        sent: bytes that cross to or from other devices in a step, gradients included.
    """

    module: str
    device: Device
    parameters: int
    state: int
    sent: int


@dataclass(frozen=True)
class PlacedModules:
    """Every placed module of a program; prints as a table.

    Attributes:
        name: of the program.
        modules: in the order of the program's state.
        devices: every device that has a replica.
    """

    name: str
    modules: tuple[PlacedModule, ...]
    devices: tuple[Device, ...]

    @cached_property
    def held(self) -> dict[Device, int]:
        """Bytes of placed modules and their optimizer state, by device."""
        found = dict.fromkeys(self.devices, 0)
        for each in self.modules:
            found[each.device] = found.get(each.device, 0) + each.parameters + each.state
        return found

    @property
    def imbalance(self) -> float:
        """The most bytes that a device holds of placed modules, by their mean: 1 where they are balanced."""
        held = self.held.values()
        return max(held) * len(held) / sum(held) if sum(held) else 1.0

    def to_json(self) -> str:
        """The same as JSON."""
        modules = [{**each._asdict(), "device": str(each.device)} for each in self.modules]
        held = {str(device): nbytes for device, nbytes in self.held.items()}
        return json.dumps({"program": self.name, "modules": modules, "held": held, "imbalance": self.imbalance})

    def __str__(self) -> str:
        lines = [
            f"placed modules of {self.name!r}: {len(self.modules)} on {len(self.devices)} devices, the fullest has "
            f"{self.imbalance:.2f} of the mean",
            f"  {'module':<{_LONGEST}}  {'device':<7} {'parameters':>11} {'state':>11} {'a step':>11}",
        ]
        for each in self.modules:
            path = each.module if len(each.module) <= _LONGEST else f"…{each.module[1 - _LONGEST :]}"
            figures = [nbytes_text(n) if n else "-" for n in (each.parameters, each.state, each.sent)]
            lines.append(f"  {path:<{_LONGEST}}  {each.device:<7} " + " ".join(f"{figure:>11}" for figure in figures))
        for device, nbytes in self.held.items():
            lines.append(f"  {'together':<{_LONGEST}}  {device:<7} {nbytes_text(nbytes):>11}")
        return "\n".join(lines)


def placed(program_or_plan: Program | Plan | Planned) -> PlacedModules:
    """What :func:`graphir.passes.shard` has placed: each module's device, its bytes, and those of its exchange.

    Args:
        program_or_plan: sharded, with or without its copies; of a plan, at the plan's sizes. A session and a compiled
            step stand for their plan.

    Raises:
        GraphirError: it is neither a program nor a plan.
    """
    subject = subject_of(program_or_plan)
    require(subject, (Program, Plan), "placed")
    program, dims = program_of(subject), sizes_of(subject)
    interface, blobs = program.interface, program.step.blobs
    owner = dict(interface.owners())
    parameters: Counter[str] = Counter()
    state: Counter[str] = Counter()
    devices: dict[str, Device] = {}
    for name in interface.placed:
        blob = blobs.get(program.blob_of(name))
        if blob is None or blob.role not in ("param", "buffer", "state"):
            continue
        module = owner.get(name, name).rpartition(".")[0]
        (state if blob.role == "state" else parameters)[module] += dense_nbytes(blob, dims)
        if blob.role != "state" or module not in devices:
            devices[module] = blob.device
    sent = _sent(program, dims)
    found = tuple([PlacedModule(m, device, parameters[m], state[m], sent[m]) for m, device in devices.items()])
    replicas = [Device.parse(prefix[:-1].replace("_", ":")) for prefix in program.replicas if prefix]
    return PlacedModules(program.name, found, tuple(dict.fromkeys([*replicas, *devices.values()])))


def _sent(program: Program, dims: Dims) -> Counter[str]:
    """The bytes of copies that bring the rows of placed modules, or their gradients, to another device; by module."""
    net = program.step
    modules = {name: op.module for op in net.ops for name in op.outputs}
    found: Counter[str] = Counter()
    for op in exchanged(net):
        module = modules.get(op.of or net.blobs[op.inputs[0]].storage, "")
        found[module] += dense_nbytes(net.blobs[op.inputs[0]], dims)
    return found


def exchanged(net: Net) -> list[Operator]:
    """The copies that bring something from one replica, or from a placed module, to another: a reader of the copy has
    another prefix than its source. Copies within a replica are those of a placement."""
    copies: dict[str, Operator] = {}
    found: dict[str, Operator] = {}
    for op in net.ops:
        for name in op.inputs if copies else ():
            copy = copies.get(name)
            if copy is not None and op.outputs and prefix_of(op.outputs[0]) != prefix_of(copy.inputs[0]):
                found[name] = copy
        if op.kind == "copy":
            copies[op.outputs[0]] = op
    return list(found.values())
