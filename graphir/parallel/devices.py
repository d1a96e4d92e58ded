"""Device ids: how they are written, and on which real device each one is.

Ids are torch's: the numbers of GPUs. On a machine without any, explicit ids are logical devices that all live on the
host, ``gpu:0``, ``gpu:1``, …; a binding asks for that anywhere, or shares a GPU among several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from graphir.runtime.machine.places import Binding, places_of

from ..errors import GraphirError
from ..ir.device import Device, gpu
from ..ir.device import DeviceName as DeviceId
from .errors import ReplicationIndexError, ReplicationRuntimeError, ReplicationValueError

__all__ = ["HOST", "Binding", "DeviceId", "device_id", "ids_of", "places_of_ids"]

HOST: Final = -1
"""The host as an output device, torch's number for it."""

_WHERE: Final = "DataParallel(...)"
_IDS: Final = "give distinct devices: numbers from 0, such as [0, 1], torch.device('cuda:1'), or 'gpu:1'"


def ids_of(given: Sequence[DeviceId] | None, binding: Binding) -> list[int]:
    """The numbers of the devices that somebody names; none where the module itself is to run.

    Args:
        given: the devices; None: those that a binding names, else all GPUs, unless all is bound to the host.
        binding: as :func:`places_of_ids` takes it.

    Raises:
        ReplicationIndexError: there are no devices in the list.
        ReplicationValueError: a device is none, or is named twice.
    """
    if given is None:
        if isinstance(binding, Mapping):
            return ids_of(list(binding), "cpu")
        return [] if binding == "cpu" else list(range(torch.cuda.device_count()))
    if isinstance(given, (int, str, torch.device)):
        raise ReplicationValueError(f"device_ids is {given!r}, not a list", where=_WHERE, fix=f"write [{given!r}]")
    ids = [device_id(device, "device_ids") for device in given]
    if not ids:
        raise ReplicationIndexError(
            "device_ids is empty", where=_WHERE, fix="name a device, or leave it out for all GPUs"
        )
    for device in ids:
        if device < 0 or ids.count(device) > 1:
            wrong = "is no device for a replica" if device < 0 else "is named twice"
            raise ReplicationValueError(f"device_ids: {device} {wrong}", where=_WHERE, fix=_IDS)
    return ids


def device_id(given: DeviceId, argument: str) -> int:
    """The number of one device; :data:`HOST` for the host.

    ``cuda:1``, ``gpu:1`` and ``cpu:1`` are number 1, the last as a logical device; ``cpu`` is the host, and ``cuda``
    the current GPU.

    Args:
        given: the device.
        argument: for messages.

    Raises:
        ReplicationValueError: it is none.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= HOST:
        return given
    if isinstance(given, (str, torch.device)):
        text = str(given)
        if text == "cpu":
            return HOST
        if text in ("cuda", "gpu"):
            return torch.cuda.current_device() if torch.cuda.device_count() else 0
        with contextlib.suppress(GraphirError):
            device = Device.parse(text)
            if device.kind in ("gpu", "cpu"):
                return device.index
    raise ReplicationValueError(f"{argument}: {given!r} is no device", where=_WHERE, fix=_IDS)


def places_of_ids(ids: Sequence[int], output: int, binding: Binding) -> dict[int, torch.device]:
    """The real device of each id, of the output's and of the host's.

    Args:
        ids: of the replicas' devices.
        output: id of the device of the output.
        binding: ``auto``: each id is the GPU of that number, or the host where there is no GPU at all. ``cpu``: the
            host. ``cuda``: GPUs, dealt out in the order of the ids, so that several share one where there are too few.
            Or the real device of each id, such as ``{"gpu:0": "cuda:0", "gpu:1": "cuda:0"}``.

    Raises:
        ReplicationRuntimeError: there are fewer GPUs, and the binding shares none.
        ReplicationValueError: the binding does not fit.
    """
    try:
        devices = {device: gpu(device) for device in (*ids, output) if device != HOST}
    except GraphirError as e:
        raise ReplicationValueError(e.what, where=_WHERE, fix=_IDS) from e
    count = torch.cuda.device_count()
    if binding == "auto" and count:
        for device in devices:
            if device >= count:
                raise ReplicationRuntimeError(
                    f"device_ids: there is no GPU {device} here",
                    where=f"{_WHERE}; GPUs: {count}",
                    fix=f"binding={{'gpu:{device}': 'cuda:0', …}} shares one, binding='cpu' uses the host",
                )
        binding = {device: f"cuda:{device}" for device in devices}
    if isinstance(binding, Mapping):
        _refuse_others(binding, devices)
    try:
        places = places_of(binding, list(devices.values()))
    except GraphirError as e:
        raise ReplicationValueError(e.what, where=_WHERE, fix=e.fix) from e
    return {HOST: torch.device("cpu"), **{number: places[device] for number, device in devices.items()}}


def _refuse_others(
    binding: Mapping[str, DeviceId] | Mapping[int, DeviceId] | Mapping[DeviceId, DeviceId],
    devices: Mapping[int, Device],
) -> None:
    for name in binding:
        if device_id(name, "binding") not in devices:
            raise ReplicationValueError(
                f"binding: {name!r} is none of the devices",
                where=_WHERE,
                fix=f"device_ids: {', '.join(devices.values())}",
            )
