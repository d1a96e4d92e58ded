"""What crosses where operators that may run on several devices do not run where others do that hand them something.

An operator that overwrites a buffer makes another value of the same storage. The buffer's home reads the last one::

    home ──▶ mean ──▶ mul_ ──▶ mean;1 ──▶ add_ ──▶ mean;2 ──▶ home

Most free operators are connected with one device alone, and go there. Values are told apart only where several devices
contend for what they are connected with.
"""

from __future__ import annotations

import numpy as np

from graphir.ir.blob import dense_nbytes
from graphir.ir.operator import Operator
from graphir.ir.program import Program

from .connections import Connections, Unit
from .pieces import Pieces

__all__ = ["Value", "Values"]


class Value:
    """What a storage holds: its producer, what reads it, and by name the views that can cross alone, as values too."""

    __slots__ = ("nbytes", "pieces", "producer", "readers")

    def __init__(self, producer: Unit, nbytes: int) -> None:
        self.producer, self.nbytes = producer, nbytes
        self.readers: dict[Unit, None] = {}
        self.pieces: dict[str, Value] = {}

    @property
    def units(self) -> list[Unit]:
        """The producer and everything that reads it, or pieces of it."""
        read = [unit for piece in self.pieces.values() for unit in piece.readers]
        return list(dict.fromkeys([self.producer, *self.readers, *read]))


class Values:
    """What a step's operators hand to each other of what several devices contend for.

    Args:
        program: captured, or replicated.
        connections: of its step.

    Attributes:
        loose: the storages for which several devices contend.
        found: by name of such a storage, the value that it holds after the operators so far.
        all: every value of these storages, those that were overwritten too.
    """

    def __init__(self, program: Program, connections: Connections) -> None:
        step, self.dims, self.pieces = program.step, program.dims, Pieces(program.step, program.dims)
        self.blobs, self.connections = step.blobs, connections
        touches, loose = step.touches, connections.loose
        self.loose = {touches.names[blob] for blob in np.flatnonzero(loose).tolist()}
        self.found: dict[str, Value] = {}
        self.all: list[Value] = []
        inputs = {name: self.maker(name) for name in step.external_inputs if name in self.loose}
        for name, unit in inputs.items():
            self.hold(name, unit)
        changed: list[str] = []
        of_loose = touches.op[loose[touches.stored]]
        for i in of_loose[np.diff(of_loose, prepend=-1) != 0].tolist():
            if connections.unit[i] >= 0:
                changed += self.add(step.ops[i], connections.named(int(connections.unit[i])))
        for name in changed:
            if name in inputs:
                self.found[name].readers[inputs[name]] = None

    def maker(self, storage: str) -> Unit:
        """What makes a storage, or where it lives."""
        node = int(self.connections.made[self.connections.touches.number[storage]])
        return self.blobs[storage].device if node < 0 else self.connections.named(node)

    def add(self, op: Operator, unit: Unit) -> list[str]:
        """Note what an operator reads and makes of what is loose; the storages that it overwrites in the forward."""
        blobs, loose, found = self.blobs, self.loose, self.found
        for name in op.inputs:
            if name in found:
                found[name].readers[unit] = None
            elif blobs[name].storage in loose:
                self.value(name).readers[unit] = None
        for name in op.outputs:
            if name in loose and name not in found:
                self.hold(name, self.maker(name))
        if op.phase != "forward" or not op.effects.writes:
            return []
        overwritten = [s for output, _ in op.effects.writes if (s := blobs[op.outputs[output]].storage) in loose]
        for storage in overwritten:
            self.hold(storage, unit)
        return overwritten

    def hold(self, storage: str, producer: Unit) -> None:
        """Let a storage hold another value from here on."""
        value = self.found[storage] = Value(producer, dense_nbytes(self.blobs[storage], self.dims))
        self.all.append(value)

    def value(self, name: str) -> Value:
        """The value that is read by *name*."""
        blob = self.blobs[name]
        storage = self.found.get(blob.storage)
        if storage is None:
            storage = self.found[blob.storage] = Value(self.maker(blob.storage), 0)
            self.all.append(storage)
        if blob.is_view:
            nbytes = dense_nbytes(blob, self.dims)
            if nbytes < storage.nbytes:
                return storage.pieces.setdefault(self.pieces.of(name), Value(storage.producer, nbytes))
        return storage
