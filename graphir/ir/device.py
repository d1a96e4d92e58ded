"""Logical devices: ``gpu:0``, ``gpu:1``, … and ``cpu:0``.

A logical device is a place in a program. Which real device it becomes is decided by a session's binding.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from ..errors import GraphirError

__all__ = ["CPU", "Device", "gpu"]

_TEXT: Final = re.compile(r"(gpu|cpu):(0|[1-9][0-9]{0,5})")


class Device(str):
    """A logical device. It is its own text, so ``op.device == "gpu:1"`` holds.

    Make one with :meth:`parse` or :func:`gpu`; both intern, so that devices compare by identity first.
    """

    __slots__ = ()

    @staticmethod
    def parse(text: str) -> Device:
        """Read ``gpu:1``, ``cpu:0`` or ``cpu`` (which is ``cpu:0``).

        Raises:
            GraphirError: *text* is not a device.
        """
        return _parse("cpu:0" if text == "cpu" else str(text))

    @property
    def kind(self) -> str:
        """``gpu`` or ``cpu``."""
        return self[:3]

    @property
    def index(self) -> int:  # type: ignore[override]  # a device's number, not str.index
        """The number after the colon."""
        return int(self[4:])


@lru_cache(maxsize=4096)
def _parse(text: str) -> Device:
    if not _TEXT.fullmatch(text):
        raise GraphirError(f"{text!r} is not a device", fix="write gpu:0, gpu:1, … or cpu")
    return Device(text)


def gpu(index: int) -> Device:
    """The logical device ``gpu:<index>``."""
    return _parse(f"gpu:{index}")


CPU: Final = _parse("cpu:0")
