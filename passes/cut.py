"""The cheapest side for operators that may run on several devices: a minimum cut.

Operators that a shift moves, and those that have to stay, are on given devices. Between them are others: additions and
activations of containers, casts. Each goes, with what computes its gradients, to the side where fewer bytes cross::

              64 MiB            64 MiB             16 MiB
    conv @gpu:0 ──▶ relu, free ──▶ max_pool, free ──▶ layer @gpu:1       the cut is behind max_pool

A value (:mod:`.crossings`) crosses once to each device that reads it, as a whole or in pieces, whichever has fewer
bytes. So it is a node between its producer and its readers, and a piece, a view that can cross alone, is one between
the value and its own::

                                ┌──∞──▶ readers                   readers ──∞──┐
    producer ──bytes──▶ value ──┤                                              ├──▶ value' ──bytes──▶ producer
                                └──bytes──▶ piece ──∞──▶ readers       …  ─────┘

An edge counts if it leads from the side that stays to the side that moves, so the right half counts readers that stay
where the producer moves. Of equal cuts the one that moves least is taken.

Among three devices and more, each is first cut from all that are left. Then two at a time exchange operators, by a cut
between them, until no exchange lowers the bytes.

Sums of gradients take part, and run where their operands or their activation are in the end (:mod:`.following`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.opset import ACCUMULATES
from graphir.ir.program import Program

from .connections import Connected, Connections, Free, Unit
from .crossings import Value, Values
from .min_cut import Graph

__all__ = ["Sides", "cheapest_sides"]


class Sides(NamedTuple):
    """Where the free operators, by position, and the free external inputs go, as far as they move."""

    ops: dict[int, Device]
    inputs: dict[str, Device]


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
    connections = Connections(program, placed, homes, free)
    ops, blobs = program.step.ops, program.step.blobs
    at = dict(connections.settled)
    for units, between in _components(Values(program, connections).all):
        here = next((ops[u].device if isinstance(u, int) else blobs[u].device for u in units), None)
        at.update(_assigned(units, between, here))
    return Sides(
        {u: device for u, device in at.items() if isinstance(u, int) and (u in free or ops[u].type != ACCUMULATES)},
        {u: device for u, device in at.items() if isinstance(u, str)},
    )


def _components(values: Iterable[Value]) -> Iterator[tuple[list[Free], list[Value]]]:
    """Groups of free units that values connect, each with the values that its units make or read."""
    connected = Connected[Free]()
    between: dict[Free, list[Value]] = {}
    for value in values:
        free = [unit for unit in value.units if not isinstance(unit, Device)]
        if free:
            connected.join(free[0], free)
            between.setdefault(free[0], []).append(value)
    groups: dict[Free, list[Free]] = {}
    for unit, top in connected.tops().items():
        groups.setdefault(top, []).append(unit)
    for group in groups.values():
        units = sorted(group, key=lambda unit: (isinstance(unit, str), unit))
        yield units, [value for unit in units for value in between.get(unit, ())]


def _assigned(units: Sequence[Free], between: Sequence[Value], here: Device | None) -> dict[Free, Device]:
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
    units: Sequence[Free], between: Sequence[Value], at: dict[Free, Device], devices: Sequence[Device]
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


def _crossing(values: Iterable[Value], at: Mapping[Unit, Device]) -> int:
    """The bytes that cross: of each value those of the whole or those of its pieces, to each device that reads it."""
    total = 0
    for value in values:
        whole = {at.get(reader, reader) for reader in value.readers}
        parts: dict[Unit, int] = {}
        for piece in value.pieces.values():
            for device in {at.get(reader, reader) for reader in piece.readers} - whole:
                parts[device] = parts.get(device, 0) + piece.nbytes
        crossing = dict.fromkeys(whole, value.nbytes) | {to: min(n, value.nbytes) for to, n in parts.items()}
        crossing.pop(at.get(value.producer, value.producer), None)
        total += sum(crossing.values())
    return total


def _cut(
    free: Iterable[Free],
    between: Sequence[Value],
    at: Mapping[Free, Device],
    target: Device,
    source: Device | None = None,
) -> set[Free]:
    """The *free* units that go to *target* rather than to *source*. Without it, all other devices are one."""
    graph = Graph("stays", "moves")
    choices = set(free)

    def node(unit: Unit) -> object:
        """What stands for a unit; None for one on a third device."""
        if unit in choices:
            return ("unit", unit)
        device = at.get(unit, unit)
        if device == target:
            return "moves"
        return "stays" if source is None or device == source else None

    def join(value: Value, there: object, back: object, name: tuple[object, ...]) -> None:
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
