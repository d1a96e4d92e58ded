"""How much memory the real devices have, and how much of it the host has left for this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch

__all__ = ["capacity", "free_memory"]

_MEMINFO: Final = Path("/proc/meminfo")
_GROUP: Final = Path("/sys/fs/cgroup")


def capacity(place: torch.device) -> int | None:
    """Bytes of a real device: of the host those of its memory, within the limit of the process's control group, without
    swap. None where nobody says."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory)
    total = _host("MemTotal") if place.type == "cpu" else None
    most = _group("max")
    return min(total, most) if total is not None and most is not None else total


def free_memory() -> int | None:
    """Bytes of the host that can be taken without swapping, within the limit of the process's control group; None where
    the system does not say."""
    free, most, used = _host("MemAvailable"), _group("max"), _group("current")
    return min(free, most - used) if free is not None and most is not None and used is not None else free


def _host(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _group(name: str) -> int | None:
    """A number of the process's control group; None without a limit, a group of its own, or version 2."""
    try:
        text = (_GROUP / f"memory.{name}").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
