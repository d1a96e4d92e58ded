"""Logical devices: ``gpu:0``, ``gpu:1``, …, ``cpu:0``, and the other kinds that Caffe2 nets name.

A logical device is a place in a program. Which real device it becomes is decided by a session's binding.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, TypeAlias

import torch

from ..errors import GraphirError

__all__ = ["CPU", "KINDS", "Device", "DeviceName", "gpu"]

DeviceName: TypeAlias = "str | int | torch.device"
"""How callers name a device; see :meth:`Device.parse`."""

KINDS: Final = ("cpu", "gpu", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "msnpu", "xla")
"""The kinds of devices, each at the position that is its number in Caffe2's ``DeviceTypeProto`` (``gpu`` is CUDA)."""

_FIX: Final = "write 'gpu:0', 'cuda:0' or 0 for a gpu, or 'cpu' for the host"

_TEXT: Final = re.compile(rf"({'|'.join(KINDS)}):(0|[1-9][0-9]{{0,5}})")


class Device(str):
    """A logical device. It is its own text, so ``op.device == "gpu:1"`` holds.

    Make one with :meth:`parse` or :func:`gpu`; both intern, so that devices compare by identity first.
    """

    __slots__ = ()

    @staticmethod
    def parse(given: DeviceName) -> Device:
        """The device that a caller names: by its text (``gpu:1``, ``hip:2``; ``cpu`` is ``cpu:0``), by the number of a
        gpu, or as torch and Accelerate write it (``cuda:1``, ``torch.device``).

        Raises:
            GraphirError: *given* is not a device. Accelerate's ``disk`` is none: a step keeps all it uses in memory.
        """
        text = given if isinstance(given, str) else f"gpu:{given}" if type(given) is int else _text(given)
        found = _interned(text)
        if found is None:
            if given == "disk":
                raise GraphirError(
                    "'disk' is not a device: a step keeps all that it uses in memory",
                    fix="write 'cpu', the memory of the host, or name a gpu",
                )
            raise GraphirError(f"{given!r} is not a device", fix=_FIX)
        return found

    @property
    def kind(self) -> str:
        """``gpu``, ``cpu``, or another of :data:`KINDS`."""
        return self.partition(":")[0]

    @property
    def index(self) -> int:  # type: ignore[override]  # a device's number, not str.index
        """The number after the colon."""
        return int(self.partition(":")[2])

    @property
    def is_host(self) -> bool:
        """Whether this is the host. A host's number only groups operators that Caffe2 scheduled together."""
        return self.startswith("cpu")

    def order(self) -> tuple[bool, int, str]:
        """The sort key of devices: by number, the host last."""
        return self.is_host, self.index, self.kind


@lru_cache(maxsize=4096)
def _interned(text: str) -> Device | None:
    printed = "cpu:0" if text == "cpu" else f"gpu:{text[5:]}" if text.startswith("cuda:") else text
    if printed != text:
        return _interned(printed)
    return Device(text) if _TEXT.fullmatch(text) else None


def _text(given: object) -> str:
    """A ``torch.device`` as text; empty for any other object."""
    return str(given) if isinstance(given, torch.device) else ""


def gpu(index: int) -> Device:
    """The logical device ``gpu:<index>``."""
    return Device.parse(f"gpu:{index}")


CPU: Final = Device.parse("cpu:0")
