"""How much a core's caches hold."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Caches", "caches"]

_FOLDER: Final = Path("/sys/devices/system/cpu/cpu0/cache")


class Caches(NamedTuple):
    """Bytes that a core's caches hold.

    Attributes:
        own: of the largest cache that is its own; 1 MiB where the system does not say.
        shared: of the last one, its share; 8 MiB where the system does not say.
    """

    own: int = 1 << 20
    shared: int = 1 << 23


@cache
def caches() -> Caches:
    """Those of this machine's first core, as Linux lists them."""
    found = Caches()
    for index in sorted(_FOLDER.glob("index*")):
        try:
            kind, size, sharing = [(index / name).read_text().strip() for name in ("type", "size", "shared_cpu_list")]
        except OSError:
            continue
        digits = re.fullmatch(r"(\d+)K", size)
        if kind == "Instruction" or digits is None:
            continue
        nbytes, sharers = int(digits[1]) << 10, _count(sharing)
        found = found._replace(own=nbytes) if sharers == 1 else found._replace(shared=nbytes // sharers)
    return found._replace(shared=max(found))


def _count(listed: str) -> int:
    """How many numbers a list such as ``0-3,8`` has."""
    ends = [tuple(map(int, part.split("-"))) for part in listed.split(",") if part]
    return max(sum(1 + part[-1] - part[0] for part in ends), 1)
