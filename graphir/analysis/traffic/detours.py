"""What crosses between devices for nothing, and what to move so that it need not.

Three things are looked for::

    gpu:0   x ─────────────┐         ┌───── add          a *bounce*: what an elementwise operator made of x goes back
    gpu:1     x_gpu_1 ── relu ── relu.copy               to where x came from; the operator could have stayed there

    gpu:0   x ──┐               ┌── fc                   operators *alone elsewhere*: all that they read crosses to
    gpu:1       gelu ── dropout ┘                        them, all that they make crosses back

    gpu:0   token.weight ──┐                             *state copied* in each step: some module on another device
    gpu:1                  head                          shares it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict

from ...errors import GraphirError
from ...ir.blob import STATE_ROLES
from ...ir.device import CPU, Device
from ...ir.names import base_name
from ...ir.operator import Operator
from ...ir.opset import overload
from ...ir.placement import is_host_scalar, same_memory
from ...ir.program import Program
from ...ir.text import type_name
from .crossings import Crossings
from .flow import Flow
from .mends import Mends, Misplaced
from .wording import some, without_indices

__all__ = ["Detour", "detours"]

DetourKind: TypeAlias = Literal["bounce", "alone elsewhere", "state copied"]

_MOST_ALONE: Final = 12
"""Operators that are still few enough to be alone."""

_MOST_CHAINED: Final = 8
"""Elementwise operators, one after the other, through which a value is followed."""

_NO_MOVE: Final = "no move of these alone: what they exchange with others would cross instead"
"""Where moving them would send as much, or more."""

_LISTED: Final = """
    Abs AbsGradient Add AddGradient Cast Clip ClipGradient Cos CosGradient Div DivGradient Dropout DropoutGrad Elu
    EluGradient Exp HardSigmoid HardSigmoidGradient LeakyRelu LeakyReluGradient Log Mul MulGradient Negative
    NegativeGradient Pow PowGradient Relu ReluGradient Scale Selu SeluGradient Sigmoid SigmoidGradient Sin SinGradient
    Softplus SoftplusGradient Softsign SoftsignGradient Sqr SqrGradient Sqrt StopGradient Sub SubGradient Sum Swish
    SwishGradient Tanh TanhGradient Where
    aten._to_copy.default aten.clone.default aten.native_dropout.default aten.native_dropout_backward.default
"""
"""Elementwise types that torch does not call so: Caffe2's, and some of its own."""

_ELEMENTWISE: Final = frozenset(_LISTED.split())


class Detour(BaseModel):
    """Something that crosses between devices for nothing.

    Attributes:
        kind: ``bounce``: the value, or what elementwise operators made of it, goes back to where it came from.
            ``alone elsewhere``: a few operators without state that get all their operands from one other device and
            send all their results back. ``state copied``: a parameter, buffer or optimizer state is copied in each
            step.
        what: the same of these blobs, in words.
        nbytes: what crosses for nothing in a step; None where a size is not known.
        blobs: what crosses.
        mend: a call that moves operators so that fewer bytes cross, for the program before ``inject_copies``; words
            where there is no such call.
    """

    model_config = ConfigDict(frozen=True)

    kind: DetourKind
    what: str
    nbytes: int | None
    blobs: tuple[str, ...]
    mend: str


class _Found(NamedTuple):
    """A detour of one replica.

    Attributes:
        kind: see :class:`Detour`.
        names: what it is about, without prefix.
        sizes: of each blob that crosses, by name.
        operators: that would have to move.
        source: where they are.
        target: where they should be.
        words: what happens to *names*.
        alike: what it has in common with those of other replicas and layers, beside the index of a layer.
    """

    kind: DetourKind
    names: tuple[str, ...]
    sizes: Mapping[str, int | None]
    operators: tuple[Operator, ...]
    source: Device
    target: Device
    words: str
    alike: tuple[object, ...] = ()


