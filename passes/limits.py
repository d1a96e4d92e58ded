"""Bytes that a device may hold, as callers say them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from pydantic import BeforeValidator, ValidatorFunctionWrapHandler, WrapValidator

from graphir.analysis.topology import Topology
from graphir.errors import PassError
from graphir.ir.device import CPU, Device, DeviceName
from graphir.ir.text import nbytes_of

from .base import Placed, each_once, read_option

__all__ = ["AutoLimits", "Bytes", "Limits", "free_limits"]

_USED: Final = 0.95
"""The share of what is free that is used."""


def _nbytes(given: Any) -> int:
    return read_option(nbytes_of, given)


Bytes: TypeAlias = Annotated[int, BeforeValidator(_nbytes)]
"""An option that is a number of bytes: given as such, or as text like ``24 MiB`` or ``24MB``."""

Limits: TypeAlias = Annotated[dict[Placed, Bytes], WrapValidator(each_once)]
"""An option that says of devices how many bytes each may hold."""


def _auto_or_limits(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    return given if isinstance(given, str) and given == "auto" else each_once(given, read)


if TYPE_CHECKING:
    AutoLimits: TypeAlias = dict[str, int] | Literal["auto"]
else:  # no union, since errors would name its parts
    AutoLimits = Annotated[dict[Placed, Bytes], WrapValidator(_auto_or_limits)]
"""The same, or ``auto``: what :func:`free_limits` finds."""


def free_limits(topology: Topology, devices: Iterable[DeviceName]) -> Mapping[str, int]:
    """By device, and for the host, what is free there less 5 %; of a machine that is not at hand, where nobody can say
    what is free, what it has less 5 %. The host has no limit where the topology does not say what it has.

    Raises:
        PassError: the topology lacks a device, or does not say what it has.
    """
    found: dict[str, int] = {}
    named = [device for device in map(Device.parse, devices) if device != CPU]
    for device in dict.fromkeys([*named, CPU]):
        speed = topology.devices.get(device)
        if speed is None:
            raise PassError(
                f"limits='auto': topology {topology.name!r} has no device {device}",
                fix=f"it has {', '.join(list(topology.devices)[:10])}; place the program on these, or give another "
                "topology",
            )
        nbytes = speed.memory if speed.free is None else speed.free
        if nbytes is not None:
            found[device] = max(int(_USED * nbytes), 1)
        elif not device.is_host:
            raise PassError(
                f"limits='auto': topology {topology.name!r} does not say how much memory {device} has",
                fix=f"give the device of the topology its 'memory', or name limits: {{{str(device)!r}: '20 GiB'}}",
            )
    return found
