"""Which receive buffer each copy fills.

An executor may allocate receive buffers once and copy into them step after step. A buffer serves copies to one device,
one after the other, and has as many bytes as the largest of them. A copy takes the smallest free buffer that is large
enough; where none is, the largest free one, which grows; and a new one only where none is free. Of buffers of equal
size it takes the one that has been free for longest: the use that the copy waits for is then long past.

A copy whose ``received`` is ``fresh`` takes none: a buffer would keep the memory that parking gives back.
"""

from __future__ import annotations

from collections import defaultdict

from ..ir.blob import Blob
from ..ir.device import Device
from ..ir.net import Net
from ..ir.size import Dims

__all__ = ["Buffers"]


class Buffers:
    """The receive buffers of a net, in use and free.

    Args:
        net: a placed step.
        dims: the sizes at which buffers are compared. A plan's buffers serve any other sizes, too.

    Attributes:
        numbers: the buffer of each storage that has one; numbers count from 0 on each device.
        freed: the storages that the step frees; only these take buffers.
        nbytes: of each device's buffers, by number.
        fresh: what copies make that take fresh memory.
        idle: by device, the storage that each free buffer held last, in the order in which the buffers became free.
    """

    def __init__(self, net: Net, dims: Dims) -> None:
        self.net, self.dims = net, dims
        self.numbers: dict[str, int] = {}
        self.freed: set[str] = set()
        self.fresh = {op.outputs[0] for op in net.ops if op.received == "fresh"}
        self.nbytes: dict[Device, list[int]] = defaultdict(list)
        self.idle: dict[Device, list[str]] = defaultdict(list)

    def receive(self, storage: str) -> str | None:
        """Give a buffer to a storage that a copy makes; return the storage that the buffer held before, if any."""
        blob = self.net.blobs[storage]
        if storage not in self.freed or storage in self.fresh or not _dense(blob):
            return None
        wanted, held, idle = blob.nbytes(self.dims), self.nbytes[blob.device], self.idle[blob.device]
        if not idle:
            self.numbers[storage] = len(held)
            held.append(wanted)
            return None
        rooms = [held[self.numbers[earlier]] for earlier in idle]
        best = min(range(len(idle)), key=lambda i: (rooms[i] < wanted, abs(rooms[i] - wanted)))
        earlier = idle.pop(best)
        number = self.numbers[storage] = self.numbers[earlier]
        held[number] = max(held[number], wanted)
        return earlier

    def free(self, storage: str) -> None:
        """Note that no operator uses a storage any more: its buffer, if it has one, is free."""
        if storage in self.numbers:
            self.idle[self.net.blobs[storage].device].append(storage)


def _dense(blob: Blob) -> bool:
    """Whether the geometry is known, and no two elements lie at one address as in an expanded tensor."""
    return blob.shape is not None and blob.dtype is not None and 0 not in (blob.strides or ())
