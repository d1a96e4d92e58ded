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

__all__ = ["filled", "follow", "follows"]


def follows(op: Operator) -> bool:
    """Whether an operator of a captured net goes where another one or an operand goes."""
    if op.phase != "forward" or op.of:
        return True
    return op.effects is not PURE and op.effects.shows  # nearly all are, and need not be asked


def follow(program: Program, moved: Mapping[int, Device], homes: Mapping[str, Device], by: str) -> Program:
    """The program with these operators and external blobs moved, and everything that follows them.

    Args:
        program: captured, or replicated.
        moved: by position in the step, the device of each operator that the pass moves. An operator that would follow
            another one may be among them: then it runs on this device instead.
        homes: the new device of each external input of the step that moves.
        by: the pass that moves them.
    """
    homes = {**_with_parameters(program, homes), **homes}
    ops, blobs = _Following(program.step, program.dims, moved, homes, by).run()
    return program.with_(init=filled(program.init, blobs, by), step=program.step.with_(ops=ops, blobs=blobs))


def _with_parameters(program: Program, homes: Mapping[str, Device]) -> dict[str, Device]:
    """Where the state of parameters goes that move, if it is where they are: the optimizer's, and lasting gradients."""
    blobs, found = program.step.blobs, dict[str, Device]()
    for state, param in program.interface.owners():
        for prefix in program.replicas:
            to, its = homes.get(prefix + param), blobs.get(prefix + state)
            if to is not None and its is not None and its.device == blobs[prefix + param].device:
                found[its.name] = to
    return found


class _Following:
    """One sweep in program order.

    Attributes:
        number: by name, that of a blob.
        begin, blob: by operator, its first touch; by touch, the blob, as :class:`~graphir.ir.touches.Touches` has it.
        storage, home: by blob, its storage, and where it was.
        at: by storage, where it is, if that is elsewhere than before.
    """

    def __init__(self, net: Net, dims: Dims, moved: Mapping[int, Device], homes: Mapping[str, Device], by: str) -> None:
        self.net, self.dims, self.moved, self.by = net, dims, moved, by
        touches = net.touches
        self.number = touches.number
        self.begin: list[int] = touches.begin.tolist()
        self.blob: list[int] = touches.blob.tolist()
        self.storage: list[int] = touches.storage.tolist()
        self.home = [blob.device for blob in net.blobs.values()]
        self.at: list[Device | None] = [None] * len(self.home)
        for name, device in homes.items():
            self.at[self.number[name]] = device
        for i, device in moved.items():  # a function's operators follow its result, which comes after them
            self.made_by(i, device)

    def run(self) -> tuple[tuple[Operator, ...], dict[str, Blob]]:
        """The operators and the blobs where they are now."""
        ops = list(self.net.ops)
        for i, op in enumerate(ops):
            device = self.moved.get(i)
            if device is None:
                if not follows(op):
                    continue
                device = self.device_of(i, op)
            if device != op.device:
                ops[i] = op.on(device, self.by)
            if op.kind == "reduce":
                for participant, result in zip(participants(op), self.outputs(i), strict=True):
                    self.move(result, self.place(self.inputs(i)[participant]))
            elif device != op.device and i not in self.moved:
                self.made_by(i, device)
        blobs, at = dict(self.net.blobs), self.at
        for (name, blob), storage in zip(self.net.blobs.items(), self.storage, strict=True):
            found = at[storage]
            if found is not None:
                blobs[name] = blob.on(found)
        return tuple(ops), blobs

    def inputs(self, i: int) -> list[int]:
        """The blobs that an operator reads."""
        begin = self.begin[i]
        return self.blob[begin : begin + len(self.net.ops[i].inputs)]

    def outputs(self, i: int) -> list[int]:
        """The blobs that an operator makes."""
        op = self.net.ops[i]
        begin = self.begin[i] + len(op.inputs)
        return self.blob[begin : begin + len(op.outputs)]

    def made_by(self, i: int, device: Device) -> None:
        """Note where the storages are that an operator makes on its new device."""
        at, before = self.at, self.net.ops[i].device
        for blob in self.outputs(i):
            if self.storage[blob] == blob and at[blob] is None and self.home[blob] == before:
                at[blob] = device

    def move(self, blob: int, device: Device) -> None:
        """Note where a storage is, if it is not where it was."""
        if self.home[blob] != device:
            self.at[self.storage[blob]] = device

    def place(self, blob: int) -> Device:
        """Where a blob is now."""
        return self.at[self.storage[blob]] or self.home[blob]

    def device_of(self, i: int, op: Operator) -> Device:
        """Where an operator goes that nobody has moved."""
        if op.effects.shows:
            return self.place(self.blob[self.begin[i] + op.effects.views[0][1]])
        kind = op.kind
        if kind == "reduce":
            return self.place(self.inputs(i)[0])
        if op.phase == "reduce":
            return self.read_at.get(op.outputs[0], op.device)
        if kind == "copy" and op.outputs[0] in self.read_at:  # parked state comes to where it is updated
            return self.read_at[op.outputs[0]]
        if op.phase == "update":
            return self.updated(i, op)
        of = op.of or self.differentiated(op)
        return self.beside(i, op, self.number[of]) if of else op.device

    def updated(self, i: int, op: Operator) -> Device:
        """Where an operator of the update goes: to what it overwrites, else to the first gradient that it reads."""
        inputs, home = self.inputs(i), op.device
        overwritten = [inputs[source] for _, source in op.effects.writes]
        anchor = next((blob for blob in overwritten or inputs if self.home[blob] == home), None)
        device = home if anchor is None else self.place(anchor)
        if device != home:  # the optimizer's state is where the parameter is
            for blob in overwritten:
                if self.home[blob] == home and self.at[self.storage[blob]] is None:
                    self.at[self.storage[blob]] = device
        return device

    def beside(self, i: int, op: Operator, of: int) -> Device:
        """Where an operator goes that belongs to the blob *of*."""
        if self.home[of] != op.device:
            return op.device
        anchor = self.place(of)
        if op.type == ACCUMULATES and len(op.inputs) > 1:
            summands = set(map(self.place, self.inputs(i)))
            return summands.pop() if len(summands) == 1 else anchor
        if self.storage[of] != of and op.inputs and op.outputs:
            given, made = self.net.blobs[op.inputs[0]], self.net.blobs[op.outputs[0]]
            if given.device == op.device and dense_nbytes(made, self.dims) < dense_nbytes(given, self.dims):
                return self.place(self.inputs(i)[0])
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
        """Where the results of reductions and copies are read: by an update, or by another reduction."""
        found: dict[str, Device] = {}
        for i, op in reversed(list(enumerate(self.net.ops))):
            if op.phase == "update" and op.effects.writes:
                device = self.updated(i, op)
            elif op.phase == "reduce" and op.kind != "reduce" and op.outputs[0] in found:
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
