"""What goes along when the forward operators of a captured program move.

A forward operator is moved by its pass; everything else follows::

    forward fc    @gpu:1     its results and views of them, its parameters            @gpu:1
    backward      of fc      the gradients of its input and of its weight             @gpu:1
    addition      of x       where both summands are; else where x is
    reduction                where the update is that reads its result                @gpu:1
    update        of fc.weight, with the optimizer's state                            @gpu:1

So a weight's gradient never crosses to the weight, and at a contiguous cut each activation crosses once and its
gradient comes back once. Additions of gradients are never reordered.

A view runs where its storage is. What computes the gradient of a view from a gradient with more bytes (the sum behind
an ``expand``) runs where that gradient is, so that the fewer bytes cross.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from graphir.ir.blob import Blob, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Operator, participants
from graphir.ir.opset import ACCUMULATES
from graphir.ir.program import Program
from graphir.ir.size import Dims

__all__ = ["filled", "follow", "follows", "may_leave"]


def follows(op: Operator) -> bool:
    """Whether an operator of a captured net goes where another one or an operand goes."""
    if op.phase != "forward" or op.of:
        return True
    return op.effects is not PURE and op.effects.shows  # nearly all are, and need not be asked


def may_leave(op: Operator, blobs: Mapping[str, Blob]) -> bool:
    """Whether an operator of the backward may run elsewhere than the operator that it belongs to: it adds gradients up,
    or computes the gradient of a view."""
    return op.type == ACCUMULATES or blobs[op.of].is_view


def follow(program: Program, moved: Mapping[int, Device], homes: Mapping[str, Device], by: str) -> Program:
    """The program with these operators and external blobs moved, and everything that follows them.

    Args:
        program: captured, or replicated.
        moved: by position in the step, the device of each operator that the pass moves. An operator that would follow
            another one may be among them: then it runs on this device instead.
        homes: the new device of each external input of the step that moves.
        by: the pass that moves them.
    """
    ops, blobs = _Following(program.step, program.dims, moved, homes, by).run()
    return program.with_(init=filled(program.init, blobs, by), step=program.step.with_(ops=ops, blobs=blobs))


class _Following:
    """One sweep in program order.

    Attributes:
        at: of each storage that is elsewhere than before, the device.
    """

    def __init__(self, net: Net, dims: Dims, moved: Mapping[int, Device], homes: Mapping[str, Device], by: str) -> None:
        self.net, self.dims, self.moved, self.by = net, dims, moved, by
        self.at: dict[str, Device] = dict(homes)
        for i, device in moved.items():  # a function's operators follow its result, which comes after them
            self.made_by(net.ops[i], device)

    def run(self) -> tuple[tuple[Operator, ...], dict[str, Blob]]:
        """The operators and the blobs where they are now."""
        at, blobs, by = self.at, self.net.blobs, self.by
        ops = list(self.net.ops)
        for i, op in enumerate(ops):
            device = self.moved.get(i)
            if device is None:
                if op.phase == "forward" and not follows(op):
                    continue
                device = self.device_of(op)
            before = op.device
            if device != before:
                ops[i] = op.on(device, by)
            if op.type == "AllReduce":
                for participant, result in zip(participants(op), op.outputs, strict=True):
                    self.move(blobs[result], self.place(op.inputs[participant]))
                continue
            if device != before and i not in self.moved:
                self.made_by(op, device)
        changed = dict(blobs)
        if at:
            for name, blob in blobs.items():
                found = at.get(blob.storage)
                if found is not None:
                    changed[name] = blob.on(found)
        return tuple(ops), changed

    def made_by(self, op: Operator, device: Device) -> None:
        """Note where the storages are that an operator makes on its new device."""
        at, blobs = self.at, self.net.blobs
        for name in op.outputs:
            blob = blobs[name]
            if blob.device == op.device and blob.storage == name and name not in at:
                at[name] = device

    def move(self, blob: Blob, device: Device) -> None:
        """Note where a storage is, if it is not where it was."""
        if blob.device != device:
            self.at[blob.storage] = device

    def place(self, name: str) -> Device:
        """Where a blob is now."""
        blob = self.net.blobs[name]
        return self.at.get(blob.storage, blob.device)

    def device_of(self, op: Operator) -> Device:
        """Where an operator goes that nobody has moved."""
        if op.effects.shows:
            return self.place(op.inputs[op.effects.views[0][1]])
        if op.type == "AllReduce":
            return self.place(op.inputs[0])
        if op.phase == "reduce":
            return self.read_at.get(op.outputs[0], op.device)
        if op.phase == "update":
            return self.updated(op)
        return self.beside(op, op.of or self.differentiated(op))

    def updated(self, op: Operator) -> Device:
        """Where an operator of the update goes: to what it overwrites, else to the first gradient that it reads."""
        blobs, home = self.net.blobs, op.device
        anchors = [source for _, source in op.effects.writes] or range(len(op.inputs))
        anchor = next((op.inputs[k] for k in anchors if blobs[op.inputs[k]].device == home), None)
        device = home if anchor is None else self.place(anchor)
        if device != home:  # the optimizer's state is where the parameter is
            for _, source in op.effects.writes:
                blob = blobs[op.inputs[source]]
                if blob.device == home:
                    self.at.setdefault(blob.storage, device)
        return device

    def beside(self, op: Operator, of: str) -> Device:
        """Where an operator goes that belongs to the blob *of*."""
        blobs = self.net.blobs
        if not of or blobs[of].device != op.device:
            return op.device
        anchor = self.place(of)
        if op.type == ACCUMULATES and len(op.inputs) > 1:
            summands = {self.place(name) for name in op.inputs}
            return summands.pop() if len(summands) == 1 else anchor
        if blobs[of].is_view and op.inputs and op.outputs:
            given, made = blobs[op.inputs[0]], blobs[op.outputs[0]]
            if given.device == op.device and dense_nbytes(made, self.dims) < dense_nbytes(given, self.dims):
                return self.place(op.inputs[0])
        return anchor

    def differentiated(self, op: Operator) -> str:
        """What an operator of the backward without ``of`` belongs to: the activation whose gradient it reads first,
        else the last activation that it reads, else its first operand."""
        blobs = self.net.blobs
        for name in op.inputs:
            found = self.activations.get(name) or self.activations.get(blobs[name].storage)
            if found is not None:
                return found
        read = [name for name in op.inputs if name in self.net.gradients]
        return (read[-1:] or op.inputs[:1] or ("",))[0]

    @cached_property
    def activations(self) -> Mapping[str, str]:
        """Of each gradient the activation; where it is that of several, the last one."""
        return {gradient: name for name, gradient in self.net.gradients.items()}

    @cached_property
    def read_at(self) -> Mapping[str, Device]:
        """Where the results of reductions are read: by an update, or by another reduction."""
        found: dict[str, Device] = {}
        for op in reversed(self.net.ops):
            if op.phase == "update" and op.effects.writes:
                device = self.updated(op)
            elif op.phase == "reduce" and op.type != "AllReduce" and op.outputs[0] in found:
                device = found[op.outputs[0]]
            else:
                continue
            for name in op.inputs:
                if self.net.blobs[name].device == op.device:
                    found.setdefault(name, device)
        return found


def filled(init: Net, moved: Mapping[str, Blob], by: str) -> Net:
    """Fill every blob of the step where it now is."""
    blobs = dict(init.blobs)
    for name, blob in init.blobs.items():
        if name in moved and moved[name].device != blob.device:
            blobs[name] = blob.on(moved[name].device)
    ops: Sequence[Operator] = [
        op if op.device == (device := blobs[op.outputs[0]].device) else op.on(device, by) for op in init.ops
    ]
    return init.with_(ops=tuple(ops), blobs=blobs)
