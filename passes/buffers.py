"""Which receive buffer each copy fills.

An executor may allocate receive buffers once and copy into them step after step. A buffer serves copies of equal
geometry and element type on one device, one after the other: the one that has been free for longest is taken, so that
what is waited for is long past, and a new one where none is free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TypeAlias

from graphir.ir.blob import Blob
from graphir.ir.net import Net

__all__ = ["Buffers"]

_Kind: TypeAlias = tuple[object, ...]


class Buffers:
    """The receive buffers of a net, in use and free.

    Attributes:
        numbers: the buffer of each storage that has one; numbers count from 0 on each device.
        freed: the storages that the step frees; only these take buffers.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.numbers: dict[str, int] = {}
        self.freed: set[str] = set()
        self.idle: dict[_Kind, deque[str]] = defaultdict(deque)
        self.count: dict[str, int] = defaultdict(int)

    def receive(self, storage: str) -> str | None:
        """Give a storage that a copy makes its buffer; the storage that the buffer held last, if any."""
        blob = self.net.blobs[storage]
        if storage not in self.freed or not _dense(blob):
            return None
        if idle := self.idle[_kind(blob)]:
            earlier = idle.popleft()
            self.numbers[storage] = self.numbers[earlier]
            return earlier
        self.numbers[storage] = self.count[blob.device]
        self.count[blob.device] += 1
        return None

    def free(self, storage: str) -> None:
        """Nobody uses a storage any more: its buffer, if it has one, is free."""
        if storage in self.numbers:
            self.idle[_kind(self.net.blobs[storage])].append(storage)


def _kind(blob: Blob) -> _Kind:
    return blob.device, blob.shape, blob.dtype, blob.strides


def _dense(blob: Blob) -> bool:
    """Whether the geometry is known, and no two elements lie at one address as in an expanded tensor."""
    return blob.shape is not None and blob.dtype is not None and 0 not in (blob.strides or ())
