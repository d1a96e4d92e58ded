"""What crosses where operators that may run on several devices do not run where others do that hand them something.

An operator that overwrites a buffer makes another value of the same storage. The buffer's home reads the last one::

    home ──▶ mean ──▶ mul_ ──▶ mean;1 ──▶ add_ ──▶ mean;2 ──▶ home

Most free operators are connected with one device alone, and go there. Values are told apart only where several devices
contend for what they are connected with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from graphir.ir.blob import Blob, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.program import Program

from .following import may_leave
from .pieces import Pieces

__all__ = ["Connected", "Free", "Unit", "Value", "Values"]

Free: TypeAlias = int | str
"""What goes to one side as a whole: an operator by its position, with what follows it, or an external input."""

Unit: TypeAlias = Free | Device
"""The same, or all that is on a device already."""


class Connected:
    """Which units and storages are connected, of all that were joined: a union-find."""

    def __init__(self) -> None:
        self.above: dict[Free, Free] = {}

    def top(self, one: Free) -> Free:
        """What stands for everything that is connected with *one*."""
        above = self.above
        while (other := above.setdefault(one, one)) != one:
            above[one] = one = above[other]
        return one

    def tops(self) -> dict[Free, Free]:
        """What stands for each of them."""
        return {one: self.top(one) for one in list(self.above)}

    def join(self, one: Free, others: Iterable[Free]) -> None:
        """Connect *one* with each of the others."""
        top = self.top(one)
        for other in others:
            self.above[self.top(other)] = top


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
    """What a step's operators hand to each other where something free has to do with it.

    Args:
        program: captured, or replicated.
        placed: by position, the devices of forward operators that are not free.
        homes: the devices of the external inputs that are not free.
        free: the positions of the free forward operators.

    Attributes:
        made: by name of a storage, the unit that makes it, or where it lives.
        connected: the free units with the storages that they make or read.
        settled: by free unit that is connected with one device alone, that device.
        loose: the storages of others, for which several devices contend.
        found: by name of such a storage, the value that it holds after the operators so far.
        all: every value of these storages, those that were overwritten too.
    """

    def __init__(
        self, program: Program, placed: Mapping[int, Device], homes: Mapping[str, Device], free: Mapping[int, None]
    ) -> None:
        step, self.dims, self.pieces = program.step, program.dims, Pieces(program.step, program.dims)
        self.blobs: Mapping[str, Blob] = step.blobs
        self.units: Mapping[int, Unit] = {**{i: i for i in free}, **placed}
        self.found: dict[str, Value] = {}
        self.all: list[Value] = []
        self.inputs: dict[str, Unit] = {name: homes.get(name, name) for name in step.external_inputs}
        self.made = dict(self.inputs)
        for i in sorted(self.units):  # a function's operators belong to its result, which comes after them
            for name in step.ops[i].outputs:
                if self.blobs[name].storage == name and name not in self.inputs:
                    self.made[name] = self.units[i]
        self.connected = Connected()
        for name, unit in self.inputs.items():
            if type(unit) is not Device:
                self.connected.join(name, ())
        touching = self.noted(step.ops)
        tops = self.connected.tops()
        names = {name: top for name, blob in self.blobs.items() if (top := tops.get(blob.storage)) is not None}
        around = self.around(touching, names)
        alone = {top: next(iter(devices)) for top, devices in around.items() if len(devices) == 1}
        self.settled = {
            unit: alone[top]
            for unit, top in tops.items()
            if top in alone and (isinstance(unit, int) or self.inputs.get(unit) == unit)
        }
        contended = {name for name, top in names.items() if len(around.get(top, ())) > 1}
        self.loose = {self.blobs[name].storage for name in contended}
        self.connect([each for each in touching if not contended.isdisjoint(each[0].inputs + each[0].outputs)])

    def around(
        self, touching: Iterable[tuple[Operator, Unit]], names: Mapping[str, Free]
    ) -> Mapping[Free, set[Device]]:
        """By what stands for what is connected, the devices that make or read some of it.

        Args:
            touching: operators, and what they go with.
            names: by name of a blob whose storage is connected, what stands for that.
        """
        made, blobs = self.made, self.blobs
        found: dict[Free, set[Device]] = defaultdict(set)
        for name, top in names.items():
            if blobs[name].storage == name and type(maker := made.get(name, blobs[name].device)) is Device:
                found[top].add(maker)
        for op, unit in touching:
            if type(unit) is Device:
                for name in op.inputs:  # what it makes was looked at, and what it overwrites or shows it reads
                    if name in names:
                        found[names[name]].add(unit)
        return found

    def connect(self, touching: Iterable[tuple[Operator, Unit]]) -> None:
        """Make the values of the loose storages, which these operators touch."""
        inputs = self.inputs
        for name, unit in inputs.items():
            if name in self.loose:
                self.hold(name, unit)
        changed = [storage for op, unit in touching for storage in self.add(op, unit)]
        for name in changed:
            if name in inputs:
                self.found[name].readers[inputs[name]] = None

    def noted(self, ops: Sequence[Operator]) -> list[tuple[Operator, Unit]]:
        """The operators with what they go with; what they make goes there, and what they have to do with is connected
        with that if it is free."""
        blobs, made, given, join = self.blobs, self.made, self.units, self.connected.join
        found = []
        for i, op in enumerate(ops):
            if op.phase == "reduce":
                continue
            unit = given.get(i)
            if unit is None:
                unit = self.unit(i, op)
            for name in op.outputs:
                if name not in made and blobs[name].storage == name:
                    made[name] = unit
            if type(unit) is not Device:
                join(unit, [blobs[name].storage for name in op.inputs + op.outputs])
            found.append((op, unit))
        return found

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
                self.hold(name, self.made[name])
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

    def unit(self, i: int, op: Operator) -> Unit:
        """What an operator goes with that is neither free nor placed."""
        if op.effects.shows or op.phase == "update":
            return self.made.get(self.blobs[op.inputs[0]].storage, op.device) if op.inputs else op.device
        if not op.of:
            return op.device
        return i if may_leave(op, self.blobs) else self.made.get(self.blobs[op.of].storage, op.device)

    def value(self, name: str) -> Value:
        """The value that is read by *name*."""
        blob = self.blobs[name]
        storage = self.found.get(blob.storage)
        if storage is None:
            storage = self.found[blob.storage] = Value(self.made.get(blob.storage, blob.device), 0)
            self.all.append(storage)
        if blob.is_view:
            nbytes = dense_nbytes(blob, self.dims)
            if nbytes < storage.nbytes:
                return storage.pieces.setdefault(self.pieces.of(name), Value(storage.producer, nbytes))
        return storage
