"""The machine that this process runs on, as predictions see it.

::

    cards ──measured, some seconds──▶ machine-<digest of cards, driver, versions>.json
      │                                              │
      └─────── their free bytes, asked anew ─────────┴──▶ Topology

The file is in the folder ``graphir`` of ``$XDG_CACHE_HOME`` (``~/.cache``). The variable ``GRAPHIR_MACHINE`` names
another file; where it is empty, there is none, and a process measures once.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from graphir.analysis.profile_files import cache_file
from graphir.analysis.topology import Topology
from graphir.errors import FileError, GraphirError, ProfileWarning, warn
from graphir.ir.device import Device, DeviceName

from .calibration import cores, host_speed, host_topology
from .capacity import free_memory
from .probe import Cards, Probe, speeds_and_links

__all__ = ["here"]

_HOST: Final = "cpu:0"
_measured: Final[dict[str, Topology]] = {}
"""By process, what was measured or read, by the machine that it is of."""


def here(devices: Sequence[DeviceName] = (), *, refresh: bool = False, probe: Probe | None = None) -> Topology:
    """See :meth:`graphir.Topology.here`; *probe* asks this machine, unless another one is given."""
    probe = probe or Cards()
    wanted = [Device.parse(device) for device in devices]
    cards = probe.cards()
    if not cards:
        count = cores()
        named = wanted or [Device.parse(index) for index in range(count)]
        host = host_topology(list(dict.fromkeys([*named, Device.parse(_HOST)])), 1 if count > 1 else count)
        return host.model_copy(update={"measured": _today()})
    missing = [device for device in wanted if not device.is_host and device.index >= len(cards)]
    if missing:
        raise GraphirError(
            f"this machine has no {missing[0]}: it has {len(cards)} CUDA cards",
            fix="use those, or plan for another machine: Topology.of(…), Topology.named(…)",
        )
    names = ", ".join([card.name for card in cards])
    machine = f"{names}; {probe.driver()}"
    found = None if refresh else _measured.get(machine) or _kept(machine)
    if found is None:
        found = _measure(probe, machine, names)
        _keep(found)
    _measured[machine] = found
    free = {f"gpu:{index}": card.free for index, card in enumerate(cards)} | {_HOST: free_memory()}
    speeds = {name: speed.model_copy(update={"free": free.get(name)}) for name, speed in found.devices.items()}
    return found.model_copy(update={"devices": speeds})


def _measure(probe: Probe, machine: str, names: str) -> Topology:
    speeds, links = speeds_and_links(probe)
    host = host_speed(torch.get_num_threads())
    return Topology(
        name=f"this machine ({names})", devices={**speeds, _HOST: host}, links=links, machine=machine, measured=_today()
    )


def _today() -> str:
    return datetime.date.today().isoformat()


def _file(machine: str) -> Path | None:
    return cache_file("GRAPHIR_MACHINE", f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json")


def _kept(machine: str) -> Topology | None:
    """What the file has of this machine."""
    path = _file(machine)
    if path is None or not path.exists():
        return None
    try:
        found = Topology.load(path)
    except FileError as e:
        warn(f"the machine is measured anew: {e}", ProfileWarning)
        return None
    return found if found.machine == machine else None


def _keep(found: Topology) -> None:
    path = _file(found.machine)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except (OSError, FileError) as e:
        warn(f"the machine's figures are not kept: {e}", ProfileWarning)
