"""What the name of a blob says: of whose replica and of which micro-batch it is, and which device it is a copy for.

``gpu_0/conv1`` is the blob ``conv1`` of the replica whose prefix is ``gpu_0/``; ``gpu_0/conv1_gpu_1`` is its copy on
``gpu:1``; ``gpu_0/micro_2/conv1`` is ``conv1`` of the third micro-batch. A captured program has no replica's prefix. No
other module reads or writes prefixes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from .device import Device

__all__ = [
    "RESERVED",
    "Names",
    "base_name",
    "copy_name",
    "fresh",
    "micro_batch_of",
    "micro_batch_prefix",
    "micro_batches",
    "prefix_of",
    "replica_index",
    "replica_prefix",
]

RESERVED: Final = ("loss", "step", "_")
"""Names that the model's blobs don't get: the loss, the counter in a program's state, the undefined result."""

_MICRO: Final = "micro_"


def replica_prefix(device_index: int, kind: str = "gpu") -> str:
    """``gpu_<index>/``."""
    return f"{kind}_{device_index}/"


def replica_index(prefix: str) -> int:
    """0 of ``gpu_0/``."""
    return int(prefix.rpartition("_")[2].removesuffix("/"))


def prefix_of(name: str) -> str:
    """``gpu_0/`` of ``gpu_0/conv1``; empty where there is none."""
    head, slash, _ = name.partition("/")
    kind, underscore, number = head.partition("_")
    if slash and underscore and kind in ("gpu", "cpu") and number.isdecimal():
        return head + "/"
    return ""


def base_name(name: str) -> str:
    """``conv1`` of ``gpu_0/conv1``."""
    return name[len(prefix_of(name)) :]


def micro_batch_prefix(position: int) -> str:
    """``micro_<position>/``."""
    return f"{_MICRO}{position}/"


def micro_batch_of(name: str) -> int | None:
    """2 of ``gpu_0/micro_2/conv1``; None where the name has no micro-batch's prefix."""
    at = name.find(_MICRO)
    end = name.find("/", at)
    if at < 0 or end < 0 or (at and prefix_of(name) != name[:at]):
        return None
    number = name[at + len(_MICRO) : end]
    return int(number) if number.isdecimal() else None


def micro_batches(names: Iterable[str]) -> int:
    """How many micro-batches a step has, by the names of its blobs; 1 where none is named."""
    return max([micro_batch_of(name) or 0 for name in names if _MICRO in name], default=0) + 1


def copy_name(name: str, device: Device) -> str:
    """``conv1_gpu_2`` for the copy of ``conv1`` on ``gpu:2``, ``conv1_cpu`` for one on the host; as Caffe2 has them."""
    return f"{name}_cpu" if device.is_host else f"{name}_gpu_{device.index}"


def fresh(base: str, taken: Container[str]) -> str:
    """*base*, or *base* with the first of ``_1``, ``_2``, … that nobody has taken."""
    name, n = base, 0
    while name in taken:
        n += 1
        name = f"{base}_{n}"
    return name


class Names:
    """Hands out each name once: *base*, or *base* with the first free of ``_1``, ``_2``, …."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._last: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._taken

    def take(self, base: str, avoid: frozenset[str] = frozenset()) -> str:
        """A name that nobody has taken and that is not one of *avoid*."""
        if prefix_of(base):  # the name would read as a replica's
            base = base.replace("/", "_", 1)
        name, n = base, self._last.get(base, 0)
        while name in self._taken or name in avoid:
            n += 1
            name = f"{base}_{n}"
        self._last[base] = n
        self._taken.add(name)
        return name
