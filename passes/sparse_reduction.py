"""The reduction of sparse gradients over replicas.

::

    gpu_0/w_grad.values ─▶ Copy to gpu:1 ─┐
                                          ├─▶ sparse_sum ─▶ gpu_1/w_grad.values_reduced ─▶ update gpu_1/w
    gpu_1/w_grad.values ──────────────────┘

Torch adds sparse tensors by merging their rows from the beginning, so that some rows are added before they reach the
parameter. Their concatenation, which is what a collective could gather, gives other bits. So each replica brings the
others' gradients to its device, strides kept, and adds them there, in replica order.

A shift may bring several replicas to one device. So ``inject_copies`` lets each sum read the gradients where they are
made (:func:`ungathered`), and then copies what is on other devices, once to each.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import Final

from graphir.ir.blob import Blob
from graphir.ir.names import copy_name, fresh
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator
from graphir.ir.opset import signature
from graphir.ir.optypes.own import OWN
from graphir.ir.size import Size, add

__all__ = ["reduce_sparse", "sparse_gradients", "ungathered"]

_SUM: Final = "graphir.sparse_sum"
_TYPE: Final = attrgetter("type")


def sparse_gradients(step: Net) -> dict[tuple[str, str], str]:
    """The indices and values of each sparse gradient that an update reads, and the parameter."""
    found = {}
    for op in step.ops:
        if op.phase == "update" and op.type in OWN and signature(op.type).tensors[1].name == "indices":
            found[op.inputs[1], op.inputs[2]] = op.inputs[0]
    return found


def reduce_sparse(
    pairs: Sequence[tuple[str, str]],
    params: Sequence[str],
    args: Mapping[str, Arg],
    blobs: MutableMapping[str, Blob],
    reduced: MutableMapping[str, str],
    by: str,
) -> list[Operator]:
    """The operators that reduce one gradient on every replica.

    Args:
        pairs: each replica's indices and values.
        params: each replica's parameter.
        args: ``reduction`` and ``shares``, as ``AllReduce`` takes them.
        blobs: new ones are added.
        reduced: for each of *pairs*' blobs, what the update reads in its place; entries are added.
        by: the pass that reduces.
    """
    ops: list[Operator] = []
    lookups = reduce(add, [_shape(blobs, values)[0] for _, values in pairs])
    for pair, param in zip(pairs, params, strict=True):
        device = blobs[param].device
        rows, width = _shape(blobs, param)
        local: list[list[str]] = [[], []]
        for other in pairs:
            for names, name in zip(local, other, strict=True):
                names.append(name if other == pair else fresh(copy_name(name, device), blobs))
                if other != pair:
                    blobs[names[-1]] = blobs[name]._replace(
                        name=names[-1], device=device, storage=names[-1], offset=0, role="gradient"
                    )
                    ops.append(Operator("Copy", (name,), (names[-1],), {}, device, "reduce", by=by))
        outputs = []
        for name, shape in zip(pair, ((1, lookups), (lookups, width)), strict=True):
            outputs.append(fresh(f"{name}_reduced", blobs))
            blobs[outputs[-1]] = Blob(outputs[-1], shape, blobs[name].dtype, device, "gradient", outputs[-1])
        reduced.update(zip(pair, outputs, strict=True))
        indices, values = local
        ops.append(
            Operator(
                _SUM,
                (*values, *indices),
                tuple(outputs),
                {"rows": rows, **args},
                device,
                "reduce",
                by=by,
                operands=f"[{'t' * len(pairs)}]" * 2,
            )
        )
    return ops


def ungathered(net: Net) -> Net:
    """The net whose sums of sparse gradients read every replica's gradient where it is made: without the copies that
    :func:`reduce_sparse` put before them, as far as nothing else reads those."""
    if _SUM not in map(_TYPE, net.ops):  # without a line of Python for each operator: most nets have none
        return net
    sums = [op for op in net.ops if op.type == _SUM and op.phase == "reduce"]
    read = {name for op in sums for name in op.inputs}
    kept = {name for op in net.ops if op.type != _SUM for name in op.inputs} | {*net.external_outputs}
    sources = {
        op.outputs[0]: op.inputs[0]
        for op in net.ops
        if op.kind == "copy"
        and op.phase == "reduce"
        and op.input_versions is None
        and op.outputs[0] in read
        and op.outputs[0] not in kept
    }
    if not sources:
        return net
    ops = [
        op if op.type != _SUM else op._replace(inputs=tuple([sources.get(name, name) for name in op.inputs]))
        for op in net.ops
        if sources.keys().isdisjoint(op.outputs)
    ]
    blobs = {name: blob for name, blob in net.blobs.items() if name not in sources}
    return net.with_(ops=tuple(ops), blobs=blobs)


def _shape(blobs: Mapping[str, Blob], name: str) -> tuple[Size, Size]:
    shape = blobs[name].shape
    assert shape is not None and len(shape) == 2, name
    return shape[0], shape[1]
