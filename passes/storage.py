"""Let operators overwrite what nobody reads any more.

Capture records ``relu_`` as ``relu``, so that placement meets mutation only on state. This pass, the last one before
emit, puts elementwise operators in place where that changes no value::

    bn1  = aten.native_batch_norm(…)            bn1  = aten.native_batch_norm(…)
    relu = aten.relu(bn1)              ───▶     relu in bn1 = aten.relu_(bn1)

The operand must own its whole storage, be made in the step by an operator that is no copy, and have the device and the
geometry of the result; and this must be the last read of that storage, views of it included. Readers on other lanes
come earlier in program order, and emit makes the writer wait for them.

A Caffe2 net frees nothing by itself: there, blobs take the names of dead ones (:mod:`.reuse`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from graphir.ir.blob import Blob
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator
from graphir.ir.optypes.table import operator_type
from graphir.ir.program import Program

from .base import Pass, build, register
from .reuse import reuse_names

__all__ = ["ShareStorage", "overwritable", "share_storage"]


@register
class ShareStorage(Pass):
    """See :func:`share_storage`."""

    name: ClassVar[str] = "share_storage"

    keep: tuple[str, ...] = ()

    def rewrite(self, program: Program) -> Program:
        for name in self.keep:
            program.step.blob(name)
        if not program.step.dialect.workspace:
            return program.with_(step=_share(program.step, self.keep))
        init = program.init
        fixed = {*init.external_inputs, *(name for op in init.ops for name in op.outputs)}
        return program.with_(step=reuse_names(program.step, fixed, self.keep, program.dims, self.name))


def share_storage(program: Program, keep: Sequence[str] = ()) -> Program:
    """The program in which operators reuse dead storages. Changes no value.

    In a captured program, elementwise operators are put in place where their operand is dead afterwards.

    In a Caffe2 program, blobs of the step are renamed: those whose lifetimes do not overlap share a name, by their
    sizes (``load_program(…, shapes=…)``), and an output takes the name of an operand that dies where Caffe2 allows it
    in place. External inputs and outputs, parameters, whatever ``init`` makes, blobs of one element (losses), and what
    nobody reads, are there under their own names after a step; any other blob that is fetched from the workspace has
    to be in *keep*. A shared blob has the shape and the element type of the largest that it holds. Activations that
    share have no gradient any more in ``net.gradients``, so shift before sharing.

    Args:
        program: any program.
        keep: blobs that are read after the step, beside the external outputs.

    Raises:
        GraphirError: a blob of *keep* is not in the step.
    """
    return build(ShareStorage, keep=keep)(program)


def _share(net: Net, keep: Sequence[str]) -> Net:
    owner = {name: blob.storage for name, blob in net.blobs.items()}
    last_read: dict[str, int] = {}
    for i, op in enumerate(net.ops):
        for name in op.inputs:
            last_read[owner[name]] = i
    kept = {owner[name] for name in (*net.external_inputs, *net.external_outputs, *keep)}
    # A copy keeps the address of its source modulo 64, a fresh result begins at a multiple of it, and kernels may round
    # by addresses: a result that took the place of a copy's could give other bits.
    kept.update(owner[name] for op in net.ops if op.kind == "copy" for name in op.outputs)

    merged: dict[str, str] = {}

    def root(storage: str) -> str:
        while storage in merged:
            storage = merged[storage]
        return storage

    ops = list(net.ops)
    for i, op in enumerate(ops):
        operand = overwritable(op, net.blobs)
        if operand is None:
            continue
        storage, result = root(operand.storage), op.outputs[0]
        if (
            storage not in kept
            and last_read[storage] == i
            and all(root(owner[name]) != storage for name in op.inputs[1:])
        ):
            merged[result] = storage
            last_read[storage] = last_read.get(result, i)
            if result in kept:
                kept.add(storage)
            ops[i] = op._replace(type=operator_type(op.type).in_place, effects=_OVERWRITES, by=ShareStorage.name)
    if not merged:
        return net
    blobs = {name: _in_storage(blob, root(blob.storage), net) for name, blob in net.blobs.items()}
    return net.with_(ops=tuple(ops), blobs=blobs)


def overwritable(op: Operator, blobs: Mapping[str, Blob]) -> Blob | None:
    """The operand over which an operator can write its result once nobody else reads it, by type and geometry."""
    if not operator_type(op.type).in_place or op.input_versions or op.output_versions:
        return None
    operand, result = blobs[op.inputs[0]], blobs[op.outputs[0]]
    whole = _same_place(operand, blobs[operand.storage])
    return operand if whole and result.storage == result.name and _same_place(operand, result) else None


_OVERWRITES: Final = Effects(writes=((0, 0),))


def _same_place(a: Blob, b: Blob) -> bool:
    """Whether two blobs have the same geometry, element type and device."""
    return a[1:4] == b[1:4] and a.strides == b.strides and a.offset == b.offset == 0


def _in_storage(blob: Blob, storage: str, net: Net) -> Blob:
    return blob if blob.storage == storage else blob._replace(storage=storage, role=net.blobs[storage].role)
