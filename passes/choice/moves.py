"""From a choice to the passes that make it: ``shift_modules``, then ``recompute``, then ``park``.

Whole containers are named where everything in them goes one way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.device import CPU, Device, gpu
from graphir.ir.module_patterns import lineage
from graphir.ir.names import base_name
from graphir.ir.operator import Operator
from graphir.ir.program import Program

from ..activations import activation_names
from ..base import Pass, build, parse_pipeline
from ..park import LATER, Park
from ..recompute import Recompute
from ..saved import unsaved, uses_of
from ..shift import ShiftActivations
from ..shift_modules import ShiftModules
from .groups import Grouped
from .naming import patterns, states_named, storages_named
from .problem import AGAIN, Choice

__all__ = ["ParkedQuietly", "back_late", "placed", "repeated"]


_SMALL: Final = 0.002
"""The part of a limit below which it does not matter on which side of a cut a result is made and read."""


class ParkedQuietly(Park):
    """``park`` as a search runs it, which knows from the simulation what each trip saves."""

    warns: ClassVar[bool] = False


def repeated(program: Program, pipeline: str) -> Program:
    """A program with the passes of another placement, as text.

    Raises:
        PassError: a pass refuses the program.
    """
    for one in parse_pipeline(pipeline):
        program = (build(ParkedQuietly, **dict(one)) if type(one) is Park else one).recorded(program)
    return program


def back_late(program: Program, placed: Program) -> Program | None:
    """A placed program with parked activations back as late as they may be, which holds the least and makes a device
    wait; None where none is parked. Of state no more than two trips are under way as it is.

    Args:
        program: before it was placed.
        placed: its history has the passes that placed it.
    """
    made = parse_pipeline(" | ".join(placed.history[len(program.history) :]))
    blobs = program.step.blobs
    state = {n.rpartition(".")[2] for n in program.step.external_inputs if blobs[n].role == "state"}

    def is_early(one: Pass) -> bool:
        return isinstance(one, Park) and one.ahead is None and state.isdisjoint(w.rpartition(".")[2] for w in one.what)

    if not any(map(is_early, made)):
        return None
    found = program
    for one in made:
        late = is_early(one)
        found = (build(ParkedQuietly, **{**dict(one), "ahead": LATER}) if late else one).recorded(found)
    return found


def placed(program: Program, grouped: Grouped, choice: Choice) -> Program:
    """A program with a choice made; its history has the passes that made it.

    Args:
        program: that was grouped.
        grouped: its groups.
        choice: for these.
    """
    names = [Device.parse(name) for name in grouped.problem.devices]
    found = program
    moves = _moves(program, grouped, choice, names)
    if moves:
        found = build(ShiftModules, modules=moves).recorded(found)
    if moves or any(not unit.named for units in grouped.units for unit in units):
        found = _settled(found, grouped, choice, names)
    if again := [s for group, stored in enumerate(choice.stored) if stored == AGAIN for s in grouped.again[group]]:
        found = build(Recompute, what=storages_named(found, again, "recompute")).recorded(found)
    parked: dict[int, list[str]] = defaultdict(list)
    for group, stored in enumerate(choice.stored):
        if stored >= 0 and stored != choice.devices[group]:
            parked[stored] += grouped.parks[group]
    for target, storages in parked.items():
        there, blobs = names[target], found.step.blobs  # what follows others may be there already
        away = [storage for storage in storages if blobs[storage].device != there]
        if again:  # what repeats other groups may have left the backward other values to read
            uses = uses_of(found.step)
            away = [storage for storage in away if unsaved(found, storage, uses, Park.name) is None]
        if away:
            found = build(ParkedQuietly, what=storages_named(found, away, "park"), to=str(there)).recorded(found)
    states: dict[int, list[str]] = defaultdict(list)
    for group, to in choice.parked:
        states[to] += grouped.updated[group]
    for target, storages in states.items():
        there, blobs = names[target], found.step.blobs
        away = [storage for storage in storages if blobs[storage].device not in (there, CPU)]
        if away:
            found = build(ParkedQuietly, what=states_named(found, away), to=str(there)).recorded(found)
    return found


def _settled(program: Program, grouped: Grouped, choice: Choice, names: Sequence[Device]) -> Program:
    """A program after its modules have moved, with what containers compute, and what else no module's path stands for,
    where the choice wants it, and not where the fewest bytes cross: what makes or reads a large result, and what
    goes with it. What one replica wants elsewhere and another one on the same device does not, stays."""
    ops, blobs = program.step.ops, program.step.blobs
    targets = [names[device] for device in choice.devices]
    elsewhere = [(i, targets[group]) for i, group in grouped.of_op.items() if ops[i].device != targets[group]]
    least = _SMALL * min([limit for limit in grouped.problem.limits if limit is not None], default=0)
    large = {
        i
        for i, _ in elsewhere
        if max([blob.nbytes(program.dims) for blob in _handled(ops[i], blobs)], default=0) > least
    }
    known = {base_name(name) for name in activation_names(program)} if large else set()
    wrong: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
    leaving: set[tuple[str, Device]] = set()
    for i, wanted in elsewhere:
        op = ops[i]
        if not op.outputs or base_name(op.outputs[0]) not in known:
            continue
        if i in large or any((blobs[name].storage, wanted) in leaving for name in op.inputs):
            wrong[op.device.index, wanted.index][base_name(op.outputs[0])] += 1
            leaving.update((blobs[name].storage, wanted) for name in op.outputs)
    for source, target in _emptied_first(wrong):
        counts = wrong[source, target]
        full = [(name, r + name) for name in counts for r in program.replicas]
        there = Counter([name for name, own in full if own in blobs and blobs[own].device == gpu(source)])
        activations = [name for name, count in counts.items() if count == there[name]]
        if activations:
            program = build(ShiftActivations, activations=activations, shifts={source: target}).recorded(program)
    return program


def _emptied_first(ways: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sources and targets, what leaves a device before what goes there, which would go on with it; as far as that can
    be."""
    left = list(ways)
    while left:
        sources = {source for source, _ in left}
        found = next((way for way in left if way[1] not in sources), left[0])
        left.remove(found)
        yield found