@cache
def is_elementwise(type: str) -> bool:
    """Whether each element of a result depends on one element of each operand."""
    if type in _ELEMENTWISE:
        return True
    try:
        return torch.Tag.pointwise in overload(type).tags
    except GraphirError:  # graphir's own, and Caffe2's
        return False


def detours(program: Program, found: Crossings, measure: Callable[[str], int | None]) -> list[Detour]:
    """Every detour of a step, those of all replicas as one, the largest first.

    Args:
        program: with its copies.
        found: the copies between its devices.
        measure: what a copy of this blob moves, None where nobody knows.
    """
    if not found.copies:
        return []
    search = _Search(program, found, measure)
    alone = list(search.alone())
    taken = {id(op) for one in alone for op in one.operators}
    bounces = [one for one in search.bounces() if taken.isdisjoint(map(id, one.operators)) or not one.operators]
    merged: dict[tuple[object, ...], list[_Found]] = {}
    for one in (*alone, *bounces, *search.state()):
        merged.setdefault((one.kind, *one.alike), []).append(one)
    every = [search.detour(alike) for found in merged.values() for alike in _movable(found)]
    return sorted(every, key=lambda detour: -(detour.nbytes or 0))


def _movable(found: list[_Found]) -> Iterator[list[_Found]]:
    """Parts of detours that are alike, each of which one call mends: a device is no source and target in one."""
    moves: dict[tuple[Device, Device], list[_Found]] = {}
    for one in found:
        moves.setdefault((one.source, one.target), []).append(one)
    parts: list[dict[Device, Device]] = []
    members: list[list[_Found]] = []
    for (source, target), those in moves.items():
        for part, into in zip(parts, members, strict=True):
            if source not in part and source not in part.values() and target not in part:
                part[source] = target
                into += those
                break
        else:
            parts.append({source: target})
            members.append(list(those))
    yield from members


