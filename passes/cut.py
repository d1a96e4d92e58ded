"""The cheapest side for operators that may run on several devices: a minimum cut.

Operators that a shift moves, and those that have to stay, are on given devices. Between them are others: additions and
activations of containers, casts. Each goes, with what computes its gradients, to the side where fewer bytes cross::

              64 MiB            64 MiB             16 MiB
    conv @gpu:0 ──▶ relu, free ──▶ max_pool, free ──▶ layer @gpu:1       the cut is behind max_pool

A value crosses once to each device that reads it, as a whole or in pieces, whichever has fewer bytes. So it is a node
between its producer and its readers, and a piece, a view that can cross alone, is one between the value and its own::

                                ┌──∞──▶ readers                   readers ──∞──┐
    producer ──bytes──▶ value ──┤                                              ├──▶ value' ──bytes──▶ producer
                                └──bytes──▶ piece ──∞──▶ readers       …  ─────┘

An edge counts if it leads from the side that stays to the side that moves, so the right half counts readers that stay
where the producer moves. Of equal cuts the one that moves least is taken.

An operator that overwrites a buffer makes another value of the same storage. The buffer's home reads the last one::

    home ──▶ mean ──▶ mul_ ──▶ mean;1 ──▶ add_ ──▶ mean;2 ──▶ home

Among three devices and more, each is first cut from all that are left. Then two at a time exchange operators, by a cut
between them, until no exchange lowers the bytes.

Sums of gradients take part, and run where their operands or their activation are in the end (:mod:`.following`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from graphir.ir.blob import Blob, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.opset import ACCUMULATES
from graphir.ir.program import Program

from .following import may_leave
from .min_cut import Graph
from .pieces import Pieces

__all__ = ["Sides", "cheapest_sides"]

_Free: TypeAlias = int | str
"""What goes to one side as a whole: an operator by its position, with what follows it, or an external input."""

_Unit: TypeAlias = _Free | Device
"""The same, or all that is on a device already."""


class Sides(NamedTuple):
    """Where the free operators, by position, and the free external inputs go, as far as they move."""

    ops: dict[int, Device]
    inputs: dict[str, Device]


class _Value:
    """What a storage holds: its producer, what reads it, and by name the views that can cross alone, as values too."""

    __slots__ = ("nbytes", "pieces", "producer", "readers")

    def __init__(self, producer: _Unit, nbytes: int) -> None:
        self.producer, self.nbytes = producer, nbytes
        self.readers: dict[_Unit, None] = {}
        self.pieces: dict[str, _Value] = {}

    @property
    def units(self) -> list[_Unit]:
        """The producer and everything that reads it, or pieces of it."""
        read = [unit for piece in self.pieces.values() for unit in piece.readers]
        return list(dict.fromkeys([self.producer, *self.readers, *read]))


def cheapest_sides(
    program: Program, placed: Mapping[int, Device], homes: Mapping[str, Device], free: Mapping[int, None]
) -> Sides:
    """The cheapest device of each operator that may run on several.

    Args:
        program: captured, or replicated.
        placed: by position, the devices of forward operators that are not free.
        homes: the devices of the external inputs that are not free. Where free operators overwrite one that is free, it
            goes where the fewest bytes cross to them and back.
        free: the positions of the free forward operators.

    Returns:
        The devices of the free operators and inputs, and of what computes the gradients of views.
    """
    values = _Values(program, placed, homes, free).all
    ops, blobs = program.step.ops, program.step.blobs
    sides = Sides({}, {})
    for units, between in _components(values):
        here = next((ops[u].device if isinstance(u, int) else blobs[u].device for u in units), None)
        for unit, device in _assigned(units, between, here).items():
            if isinstance(unit, int):
                if unit in free or ops[unit].type != ACCUMULATES:
                    sides.ops[unit] = device
            else:
                sides.inputs[unit] = device
    return sides


class _Values:
    """What the step's operators hand to each other, where something free has to do with it.

    Attributes:
        made: by name of a storage, the unit that makes it, or where it lives.
        loose: the storages that free units make or read.
        found: by name of such a storage, the value that it holds after the operators so far.
        all: every value of these, those that were overwritten too.
    """

    def __init__(
        self, program: Program, placed: Mapping[int, Device], homes: Mapping[str, Device], free: Mapping[int, None]
    ) -> None:
        step, self.dims, self.pieces = program.step, program.dims, Pieces(program.step, program.dims)
        self.blobs: Mapping[str, Blob] = step.blobs
        self.units: Mapping[int, _Unit] = {**{i: i for i in free}, **placed}
        self.found: dict[str, _Value] = {}
        self.all: list[_Value] = []
        inputs: dict[str, _Unit] = {name: homes.get(name, name) for name in step.external_inputs}
        self.made = dict(inputs)
        for i, op in enumerate(step.ops):  # a function's operators belong to its result, which comes after them
            if i in self.units:
                own = [name for name in op.outputs if name not in inputs and not self.blobs[name].is_view]
                self.made.update(dict.fromkeys(own, self.units[i]))
        self.loose = {name for name, unit in inputs.items() if not isinstance(unit, Device)}
        touching = self.noted(step.ops)
        for name, unit in inputs.items():
            if name in self.loose:
                self.hold(name, unit)
        names = {name for name, blob in self.blobs.items() if blob.storage in self.loose}
        changed = [
            storage
            for op, unit in touching
            if not (names.isdisjoint(op.inputs) and names.isdisjoint(op.outputs))
            for storage in self.add(op, unit)
        ]
        for name in changed:
            if name in inputs:
                self.found[name].readers[inputs[name]] = None

    def noted(self, ops: Sequence[Operator]) -> list[tuple[Operator, _Unit]]:
        """The operators with what they go with; what they make goes there, and what they have to do with is loose if
        that is free."""
        blobs, made, loose, given = self.blobs, self.made, self.loose, self.units
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
                loose.update([blobs[name].storage for name in op.inputs + op.outputs])
            found.append((op, unit))
        return found

    def add(self, op: Operator, unit: _Unit) -> list[str]:
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

    def hold(self, storage: str, producer: _Unit) -> None:
        """Let a storage hold another value from here on."""
        value = self.found[storage] = _Value(producer, dense_nbytes(self.blobs[storage], self.dims))
        self.all.append(value)

    def unit(self, i: int, op: Operator) -> _Unit:
        """What an operator goes with that is neither free nor placed."""
        if op.effects.shows or op.phase == "update":
            return self.made.get(self.blobs[op.inputs[0]].storage, op.device) if op.inputs else op.device
        if not op.of:
            return op.device
        return i if may_leave(op, self.blobs) else self.made.get(self.blobs[op.of].storage, op.device)

    def value(self, name: str) -> _Value:
        """The value that is read by *name*."""
        blob = self.blobs[name]
        storage = self.found.get(blob.storage)
        if storage is None:
            storage = self.found[blob.storage] = _Value(self.made.get(blob.storage, blob.device), 0)
            self.all.append(storage)
        if blob.is_view:
            nbytes = dense_nbytes(blob, self.dims)
            if nbytes < storage.nbytes:
                return storage.pieces.setdefault(self.pieces.of(name), _Value(storage.producer, nbytes))
        return storage


def _components(values: Iterable[_Value]) -> Iterator[tuple[list[_Free], list[_Value]]]:
    """Groups of free units that values connect, each with the values that its units make or read."""
    above: dict[_Free, _Free] = {}
    between: dict[_Free, list[_Value]] = {}

    def top(unit: _Free) -> _Free:
        """What stands for the group that a unit is in so far."""
        while (other := above.setdefault(unit, unit)) != unit:
            above[unit] = unit = above[other]
        return unit

    for value in values:
        free = [unit for unit in value.units if not isinstance(unit, Device)]
        for unit in free:
            above[top(unit)] = top(free[0])
        if free:
            between.setdefault(free[0], []).append(value)
    groups: dict[_Free, list[_Free]] = {}
    for unit in above:
        groups.setdefault(top(unit), []).append(unit)
    for group in groups.values():
        units = sorted(group, key=lambda unit: (isinstance(unit, str), unit))
        yield units, [value for unit in units for value in between.get(unit, ())]


def _assigned(units: Sequence[_Free], between: Sequence[_Value], here: Device | None) -> dict[_Free, Device]:
    """The device of each unit of a component, of which the first is *here*; nothing where no device is around it."""
    around = {unit for value in between for unit in value.units if isinstance(unit, Device)}
    if not around:
        return {}
    first, *others = sorted(around, key=lambda device: (device != here, device.order()))
    at = dict.fromkeys(units, first)
    for target in others:
        moved = _cut([unit for unit in units if at[unit] == first], between, at, target)
        at.update(dict.fromkeys(moved, target))
    if len(others) > 1:
        _exchange(units, between, at, (first, *others))
    return at


def _exchange(
    units: Sequence[_Free], between: Sequence[_Value], at: dict[_Free, Device], devices: Sequence[Device]
) -> None:
    """Let two devices at a time exchange units until no exchange lowers the bytes that cross.

    These are the swap moves of Boykov, Veksler and Zabih (2001). The cut between two devices is exact, so in the end no
    unit is better placed alone on another device, nor any set of units of one device together.
    """
    pairs = list(combinations(devices, 2))
    left = dict.fromkeys(pairs)
    while left:
        pair = next(iter(left))
        del left[pair]
        stays, moves = pair
        inside = [unit for unit in units if at[unit] in pair]
        moved = _cut(inside, between, at, moves, stays)
        new = {**at, **{unit: moves if unit in moved else stays for unit in inside}}
        if _crossing(between, new) < _crossing(between, at):
            at.update(new)
            left.update(dict.fromkeys([other for other in pairs if other != pair and not set(pair).isdisjoint(other)]))


def _crossing(values: Iterable[_Value], at: Mapping[_Unit, Device]) -> int:
    """The bytes that cross: of each value those of the whole or those of its pieces, to each device that reads it."""
    total = 0
    for value in values:
        whole = {at.get(reader, reader) for reader in value.readers}
        parts: dict[_Unit, int] = {}
        for piece in value.pieces.values():
            for device in {at.get(reader, reader) for reader in piece.readers} - whole:
                parts[device] = parts.get(device, 0) + piece.nbytes
        crossing = dict.fromkeys(whole, value.nbytes) | {to: min(n, value.nbytes) for to, n in parts.items()}
        crossing.pop(at.get(value.producer, value.producer), None)
        total += sum(crossing.values())
    return total


def _cut(
    free: Iterable[_Free],
    between: Sequence[_Value],
    at: Mapping[_Free, Device],
    target: Device,
    source: Device | None = None,
) -> set[_Free]:
    """The *free* units that go to *target* rather than to *source*. Without it, all other devices are one."""
    graph = Graph("stays", "moves")
    choices = set(free)

    def node(unit: _Unit) -> object:
        """What stands for a unit; None for one on a third device."""
        if unit in choices:
            return ("unit", unit)
        device = at.get(unit, unit)
        if device == target:
            return "moves"
        return "stays" if source is None or device == source else None

    def join(value: _Value, there: object, back: object, name: tuple[object, ...]) -> None:
        """Put a value between where it comes from and its readers."""
        readers = {node(reader) for reader in value.readers} - {node(value.producer), None}
        if value.nbytes and (readers or value.pieces):
            graph.add(there, ("there", *name), value.nbytes)
            graph.add(("back", *name), back, value.nbytes)
            for reader in readers:
                graph.add(("there", *name), reader)
                graph.add(reader, ("back", *name))

    for i, value in enumerate(between):
        producer = node(value.producer)
        # What comes from a third device crosses to each of the two that reads it.
        join(value, "stays" if producer is None else producer, "moves" if producer is None else producer, (i,))
        if value.nbytes:
            for piece, part in value.pieces.items():
                join(part, ("there", i), ("back", i), (i, piece))
    return {name[1] for name in graph.cut() if isinstance(name, tuple) and name[0] == "unit"}
