"""How far back a step has touched what an operator reads, by which caches still hold it or don't."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.blob import dense_nbytes
from ..ir.device import Device
from ..ir.net import Net
from ..ir.size import Dims
from .scratch import is_called

__all__ = ["reuse_distances"]


def reuse_distances(net: Net, dims: Dims, held: Mapping[str, int]) -> list[tuple[int | None, ...]]:
    """Of each operator and each of its inputs, the bytes that its device has read and written since it last touched
    that input's storage, the storage's own included; None where it never does. Of views, which touch nothing, none.

    A cache that holds more than these bytes holds the input still: the stack distance of Mattson et al., *Evaluation
    techniques for storage hierarchies*, IBM Systems Journal 1970, except that bytes which are touched twice count
    twice, up to all that the device holds. Steps follow each other: the first operators find what the last ones have
    touched.

    Args:
        net: its operators are executed in this order.
        dims: the value of each dimension.
        held: by device, the most bytes that it holds at once: memory that is freed is used again.
    """
    blobs = net.blobs
    touched: dict[Device, int] = {}
    last: dict[tuple[Device, str], int] = {}
    found: list[tuple[int | None, ...]] = []
    for _ in range(2):
        found = []
        for op in net.ops:
            if op.outputs and not is_called(op):
                found.append(())
                continue
            here, now = op.device, touched.get(op.device, 0)
            before = [last.get((here, blobs[name].storage)) for name in op.inputs]
            most = held.get(here, now)
            found.append(tuple([None if at is None else min(now - at, most) for at in before]))
            sizes = {blobs[name].storage: dense_nbytes(blobs[name], dims) for name in (*op.inputs, *op.outputs)}
            touched[here] = now + sum(sizes.values())
            last.update([((here, storage), now) for storage in sizes])
    return found
