"""Which real device each logical device of a plan is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import torch

from graphir.errors import GraphirError, SessionError, nearest
from graphir.ir.device import Device, DeviceName

__all__ = ["Binding", "dealt", "generator_on", "is_on_cuda", "places_of"]

Places: TypeAlias = "Mapping[str, DeviceName] | Mapping[int, DeviceName] | Mapping[DeviceName, DeviceName]"
Binding: TypeAlias = 'Literal["auto", "cpu", "cuda"] | Places'

_HOST: Final = torch.device("cpu")
_NAMES: Final = ("auto", "cpu", "cuda")
_FIX: Final = f"supported: {', '.join(_NAMES)}, or a dict such as {{'gpu:0': 'cuda:0'}}"


def places_of(binding: Binding, devices: Sequence[Device], host_only: bool = False) -> dict[Device, torch.device]:
    """The real device of each logical one. Host memory is host memory always; several devices may share one.

    Args:
        binding: ``cpu`` puts all on the host, ``cuda`` each on the CUDA device of its number, as :func:`dealt` has it;
            ``auto`` is ``cuda`` where there is any, else ``cpu``. Or the real device of each logical one that is no
            host, which is named as it is printed or by its number.
        devices: of the plan.
        host_only: whether ``auto`` is ``cpu`` in any case.

    Raises:
        SessionError: an unknown binding, a device that the plan or this machine does not have, or one without a place.
    """
    placed = [device for device in devices if not device.is_host]
    if binding == "auto":
        binding = "cuda" if torch.cuda.device_count() and placed and not host_only else "cpu"
    if isinstance(binding, Mapping):
        given = _given(binding, placed)
    elif binding == "cuda":
        count = _cuda_count("binding 'cuda'")
        given = {device: torch.device("cuda", index) for device, index in dealt(placed, count).items()}
    elif binding in _NAMES:
        given = dict.fromkeys(placed, _HOST)
    else:
        raise SessionError(f"binding {binding!r} is not supported", where="Session(...)", fix=_FIX)
    return {device: given.get(device, _HOST) for device in devices}


def is_on_cuda(binding: Binding, host_only: bool = False) -> bool:
    """Whether a binding has CUDA devices, of whatever plan."""
    if isinstance(binding, Mapping):
        return any(isinstance(place, int) or str(place).startswith("cuda") for place in binding.values())
    return binding == "cuda" or (binding == "auto" and not host_only and torch.cuda.device_count() > 0)


def dealt(devices: Sequence[Device], count: int) -> dict[Device, int]:
    """The number of the CUDA device for each of these: its own, if there are all; else they are dealt out to so many,
    the lowest number first."""
    if all(device.index < count for device in devices):
        return {device: device.index for device in devices}
    ordered = sorted(devices, key=lambda device: device.index)
    return {device: i % count for i, device in enumerate(ordered)}


def _given(binding: Places, placed: Sequence[Device]) -> dict[Device, torch.device]:
    given = _named(binding, placed)
    found = {}
    for device in placed:
        if device not in given:
            raise SessionError(f"binding: {device} has no place", where="Session(...)", fix=f"add {str(device)!r}: …")
        try:
            place = torch.device(given[device])
        except (RuntimeError, TypeError) as e:
            raise SessionError(
                f"binding: {given[device]!r} is no device", where="Session(...)", fix="such as 'cuda:0' or 'cpu'"
            ) from e
        if place.type == "cuda" and (place.index or 0) >= _cuda_count(f"binding {device} to {place}"):
            raise SessionError(
                f"binding: there is no {place} here", where="Session(...)", fix=f"CUDA: {torch.cuda.device_count()}"
            )
        current = place.type == "cuda" and place.index is None
        found[device] = torch.device("cuda", torch.cuda.current_device()) if current else place
    return found


def _named(binding: Places, placed: Sequence[Device]) -> dict[Device, DeviceName]:
    """The binding by the plan's devices."""
    found: dict[Device, DeviceName] = {}
    for name, place in binding.items():
        try:
            device = Device.parse(name)
        except GraphirError as e:
            raise SessionError(f"binding: {e.what}", where="Session(...)", fix=e.fix) from None
        if device not in placed:
            raise SessionError(
                f"binding: the plan has no device {name!r}{nearest(device, placed)}",
                where="Session(...)",
                fix=f"its devices: {', '.join(placed) or 'none'}",
            )
        if device in found:
            raise SessionError(
                f"binding: {device} is given twice", where="Session(...)", fix="give each device one place"
            )
        found[device] = place
    return found


def _cuda_count(what: str) -> int:
    count = torch.cuda.device_count()
    if not count:
        raise SessionError(f"{what}: there is no CUDA device here", where="Session(...)", fix="use binding='cpu'")
    return count


def generator_on(place: torch.device) -> torch.Generator:
    """A random generator for a device; the meta device, which draws nothing, gets the host's."""
    return torch.Generator(_HOST if place.type == "meta" else place)
