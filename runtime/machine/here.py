"""The machine that this process runs on: what predictions are of where nobody names another one.

::

    cards ──measured, some seconds──▶ machine-<digest of cards, driver, versions>.json
      │                                              │
      └── their free bytes, asked anew if wanted ────┴──▶ Topology ──binding──▶ as a session has bound its devices

The file is in the folder ``graphir`` of ``$XDG_CACHE_HOME`` (``~/.cache``). The variable ``GRAPHIR_MACHINE`` names
another file; where it is empty, there is none, and a process measures once. Of several processes one measures, and the
others read the file.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import permutations
from pathlib import Path
from typing import Final

import torch

from graphir.analysis.memory import check_threads
from graphir.analysis.profile_files import alone, cache_file
from graphir.analysis.profiles import card
from graphir.analysis.profiles import machine as host_machine
from graphir.analysis.tables import cut
from graphir.analysis.topology import Link, Speed, Topology
from graphir.errors import FileError, GraphirError, ProfileWarning, counted, warn
from graphir.ir.device import CPU, Device, DeviceName

from .calibration import beside, cores, forget, host_speed, host_topology, today
from .capacity import free_memory
from .places import Binding, dealt, is_on_cuda, places_of
from .probe import Card, Cards, Probe, speeds_and_links, unmeasurable

__all__ = ["here"]

_LONGEST: Final = 80
"""Characters of the cards, and of a binding, that stand in a machine's name."""

_MOST: Final = 800
"""Characters of all cards by which a machine is told."""

_UUID: Final = 8
"""Characters of a card's own name by which the figures of equal cards are told apart."""

_measured: Final[dict[str, Topology]] = {}
"""By process, what was measured or read, by the machine that it is of."""

_measuring: Final = threading.Lock()


def here(
    devices: Sequence[DeviceName] = (),
    *,
    threads: int = 1,
    binding: Binding = "auto",
    refresh: bool = False,
    free: bool = True,
    probe: Probe | None = None,
) -> Topology:
    """See :meth:`graphir.Topology.here`.

    Args:
        devices: the logical devices that the machine is for.
        threads: how many threads one kernel of the host uses.
        binding: the real device of each logical one, as a session takes it. By default, and by ``cuda`` where there
            are all, each gpu is the card of its number.
        refresh: measure anew.
        free: whether cards are asked for their free bytes, for which CUDA makes a context on each card.
        probe: what is asked; this machine by default.
    """
    probe = probe or Cards()
    check_threads(threads)
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise GraphirError(f"devices is {devices!r}, not a sequence of devices", fix=f"write here([{devices!r}])")
    wanted = [Device.parse(device) for device in devices]
    if refresh:
        forget()
    cards = _cards(probe, free) if binding == "auto" or is_on_cuda(binding) else []
    if not cards:
        named = wanted or [Device.parse(index) for index in range(cores())]
        return host_topology(list(dict.fromkeys([*named, CPU])), threads)
    if binding == "auto":
        _refuse_missing(wanted, len(cards))
    found = _asked_anew(_figures(probe, cards, refresh), cards, probe.driver())
    own = binding == "auto" or (binding == "cuda" and all(d.is_host or d.index < len(cards) for d in wanted))
    return found if own else _bound(found, _places(binding, wanted, len(cards)))


def _cards(probe: Probe, free: bool) -> list[Card]:
    """The cards that are there.

    Raises:
        GraphirError: one of them cannot be asked.
    """
    try:
        return probe.cards(free)
    except RuntimeError as e:  # no room for a context, or a card that has failed
        raise unmeasurable("a card of this machine cannot be asked what is free", e) from None


def _refuse_missing(wanted: Sequence[Device], count: int) -> None:
    missing = [device for device in dict.fromkeys(wanted) if not device.is_host and device.index >= count]
    if missing:
        raise GraphirError(
            f"this machine has no {', '.join(missing)}: it has {counted(count, 'CUDA card')}",
            fix="use its cards; name the machine that is planned for: topology='h200x8', Topology.of('h100', …) or "
            "Topology.load(path); or bind devices yourself: compile(…, session={'binding': 'cuda'}) puts several on "
            "a card",
        )


def _machine(probe: Probe, cards: Sequence[Card]) -> str:
    """What figures hold for: which cards, since links of equal ones need not be equal."""
    named = ", ".join([f"{card.name} {card.uuid[:_UUID]}".rstrip() for card in cards])
    if len(named) > _MOST:
        named = f"{_named(cards)} {hashlib.sha256(named.encode()).hexdigest()[:16]}"
    return f"{named}; {probe.driver()}"


def _figures(probe: Probe, cards: Sequence[Card], refresh: bool) -> Topology:
    """What was measured of this machine before, else what is measured now."""
    machine = _machine(probe, cards)
    with _measuring:
        found = None if refresh else _measured.get(machine)
        if found is None:
            path = _file(machine)
            with _taking_turns(path):
                kept = None if path is None else _kept(path, machine, refresh)
                found = kept or _measure(probe, cards, machine)
                if kept is None:
                    _keep(found, path)
        _measured[machine] = found
    return found


def _measure(probe: Probe, cards: Sequence[Card], machine: str) -> Topology:
    speeds, links = speeds_and_links(probe, cards)
    host = host_speed(1, torch.get_num_threads())
    name = f"this machine ({_named(cards)})"
    return Topology(
        name=name,
        devices={**speeds, CPU: host},
        links=links,
        machine=machine,
        measured=today(),
        seconds_to_issue=probe.seconds_to_issue(),
    )