def _handled(op: Operator, blobs: Mapping[str, Blob]) -> list[Blob]:
    """What an operator makes first, and the storages that it reads without being state."""
    read = [blobs[blobs[name].storage] for name in op.inputs]
    return [blobs[name] for name in op.outputs[:1]] + [blob for blob in read if blob.role not in STATE_ROLES]


def _moves(
    program: Program, grouped: Grouped, choice: Choice, names: Sequence[Device]
) -> dict[str, str | dict[str, str]]:
    """By pattern, where modules go, as :func:`.shift_modules.shift_modules` takes it."""
    targets: dict[str, dict[Device, Device]] = defaultdict(dict)
    for units, device in zip(grouped.units, choice.devices, strict=True):
        for unit in units:
            if unit.named or (unit.stays and unit.module):  # what stays keeps its containers where they are
                targets[unit.module][unit.device] = names[device]
    for (source, module), home in grouped.homes.items():
        if home is not None:
            targets[module][source] = names[choice.devices[home]] if isinstance(home, int) else home
    moved = {module: {s: t for s, t in to.items() if s != t} for module, to in targets.items()}
    alike: dict[tuple[tuple[Device, Device], ...], list[str]] = defaultdict(list)
    for path, to in _outermost(targets, {m: tuple(sorted(to.items())) for m, to in moved.items()}):
        if to:
            alike[to].append(path)
    found: dict[str, str | dict[str, str]] = {}
    for to, paths in alike.items():
        one = len(program.replicas) == 1 and len(to) == 1
        going: str | dict[str, str] = str(to[0][1]) if one else {str(source): str(target) for source, target in to}
        found.update(dict.fromkeys(patterns(paths), going))
    return found


def _outermost(
    modules: Iterable[str], going: Mapping[str, tuple[tuple[Device, Device], ...]]
) -> Iterator[tuple[str, tuple[tuple[Device, Device], ...]]]:
    """The outermost modules in which all that are placed go the same way, and which one; none of a module that is
    placed and others are in that go another way."""
    inside: dict[str, set[tuple[tuple[Device, Device], ...]]] = defaultdict(set)
    for module in modules:
        for path in lineage(module):
            inside[path].add(going[module])
    done: set[str] = set()
    for module in modules:
        above = lineage(module)
        alike = [path for path in above if len(inside[path]) == 1] if above else [module]
        if alike and done.isdisjoint(above):
            done.add(alike[0])
            yield alike[0], going[module]