class _Search:
    """What is looked for in one program."""

    def __init__(self, program: Program, found: Crossings, measure: Callable[[str], int | None]) -> None:
        self.program, self.net, self.found, self.measure = program, program.step, found, measure
        self.ops, self.blobs = self.net.ops, self.net.blobs
        self.flow = Flow(self.net)
        self.ends = {value: {self.device(copy) for copy in copies} for value, copies in self.flow.copies.items()}
        self.mends = Mends(program, [self.ops[position] for position in self.flow.reads])

    def device(self, value: int) -> Device:
        """Where a value is."""
        return self.blobs[self.flow.storage[value]].device

    def size(self, value: int) -> int | None:
        """What a copy of a value moves."""
        return self.measure(self.flow.storage[value])

    def copied(self, value: int) -> str:
        """The blob whose value a copy made."""
        return self.ops[self.flow.maker[value]].inputs[0]

    # Operators alone elsewhere

    def alone(self) -> Iterator[_Found]:
        """Few operators without state whose operands all come from one device and whose results all go back there."""
        flow = self.flow
        root = self.groups()
        members: dict[int, list[int]] = {}
        crossing = {root[p] for v, p in enumerate(flow.maker) if v in flow.copies and p in root}
        for position in root:
            if root[position] in crossing:
                members.setdefault(root[position], []).append(position)
        for positions in members.values():
            if len(positions) <= _MOST_ALONE and (found := self.island(positions)):
                yield found

    def groups(self) -> dict[int, int]:
        """For each operator that computes, the first of those that hang together with it by values on their device."""
        flow, parent = self.flow, {position: position for position in self.flow.reads}

        def first(position: int) -> int:
            while parent[position] != position:
                parent[position] = position = parent[parent[position]]
            return position

        def join(a: int, b: int) -> None:
            a, b = first(a), first(b)
            parent[max(a, b)] = min(a, b)

        makers = {name: p for p in flow.reads for name in self.ops[p].outputs}
        for position, reads in flow.reads.items():
            for value in reads:
                if flow.maker[value] >= 0 and flow.source[value] < 0:
                    join(flow.maker[value], position)
            op = self.ops[position]
            forward = makers.get(op.of, position) if op.of else position
            if self.ops[forward].device == op.device:
                join(forward, position)  # what computes gradients moves with what they are of
        return {position: first(position) for position in parent}

    def island(self, positions: list[int]) -> _Found | None:
        """The detour of operators that hang together, if they are alone where they are."""
        flow, ops = self.flow, self.ops
        device = ops[positions[0]].device
        within = Counter(value for p in positions for value in flow.reads[p])
        arrived = [value for value in within if flow.source[value] >= 0]
        made = [value for p in positions for value in flow.makes[p]]
        left = [copy for value in made for copy in flow.copies.get(value, ())]
        ends = {self.device(flow.source[value]) for value in arrived} | {self.device(copy) for copy in left}
        if len(ends) != 1 or not arrived or not left or any(ops[p].type in self.net.dialect.stays for p in positions):
            return None
        for value in (*within, *made):
            stays = flow.maker[value] < 0 and not is_host_scalar(self.blobs[flow.storage[value]])
            if stays or (flow.source[value] < 0 and flow.maker[value] >= 0 and flow.readers[value] > within[value]):
                return None  # it has state or an input here, or what it makes is handed back from here
        (target,) = ends
        if same_memory(target, device):
            return None
        own = [value for value in arrived if flow.readers[value] == within[value]]
        sizes = {self.copied(value): self.size(value) for value in (*own, *left)}
        alone = tuple(ops[p] for p in positions)
        types = some(map(_kernel, alone))
        words = f"on {device} every operand of {types} comes from {target}, and every result goes back"
        names = tuple(dict.fromkeys(base_name(op.outputs[0]) for op in alone if op.outputs))
        return _Found("alone elsewhere", names, sizes, alone, device, target, words, (types,))

    # Bounces

    def bounces(self) -> Iterator[_Found]:
        """Copies of what elementwise operators made of a copy, back to where that came from."""
        flow = self.flow
        came = self.came()
        for value in flow.copies:
            for target in came.get(value, ()):
                if target in self.ends[value] and (found := self.bounce(value, target, came)):
                    yield found

    def came(self) -> dict[int, dict[Device, int]]:
        """For each value that comes from other devices by elementwise operators alone: from which, through how many."""
        flow = self.flow
        found: dict[int, dict[Device, int]] = {}
        for value, copies in flow.copies.items():
            if self.blobs[self.flow.storage[value]].role not in STATE_ROLES:
                moved = [copy for copy in copies if not self.ops[flow.maker[copy]].issue]  # parked: to come back
                found.update((copy, {self.device(value): 0}) for copy in moved)
        for position, reads in flow.reads.items():
            if not any(value in found for value in reads) or not is_elementwise(self.ops[position].type):
                continue
            through: dict[Device, int] = {}
            for value in reads:
                for device, count in found.get(value, {}).items():
                    through[device] = max(through.get(device, 0), count + 1)
            short = {device: count for device, count in through.items() if count <= _MOST_CHAINED}
            if short:
                found.update((made, short) for made in flow.makes[position])
        return found

    def bounce(self, value: int, target: Device, came: Mapping[int, Mapping[Device, int]]) -> _Found | None:
        """The detour of a value that goes back, if its operators had better run where it came from."""
        flow = self.flow
        chain: dict[int, tuple[int, ...]] = {}
        todo = [value]
        while todo and len(chain) <= _MOST_ALONE:
            made = todo.pop()
            position = flow.maker[made]
            if flow.source[made] < 0 and position not in chain:
                chain[position] = flow.reads[position]
                todo += [read for read in flow.reads[position] if target in came.get(read, ())]
        if len(chain) > _MOST_ALONE or not self.is_shorter(chain, target):
            return None
        operators = tuple(self.ops[position] for position in sorted(chain))
        name = self.flow.storage[value]
        types = some(map(_kernel, operators))
        what = f"what {types} made of a copy" if types else "a copy"
        words = f"{what} from {target} on {self.device(value)} goes back"
        names = (base_name(name),)
        sizes = {name: self.size(value)}
        return _Found("bounce", names, sizes, operators, self.device(value), target, words, (types,))

    def is_shorter(self, chain: Mapping[int, tuple[int, ...]], target: Device) -> bool:
        """Whether fewer bytes cross if these operators run on *target*; fewer copies, where a size is not known."""
        flow = self.flow
        if not chain:
            return True
        within = Counter(value for reads in chain.values() for value in reads)
        made = {value for position in chain for value in flow.makes[position]}
        fewer: list[int] = []
        more: list[int] = []
        for value, count in within.items():
            if value in made:
                continue
            source = flow.source[value]
            if source >= 0 and self.device(source) == target:
                fewer += [value] * (flow.readers[value] == count and value not in flow.copies)
            elif flow.maker[value] < 0 and not is_host_scalar(self.blobs[flow.storage[value]]):
                return False  # state, which would have to move along
            elif target not in self.ends.get(value, ()):
                more.append(value)
        for value in made:
            fewer += [value] * (target in self.ends.get(value, ()))
            more += [value] * (flow.readers[value] > within[value])
        sizes = [[self.size(value) for value in values] for values in (fewer, more)]
        if None in (*sizes[0], *sizes[1]):
            return len(fewer) > len(more)
        return sum(size or 0 for size in sizes[0]) > sum(size or 0 for size in sizes[1])

    # State

    def state(self) -> Iterator[_Found]:
        """State that is copied in each step, with the modules that compute with it on another device than its own."""
        sizes: dict[tuple[str, Device], dict[str, int | None]] = {}
        for crossing in self.found.copies:
            op = self.ops[crossing.position]
            if crossing.kind not in ("parameter", "buffer", "optimizer state") or op.issue:
                continue
            ends = self.blobs[op.inputs[0]].device, self.blobs[op.outputs[0]].device
            home = self.blobs[crossing.origin].device
            away = ends[1] if same_memory(ends[0], home) else ends[0]
            crossed = sizes.setdefault((crossing.origin, away), {})
            crossed[op.outputs[0]] = self.measure(op.outputs[0])
        readers = self.sharing({origin for origin, _ in sizes}) if sizes else {}
        for (origin, away), crossed in sizes.items():
            home = self.blobs[origin].device
            there = readers.get((origin, away), {})
            if there and all(self.updates_on(away, op) for op in there.values()):
                continue  # park has put them there, with the state that is large
            operators = tuple(op for op in there.values() if op.module)
            modules = [
                some(op.module or _kernel(op) for op in readers.get((origin, device), {}).values())
                for device in (home, away)
            ]
            at_home = f" on {home} by {modules[0]} and" if modules[0] else ""
            words = f"read{at_home} on {away} by {modules[1]}, copied in each step"
            total = None if None in crossed.values() else sum(size or 0 for size in crossed.values())
            alike = tuple(map(without_indices, modules))
            yield _Found("state copied", (base_name(origin),), {origin: total}, operators, away, home, words, alike)

    def updates_on(self, device: Device, op: Operator) -> bool:
        """Whether an operator is an update of state that lives on a device."""
        written = [self.blobs[op.inputs[source]] for _, source in op.effects.writes]
        return op.phase == "update" and any(
            blob.role in STATE_ROLES and blob.device == device and not is_host_scalar(blob) for blob in written
        )

    def sharing(self, origins: Collection[str]) -> dict[tuple[str, Device], dict[str, Operator]]:
        """The first operator of each module that computes with these storages or their copies, by device."""
        found: dict[tuple[str, Device], dict[str, Operator]] = {}
        for position in self.flow.reads:
            op = self.ops[position]
            for name in op.inputs:
                storage = self.blobs[name].storage
                origin = self.found.origins.get(storage, storage)
                if origin in origins:
                    found.setdefault((origin, op.device), {}).setdefault(op.module, op)
        return found

    # Whether a move helps

    def moved(self, misplaced: Iterable[Misplaced], *, modules: bool) -> dict[int, Device]:
        """The operators that a call moves, by position, and where to: all that compute in the modules of operators, or
        the operators with what belongs to them; of every replica on that device. What reads nothing but what these make
        goes along, as a loss does."""
        targets: dict[tuple[str, Device], Device] = {}
        for one in misplaced:
            for op in one.operators:
                key = op.module if modules else base_name(op.outputs[0]) if op.outputs else ""
                targets[key, one.source] = one.target
        found: dict[int, Device] = {}
        for position in self.flow.reads:
            op = self.ops[position]
            keys = [op.module] if modules else [*map(base_name, op.outputs), base_name(op.of)]
            target = next((targets[key, op.device] for key in keys if (key, op.device) in targets), None)
            if target is None:
                target = self.along(position, found)
            if target is not None:
                found[position] = target
        return found

    def along(self, position: int, moved: Mapping[int, Device]) -> Device | None:
        """Where an operator goes that computes with what moved operators make, and with inputs, alone."""
        targets = set()
        for value in map(self.root, self.flow.reads[position]):
            maker, role = self.flow.maker[value], self.blobs[self.flow.storage[value]].role
            if maker in moved:
                targets.add(moved[maker])
            elif maker >= 0 or role not in ("input", "constant"):
                return None
        return targets.pop() if len(targets) == 1 else None

    def sends_less(self, moved: Mapping[int, Device]) -> bool:
        """Whether fewer bytes cross where these operators run elsewhere; fewer values, where a size is not known."""
        values = {self.root(v) for position in moved for v in (*self.flow.reads[position], *self.flow.makes[position])}
        sizes = {value: self.size(value) for value in values}
        weigh = {value: size or 0 for value, size in sizes.items()} if None not in sizes.values() else {}
        now, then = (sum(weigh.get(v, 1) * self.crossed(v, where) for v in values) for where in ({}, moved))
        return then < now

    def crossed(self, value: int, moved: Mapping[int, Device]) -> int:
        """To how many other memories a value goes."""
        maker = self.flow.maker[value]
        home = moved.get(maker, self.device(value))
        ends = {moved.get(position, self.ops[position].device) for position in self.readers.get(value, ())}
        return len({CPU if end.is_host else end for end in ends if not same_memory(end, home)})

    def root(self, value: int) -> int:
        """The value that one is a copy of."""
        while self.flow.source[value] >= 0:
            value = self.flow.source[value]
        return value

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """The operators that compute with each value or a copy of it."""
        found: dict[int, list[int]] = {}
        for position, reads in self.flow.reads.items():
            for value in dict.fromkeys(map(self.root, reads)):
                if not is_host_scalar(self.blobs[self.flow.storage[value]]):
                    found.setdefault(value, []).append(position)
        return found

    # Words and mends

    def detour(self, alike: list[_Found]) -> Detour:
        """The same detour of several replicas and layers."""
        first = alike[0]
        sizes = {name: size for one in alike for name, size in one.sizes.items()}
        others = any(one.words != first.words for one in alike)
        return Detour(
            kind=first.kind,
            what=f"{some(name for one in alike for name in one.names)}: {first.words}" + "; others alike" * others,
            nbytes=None if None in sizes.values() else sum(size or 0 for size in sizes.values()),
            blobs=tuple(sizes),
            mend=self.mend(alike),
        )

    def mend(self, alike: list[_Found]) -> str:
        """What to do, as a call where there is one."""
        state, target = alike[0].kind == "state copied", alike[0].target
        misplaced = [Misplaced(one.operators, one.source, one.target) for one in alike]
        makes = some(base_name(op.outputs[0]) for one in alike for op in one.operators if op.outputs)
        if call := self.mends.call(misplaced, whole=state):
            moved = self.moved(misplaced, modules=call.startswith("passes.shift_modules"))
            return call if self.sends_less(moved) else _NO_MOVE
        if makes:
            return f"run what makes {makes} on {target}"
        return f"run what reads it on {target}" if state else f"read on {target} what was copied from there"


def _kernel(op: Operator) -> str:
    """An operator's type, as words name it."""
    return type_name(op.type).removeprefix("aten.")