def _named(cards: Sequence[Card]) -> str:
    """``2 x NVIDIA H100 + NVIDIA L4``."""
    counts = Counter(card.name for card in cards)
    return cut(" + ".join([f"{count} x {name}" if count > 1 else name for name, count in counts.items()]), _LONGEST)


def _asked_anew(found: Topology, cards: Sequence[Card], driver: str) -> Topology:
    """With the bytes that are free now, and the machines that profiles name."""
    machines = {f"gpu:{index}": str(card(each.name, driver)) for index, each in enumerate(cards)}
    machines[CPU] = str(host_machine())
    free = {f"gpu:{index}": card.free for index, card in enumerate(cards)} | {CPU: free_memory()}
    speeds = {
        name: speed.model_copy(update={"free": free.get(name), "machine": machines.get(name, "")})
        for name, speed in found.devices.items()
    }
    return found.model_copy(update={"devices": speeds, "name": f"this machine ({_named(cards)})"})


def _places(binding: Binding, wanted: Sequence[Device], count: int) -> dict[str, str]:
    """By logical device, the card or the host that it is bound to, as topologies name them."""
    placed = [device for device in dict.fromkeys(wanted) if not device.is_host]
    found: dict[str, str] = {CPU: CPU}
    if binding == "cuda":
        return found | {device: f"gpu:{index}" for device, index in dealt(placed, count).items()}
    places = places_of(binding, placed)
    return found | {d: f"gpu:{place.index}" if place.type == "cuda" else CPU for d, place in places.items()}


def _bound(found: Topology, places: Mapping[str, str]) -> Topology:
    """The machine of logical devices: several on one card, or on the host, have equal shares of it."""
    sharers = Counter(real for device, real in places.items() if device != CPU)
    speeds = {device: _share(found.speed(real), max(sharers[real], 1)) for device, real in places.items()}
    if sharers[CPU]:
        speeds[CPU] = beside(found.speed(CPU))
    links = [_between(found, speeds, places, a, b) for a, b in permutations(places, 2)]
    bound = ", ".join([f"{device} on {real}" for device, real in places.items() if device != CPU])
    name = f"{found.name}, {bound}" if len(bound) < _LONGEST else found.name
    return Topology(
        name=name,
        devices=speeds,
        links=tuple(links),
        machine=found.machine,
        measured=found.measured,
        seconds_to_issue=found.seconds_to_issue,
    )


def _share(speed: Speed, sharers: int) -> Speed:
    if sharers == 1:
        return speed
    return speed.model_copy(
        update={
            "flops_per_second": {dtype: rate / sharers for dtype, rate in speed.flops_per_second.items()},
            "bytes_per_second": speed.bytes_per_second / sharers,
            "memory": None if speed.memory is None else speed.memory // sharers,
            "free": None if speed.free is None else speed.free // sharers,
            "machine": "",  # a profile is of a card that is not shared
        }
    )


def _between(found: Topology, speeds: Mapping[str, Speed], places: Mapping[str, str], a: str, b: str) -> Link:
    """What leads from one logical device to another. On one real device a copy reads and writes its memory."""
    if places[a] != places[b]:
        return found.link(places[a], places[b]).model_copy(update={"source": a, "destination": b})
    speed = speeds[a]
    rate, latency = speed.bytes_per_second / 2, speed.seconds_per_call
    return Link(source=a, destination=b, bytes_per_second=rate, latency=latency, peer=True)


def _file(machine: str) -> Path | None:
    return cache_file("GRAPHIR_MACHINE", f"machine-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json")


@contextmanager
def _taking_turns(path: Path | None) -> Iterator[None]:
    """Until its end no other process measures. A file in a folder that cannot be written is read all the same."""
    with ExitStack() as stack:
        if path is not None:
            with suppress(FileError):
                stack.enter_context(alone(path))
        yield


def _kept(path: Path, machine: str, refresh: bool) -> Topology | None:
    """What the file has of this machine; None where it is to be written: there is none, it is asked for anew, or the
    one among this user's caches cannot be read.

    Raises:
        FileError: the environment names a file that is no topology, which nobody wants overwritten; or it has the
            figures of another machine.
    """
    if not path.exists():
        return None
    named = f"{path}, which GRAPHIR_MACHINE names"
    try:
        found = Topology.load(path)
    except FileError as e:
        if "GRAPHIR_MACHINE" in os.environ and path.stat().st_size:
            fix = "name another file for this machine's figures, or remove this one"
            raise FileError(f"{e.what}; nothing is written there", where=named, fix=fix) from None
        warn(f"the machine is measured anew: {e}", ProfileWarning)
        return None
    if refresh:
        return None
    if found.machine != machine:
        raise FileError(
            f"the file has the figures of another machine: {found.machine or found.name}; this is {machine}",
            where=named,
            fix="graphir profile --machine writes this machine's there; name another file; or plan for that machine: "
            "topology=Topology.load(path)",
        )
    return found


def _keep(found: Topology, path: Path | None) -> None:
    try:
        if path is not None:
            found.save(path)
    except (OSError, FileError) as e:
        warn(f"the machine's figures are not kept: {e}", ProfileWarning)
