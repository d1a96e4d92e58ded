"""How much memory the host has left for this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = ["free_memory"]

_MEMINFO: Final = Path("/proc/meminfo")
_GROUP: Final = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that can be taken without swapping, within the limit of the process's control group; None where the system
    does not say."""
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", _MEMINFO.read_text(encoding="utf-8"), re.M)
    except OSError:
        return None
    if found is None:
        return None
    free = int(found[1]) * 1024
    try:
        most, used = [(_GROUP / f"memory.{name}").read_text(encoding="utf-8").strip() for name in ("max", "current")]
    except OSError:  # no group of its own, or not version 2
        return free
    return min(free, int(most) - int(used)) if most.isdigit() and used.isdigit() else free
