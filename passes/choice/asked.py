"""What a caller asks of a balance, and whether the program and the machine have what the caller names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from graphir.analysis.element_types import refuse_element_types
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import CPU, Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import base_name
from graphir.ir.program import Program
from graphir.ir.size import BATCH
from graphir.ir.text import nbytes_text

from ..module_patterns import claims, weighted_modules
from .attempts import Budget
from .groups import Wanted, host_memory

__all__ = ["OPTIONS", "Asked", "Option", "require_pins"]

Option: TypeAlias = Literal["shift", "park", "recompute", "state", "updates", "share_storage", "shares"]

OPTIONS: Final[tuple[Option, ...]] = ("shift", "park", "recompute", "state", "share_storage")
"""What may be done where a caller does not say: all that changes no bit. Updates on the host have the bits of its
kernels, and other shares of a batch give other means: callers have to allow them."""


class Asked(NamedTuple):
    """What a caller asks of a balance.

    Attributes:
        program: to be placed.
        limits: by device, the most bytes that it may hold.
        topology: where the program would run.
        named: the topology that the caller gave; None: the machine at hand.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.
        options: what may be done.
        devices: that may be used beside those in *limits*.
        pin: by pattern, where modules have to be.
        whole: patterns of modules that are not taken apart.
        budget: of the searches.
        known: the passes of a placement that is tried first, as text; empty where none is known.
        only: whether no other placement will do.
        free: whether the limits are what is free, and not what the caller named.
    """

    program: Program
    limits: Mapping[str, int]
    topology: Topology
    named: Topology | None
    profile: Profile | None
    threads: int
    options: tuple[Option, ...]
    devices: tuple[str, ...]
    pin: Mapping[str, str | None]
    whole: Sequence[str]
    budget: Budget
    known: str = ""
    only: bool = False
    free: bool = False

    def wanted(self) -> Wanted:
        """The same for the groups of a search. A device that has no limit may hold as much as the topology says.

        Raises:
            PassError: a device, a link or arithmetic is not there, or a module cannot be where it is pinned.
        """
        self.require_machine()
        usable = sorted(self.usable(), key=lambda device: device.is_host)  # the host is last, as in a problem
        given = {Device.parse(device): nbytes for device, nbytes in self.limits.items()}
        limits: dict[Device, int] = {}
        for device in dict.fromkeys([*self.used(), *usable]):
            room = given.get(device, self.topology.speed(device).memory)
            if room is not None:
                limits[device] = room
        gpus = tuple([device for device in usable if not device.is_host])
        hosts = CPU in self.limits and not self.free and "shift" in self.options
        return Wanted(limits, gpus, self.options, self.pins(), self.wholes(), hosts)

    def usable(self) -> list[Device]:
        """The devices that the caller names."""
        return list(dict.fromkeys(map(Device.parse, (*self.limits, *self.devices))))

    def used(self) -> list[Device]:
        """The gpus where the program is."""
        return [device for device in self.program.devices if not device.is_host]

    def require_machine(self) -> None:
        """Refuse devices, links and arithmetic that are not there.

        Raises:
            PassError: one is not.
        """
        if not self.limits:
            raise PassError(
                "balance: limits names no device", fix="give the most that a device may hold, as {'gpu:0': '3.3 GiB'}"
            )
        there = self.topology.devices
        for option, devices in (("limits", self.limits), ("devices", self.devices)):
            if missing := next((device for device in devices if device not in there), None):
                raise PassError(
                    f"balance: {option} names {missing}, which topology {self.topology.name!r} does not have",
                    fix=f"{option} can name {', '.join(list(there)[:10])}; or give a topology that has {missing}",
                )
        if CPU not in there:
            raise PassError(
                f"balance: topology {self.topology.name!r} has no device {CPU}",
                fix="add it to the topology's devices, with links to the others, or give another topology",
            )
        memory = host_memory(self.topology)
        if memory is not None and not self.free and self.limits.get(CPU, 0) > memory:
            raise PassError(
                f"balance: limits lets {CPU} hold {nbytes_text(self.limits[CPU])}, and topology "
                f"{self.topology.name!r} has {nbytes_text(memory)} there",
                fix=f"give {CPU} {memory} at most, or give a topology whose host has more",
            )
        used, usable = self.used(), self.usable()
        try:
            for device in used:
                self.topology.speed(device)
            if "shift" in self.options:
                for source in dict.fromkeys([*used, *usable]):
                    for target in usable:
                        if source != target and not (source.is_host or target.is_host):
                            self.topology.link(source, target)
                            self.topology.link(target, source)
            refuse_element_types(self.program.step, self.topology, [*used, *usable])
        except GraphirError as e:
            raise PassError(f"balance: {e.what}", fix=e.fix) from None

    def pins(self) -> dict[str, Device]:
        """By module, the device where it has to be; by name of its state, where that is expected, as maps say it of a
        module whose state is on several devices."""
        given = {pattern: Device.parse(to) for pattern, to in self.pin.items() if to is not None}
        usable = {*self.usable(), *self.program.devices}
        for pattern, device in given.items():
            if device not in usable:
                raise PassError(
                    f"balance: {pattern!r} is pinned to {device}, which no limit names",
                    fix="pin modules to gpus, and add the device to limits or devices",
                )
        expected = {name: device for name, device in given.items() if self.is_state(name)}
        claimed = claims(self.program, {text: to for text, to in self.pin.items() if text not in expected})
        for module, device in self.places() if "shift" not in self.options else ():
            named = claimed.get(module)
            if named is None or device.is_host or device == given[named]:
                continue
            raise PassError(
                f"balance: {named!r} is pinned to {given[named]}, and options do not allow to shift it from {device}",
                fix="add 'shift' to options, or pin it where it is",
            )
        return {**expected, **{module: given[pattern] for module, pattern in claimed.items()}}

    def may_divide(self) -> bool:
        """Whether other shares of the batch would change something, and options do not allow them."""
        program = self.program
        batches = {prefix + BATCH for prefix in program.replicas}
        return "shares" not in self.options and len(batches) > 1 and program.dims.keys() >= batches

    def is_state(self, name: str) -> bool:
        """Whether that is a parameter or a buffer."""
        blob = self.program.step.blobs.get(self.program.replicas[0] + name)
        return blob is not None and blob.role in ("param", "buffer")

    def places(self) -> dict[tuple[str, Device], None]:
        """Modules, and the devices where they run in the forward, or own state."""
        step = self.program.step
        run = [(op.module, op.device) for op in step.ops if op.phase == "forward" and not op.effects.shows]
        state = [name for name in step.external_inputs if step.blobs[name].role in STATE_ROLES]
        return dict.fromkeys([*run, *[(base_name(n).rpartition(".")[0], step.blobs[n].device) for n in state]])

    def wholes(self) -> dict[str, str]:
        """By module, which module of a pattern's it is in."""
        claimed = claims(self.program, self.whole)
        return {module: next(top for top in ("", *lineage(module)) if top in claimed) for module in claimed}


def require_pins(placed: Program, pins: Mapping[str, Device]) -> None:
    """Refuse pins of state that goes with what reads or overwrites it, which is elsewhere.

    Args:
        placed: the program as it is to be.
        pins: by module or by name of state, the device where it has to be.

    Raises:
        PassError: there is one.
    """
    step = placed.step
    owners = weighted_modules(placed) if pins else set()  # no pass moves what a container owns by itself
    for name in step.external_inputs if pins else ():
        own, device = base_name(name), step.blobs[name].device
        module = own.rpartition(".")[0]
        pinned = own if own in pins else module
        if step.blobs[name].role not in STATE_ROLES or (pinned == module and module not in owners):
            continue
        if device not in (wanted := pins.get(pinned, device), CPU):
            raise PassError(
                f"balance: {pinned!r} is pinned to {wanted}, but {name!r} goes with what uses it, on {device}",
                fix="pin what uses it to the same device, or pin less",
            )
