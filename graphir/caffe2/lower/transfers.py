"""Copies between devices, collectives, and ``Free``.

Sources: ``copy_op.h`` and ``free_op.h`` of ``caffe2/operators``, ``caffe2/contrib/nccl``. Sums are added in the order
of the participants.
"""

from __future__ import annotations

from ..dialect import CAFFE2
from .builder import LoweredValue, Temporary
from .registry import Lowering, refuse, translates

__all__ = ()


@translates(*sorted(CAFFE2.copies), "CopyOnDeviceLike")
def _copy(c: Lowering) -> None:
    """To where the output's blob lives."""
    if c.op.inputs[0] == c.output(0):
        return
    known = c.known(0)
    if not isinstance(known, LoweredValue):
        c.bind(0, known)
        return
    (copied,) = c.emit("Copy", [known], {}, [0], device=c.home(0))
    c.bind(0, copied._replace(padded=known.padded, remapping=known.remapping))


@translates("NCCLAllreduce")
def _all_reduce(c: Lowering) -> None:
    c.alike(0, *range(1, c.count))
    values, outputs = [c[i] for i in range(c.count)], c.op.outputs
    if len(outputs) != len(values):
        raise refuse(f"{len(values)} participants have {len(outputs)} results")
    devices = [c.builder.device(value) for value in values]
    # Every participant reads all inputs, so that none may be overwritten.
    out = [Temporary(f"{name}_reduced", device) for name, device in zip(outputs, devices, strict=True)]
    pattern = f"[{'t' * len(values)}]"
    reduced = c.emit("AllReduce", [values], {}, out, results=pattern, device=devices[0])
    for i, value in enumerate(reduced):
        c.bind(i, value)


@translates("NCCLBroadcast")
def _broadcast(c: Lowering) -> None:
    root = c.integer("root")
    source = c[root]
    for i, name in enumerate(c.op.outputs):
        if name != c.op.inputs[root]:
            c.emit("Copy", [source], {}, [i], device=c.home(i))


@translates("NCCLReduce")
def _reduce(c: Lowering) -> None:
    root = c.integer("root")
    device = c.builder.device(c.alike(root, *range(c.count)))
    total: LoweredValue | None = None
    for i in range(c.count):
        value = c[i] if c.builder.device(c[i]) == device else c.emit("Copy", [c[i]], device=device)[0]
        last = 0 if i == c.count - 1 else None
        if total is None:
            total = value if c.count > 1 else c.one("aten.clone.default", [value], {}, 0, device=device)
        else:
            total = c.one("aten.add.Tensor", [total, value], {}, last, device=device)


@translates("Free")
def _free(c: Lowering) -> None:
    """A plan frees what nobody needs any more."""
