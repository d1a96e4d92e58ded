"""The modules of a program by levels: what a person recomputes, parks or cuts at, whatever the groups of a search are.

::

    layers.*                 every block             layers.*.mlp      the same part of every block
    layer1, layer2, …        what stands at one depth
    layers.0 + layers.1      neighbours as one unit, recomputed from what enters the first
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from typing import Final, NamedTuple, TypeAlias

from graphir.analysis.topology import Topology
from graphir.ir.device import Device
from graphir.ir.module_patterns import lineage
from graphir.ir.names import micro_batches

from .step import Step

__all__ = ["Levels", "Part", "Unit"]

Unit: TypeAlias = tuple[str, ...]
"""The path of a module, or those of neighbours that are one unit."""

_SEGMENTS: Final = (2, 3, 4, 6, 8, 12, 16, 24)
"""How many neighbours are one unit."""

_DEEPEST: Final = 96
"""How many modules stand at a depth at most at which a program is cut."""


class Part(NamedTuple):
    """What a module comes to.

    Attributes:
        state: bytes of parameters, buffers and optimizer state.
        updated: those of them that the update alone touches.
        saved: bytes that its operators make and the backward reads, of one micro-batch.
        first: the first operator of its forward; -1 where it has none.
        firsts: the same by the devices that have one, as each replica has.
    """

    state: int = 0
    updated: int = 0
    saved: int = 0
    first: int = -1
    firsts: tuple[int, ...] = ()


class Levels:
    """The levels of a program's modules.

    Args:
        step: its operators and storages.
        topology: how fast the devices are.
        whole: by module, which module it is in that is not taken apart.
    """

    def __init__(self, step: Step, topology: Topology, whole: Iterable[str] = ()) -> None:
        self.step, self.topology, self.whole = step, topology, frozenset(whole)
        self.paths = step.program.module_paths
        self.found: dict[Unit, list[str]] = {}
        self.again: dict[Unit, list[int]] = {}

    @cached_property
    def making(self) -> dict[str, list[str]]:
        """By module, the storages that can be recomputed and that it makes."""
        step, found = self.step, defaultdict[str, list[str]](list)
        for storage in self.touching:
            for path in lineage(step.net.ops[step.makers[step.number[storage]]].module):
                found[path].append(storage)
        return found

    @cached_property
    def touching(self) -> dict[str, frozenset[str]]:
        """By storage that can be recomputed, the modules that make and that read it in the forward."""
        step, ops, blobs = self.step, self.step.net.ops, self.step.net.blobs
        fine = step.spared & step.forward[step.made] & step.repeatable[step.made]
        names = [step.names[k] for k in fine.nonzero()[0].tolist()]
        found = {name: {ops[step.makers[step.number[name]]].module} for name in names if blobs[name].role != "input"}
        for op in ops:
            if op.phase == "forward" and not op.effects.shows:
                for name in op.inputs:
                    if (storage := blobs[name].storage) in found:
                        found[storage].add(op.module)
        return {name: frozenset(modules) for name, modules in found.items()}

    @cached_property
    def parts(self) -> dict[str, Part]:
        """By path, what each module comes to, with what is inside of it."""
        step, net = self.step, self.step.net
        parts = micro_batches(net.blobs)
        state, updated, saved = (defaultdict[str, int](int) for _ in range(3))
        first: dict[str, dict[Device, int]] = defaultdict(dict)
        sizes = step.nbytes.tolist()
        for k, owner in step.owners.items():
            for path in ("", *lineage(owner)):
                state[path] += sizes[k]
                updated[path] += sizes[k] * bool(step.updated[k])
        for i, (op, nbytes) in enumerate(zip(net.ops, step.saved.tolist(), strict=True)):
            if op.phase == "forward" and not op.effects.shows:
                for path in ("", *lineage(op.module)):
                    first[path].setdefault(op.device, i)
                    saved[path] += nbytes
        firsts = {path: tuple(first[path].values()) for path in ("", *self.paths)}
        return {
            path: Part(state[path], updated[path], saved[path] // parts, min(of, default=-1), of)
            for path, of in firsts.items()
        }

    @cached_property
    def known(self) -> list[str]:
        """The modules that run and are not inside of one that is not taken apart, in the order in which they begin."""
        inside = {path for path in self.paths if not self.whole.isdisjoint(lineage(path)[:-1])}
        found = [path for path in self.paths if path not in inside and self.parts[path].first >= 0]
        return sorted(found, key=lambda path: (self.parts[path].first, path.count(".")))

    def depths(self) -> list[list[str]]:
        """By depth, the modules that stand there, and those above that have none inside: everything once."""
        found: list[list[str]] = []
        inner = {path.rpartition(".")[0] for path in self.known}
        for depth in range(1, max([path.count(".") + 1 for path in self.known], default=0) + 1):
            level = [p for p in self.known if p.count(".") + 1 == depth or (p.count(".") < depth and p not in inner)]
            if len(level) > 1 and level not in found:
                found.append(level)
        return found

    def cuts(self) -> list[list[str]]:
        """The depths at which a program may be cut: few modules first."""
        return [level for level in self.depths() if len(level) <= _DEEPEST]

    def recomputed(self) -> list[list[Unit]]:
        """What may be recomputed, each unit from what enters it, in the order of the forward; each list once."""
        alike: dict[str, list[str]] = defaultdict(list)
        for path in self.known:
            alike[".".join("*" if part.isdecimal() else part for part in path.split("."))].append(path)
        found: dict[tuple[Unit, ...], None] = {}
        levels = [[path for path in level if not self.hands_out((path,))] for level in self.depths()]
        for level in (*levels, *alike.values()):
            single = tuple([(path,) for path in level if self.storages((path,))])
            if single:
                found[single] = None
        for level in alike.values():
            for _, run in groupby(level, key=lambda path: (path.rpartition(".")[0], self.kinds[path])):
                siblings = list(run)
                for size in [size for size in _SEGMENTS if size < len(siblings)] + [len(siblings)]:
                    if size > 1:
                        segments = [tuple(siblings[k : k + size]) for k in range(0, len(siblings), size)]
                        found[tuple(segments)] = None
        return list(map(list, found))

    @cached_property
    def kinds(self) -> dict[str, tuple[str, ...]]:
        """By module, the types of the operators of its forward: equal ones make neighbours a run."""
        found: dict[str, list[str]] = defaultdict(list)
        for op in self.step.net.ops:
            if op.phase == "forward":
                for path in lineage(op.module):
                    found[path].append(op.type)
        return {path: tuple(types) for path, types in found.items()}

    @cached_property
    def states(self) -> dict[str, list[str]]:
        """By path, the state of the module that the update alone touches."""
        found: dict[str, list[str]] = defaultdict(list)
        for k, owner in self.step.owners.items():
            for path in ("", *lineage(owner)) if self.step.updated[k] else ():
                found[path].append(self.step.names[k])
        return found

    def updated(self) -> list[list[Unit]]:
        """By depth, the modules with such state: all of it once. The deepest come last."""
        owners = [owner for k, owner in self.step.owners.items() if self.step.updated[k]]
        found: dict[tuple[Unit, ...], None] = {}
        for depth in range(1, max([owner.count(".") + 1 for owner in owners], default=0) + 1):
            found[tuple(dict.fromkeys([(".".join(owner.split(".")[:depth]),) for owner in owners]))] = None
        return list(map(list, found))

    def freed(self, unit: Unit) -> int:
        """Bytes that recomputing a unit frees."""
        sizes, number = self.step.nbytes, self.step.number
        return sum([int(sizes[number[storage]]) for storage in self.storages(unit)])

    def seconds(self, unit: Unit) -> float:
        """Seconds that recomputing a unit takes."""
        step = self.step
        return sum([step.seconds(step.net.ops[i].device, self.topology)[i] for i in self.repeated(unit)])

    def issued(self, unit: Unit) -> float:
        """Seconds that one host thread takes to issue what recomputing a unit repeats."""
        return sum([self.step.issued[i] for i in self.repeated(unit)])

    def repeated(self, unit: Unit) -> list[int]:
        """The operators that recomputing a unit repeats: those that make what it frees, and what these read and nobody
        keeps."""
        if unit not in self.again:
            step, late = self.step, self.late
            left = [step.makers[step.number[storage]] for storage in self.storages(unit)]
            found: dict[int, None] = {}
            while left:
                made = left.pop()
                if made not in found:
                    found[made] = None
                    left += [step.makers[k] for k in step.read(made) if late[k] < 0 <= step.makers[k]]
            self.again[unit] = sorted(found)
        return self.again[unit]

    @cached_property
    def late(self) -> list[int]:
        """By storage, the first operator behind the forward that reads it, for single look-ups."""
        found: list[int] = self.step.late.tolist()
        return found

    @cached_property
    def saving(self) -> dict[str, list[int]]:
        """By module, the numbers of the storages that it makes and the backward reads."""
        step, found = self.step, defaultdict[str, list[int]](list)
        for k in (step.spared & step.forward[step.made]).nonzero()[0].tolist():
            for path in lineage(step.net.ops[step.makers[k]].module):
                found[path].append(k)
        return found

    def saved(self, unit: Unit) -> list[str]:
        """What the modules of a unit make and the backward reads."""
        return [self.step.names[k] for k in sorted({k for path in unit for k in self.saving[path]})]

    def storages(self, unit: Unit) -> list[str]:
        """What is recomputed of a unit: what its modules make and the forward of no other module reads; of a unit that
        hands out everything, all that it makes."""
        if unit not in self.found:
            made, among = self.made(unit), set(unit)
            self.found[unit] = [
                storage
                for storage in made
                if all(not among.isdisjoint(lineage(module)) for module in self.touching[storage])
            ] or made
        return self.found[unit]

    def made(self, unit: Unit) -> list[str]:
        """What the modules of a unit make and can be recomputed."""
        return list(dict.fromkeys([storage for path in unit for storage in self.making[path]]))

    def hands_out(self, unit: Unit) -> bool:
        """Whether other modules read all that a unit makes, as of a linear layer: it is recomputed by name."""
        among = set(unit)
        return all(
            any(among.isdisjoint(lineage(module)) for module in self.touching[storage]) for storage in self.made(unit)
        )
