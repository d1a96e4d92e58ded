"""How much memory the real devices have, and how much of it the host has left for this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import torch

__all__ = ["capacity", "free_memory", "free_on"]

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
    the system does not say. The group's pages of files are free: they make room for whatever needs it."""
    free, most, used = _host("MemAvailable"), _group("max"), _group("current")
    if free is None or most is None or used is None:
        return free
    return min(free, max(most - used + _pages_of_files(), 0))


def free_on(card: torch.device) -> int:
    """Bytes of a card that nobody holds. CUDA makes a context of this process there, which takes memory too."""
    free, _ = torch.cuda.mem_get_info(card)
    # What this process has freed, and its allocator has kept, is free for its next step.
    return int(free) + torch.cuda.memory_reserved(card) - torch.cuda.memory_allocated(card)


def _host(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _pages_of_files() -> int:
    """Bytes that the control group is charged for files that were read or written."""
    try:
        text = (_GROUP / "memory.stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return sum(map(int, re.findall(r"^(?:in)?active_file (\d+)$", text, re.M)))


def _group(name: str) -> int | None:
    """A number of the process's control group; None without a limit, a group of its own, or version 2."""
    try:
        text = (_GROUP / f"memory.{name}").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
