"""The work of a step by micro-batch and device: what a pipeline schedule chooses among.

Each operator belongs to a micro-batch and to one of four kinds::

    FORWARD    of the forward phase
    INPUT      backward, and a transfer by which another device goes on with its backward waits for it
    WEIGHT     backward otherwise: gradients of parameters, and of what nobody sends on
    UPDATE     reductions, clipping, updates, and what follows from them

An operator without a micro-batch in its names belongs to the last one of those that it comes after: a sum of gradients
to the micro-batch whose gradient it adds.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch

from graphir.analysis.alike import Kinds, alike
from graphir.analysis.cost import seconds_alike
from graphir.analysis.hazards import hazards
from graphir.analysis.schedule import crossed
from graphir.analysis.scratch import is_called, scratch
from graphir.analysis.topology import Topology
from graphir.ir.blob import STATE_ROLES, dense_nbytes
from graphir.ir.names import micro_batch_of
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.opset import ACCUMULATES
from graphir.ir.plan import issued_as, issued_on
from graphir.ir.program import Program
from graphir.ir.size import Dims

from .storage import overwritable

__all__ = ["FORWARD", "INPUT", "UPDATE", "WEIGHT", "Bytes", "Work"]

FORWARD, INPUT, WEIGHT, UPDATE = range(4)

_KINDS: Final = {"forward": FORWARD, "backward": WEIGHT}
"""By phase, the kind of an operator for all that its phase says; that of others is UPDATE."""


class Bytes:
    """What the operators of a step allocate and free, by device.

    Attributes:
        base: by device, what is there throughout: state and inputs.
        made: for each operator, the storages that it makes: (device, bytes, whether it is a copy's).
        storages: the same by name.
        used: for each operator, the storages that it touches and that the step frees, as numbers.
        uses: of each of these, how many operators touch it.
        freed: of each of these, (device, bytes, whether it is a copy's).
        number: of each storage that the step makes, its number; -1: the step does not free it.
        scratch: for each operator, what it allocates inside.
        alters: for each operator, whether it allocates something inside or may overwrite something.
        takes: for each operator, the bytes that it takes beyond what is there before it, if what it could overwrite is
            dead by then.
        over: for each operator, what it overwrites with its result if it is the last to touch it, as a number; -1: it
            does not.
    """

    __slots__ = ("alters", "base", "freed", "made", "number", "over", "scratch", "storages", "takes", "used", "uses")

    def __init__(
        self, program: Program, touched: Sequence[Sequence[str]], places: dict[str, int], alike: Kinds
    ) -> None:
        net, dims = program.step, program.dims
        blobs, given = net.blobs, {net.blobs[name].storage for name in net.external_inputs}
        self.base = [0] * len(places)
        for name in given:
            self.base[places[blobs[name].device]] += blobs[name].nbytes(dims)
        kept = given | {blobs[name].storage for name in net.external_outputs}
        kept.update(name for name, blob in blobs.items() if blob.role in STATE_ROLES)
        number = self.number = dict[str, int]()
        self.storages: dict[str, tuple[int, int, bool]] = {}
        self.made: list[list[tuple[int, int, bool]]] = []
        self.freed: list[tuple[int, int, bool]] = []
        self.scratch: list[int] = []
        sizes: list[list[int]] = []
        threads = torch.get_num_threads()
        for i, (op, first) in enumerate(zip(net.ops, alike, strict=True)):
            if first == i:
                sizes.append([blobs[name].nbytes(dims) for name in op.outputs])
                self.scratch.append(scratch(op, blobs, dims, threads) or 0 if is_called(op) else 0)
            else:
                sizes.append(sizes[first])
                self.scratch.append(self.scratch[first])
            made = []
            for name, nbytes in zip(op.outputs, sizes[i], strict=True):
                blob = blobs[name]
                if blob.storage == name and name not in given and name not in number:
                    storage = self.storages[name] = places[blob.device], nbytes, op.kind == "copy"
                    made.append(storage)
                    number[name] = -1
                    if name not in kept:
                        number[name] = len(self.freed)
                        self.freed.append(storage)
            self.made.append(made)
        self.used = [[n for storage in storages if (n := number.get(storage, -1)) >= 0] for storages in touched]
        self.uses = [0] * len(self.freed)
        for used in self.used:
            for n in used:
                self.uses[n] += 1
        self.over = [-1] * len(net.ops)
        self.alters = [nbytes > 0 for nbytes in self.scratch]
        self.takes = list(self.scratch)
        for i, made in enumerate(self.made):
            for _, nbytes, _ in made:
                self.takes[i] += nbytes

    def overwriting(self, net: Net) -> Bytes:
        """The same of operators that overwrite what is dead, as they do after :func:`.share_storage`."""
        other = copy.copy(self)
        other.over, other.alters, other.takes = list(self.over), list(self.alters), list(self.takes)
        for i, op in enumerate(net.ops):
            if (operand := overwritable(op, net.blobs)) is not None:
                n = self.number.get(operand.storage, -1)
                if n >= 0 and not self.freed[n][2]:
                    other.over[i], other.alters[i] = n, True
                    other.takes[i] -= self.freed[n][1]
        return other

    def top(self, i: int, uses: Sequence[int]) -> int:
        """What an operator takes at once, where its results are counted as live: scratch, less what it overwrites.

        Args:
            uses: of each storage, how many operators that touch it are not done.
        """
        over = self.over[i]
        return self.scratch[i] - self.freed[over][1] if over >= 0 and uses[over] == 1 else self.scratch[i]


class Work:
    """The operators of a step, by position in the program.

    Attributes:
        program: whose step it is, with copies between its devices.
        count: of micro-batches.
        devices: their names; a *place* is an index into them.
        micro: the micro-batch of each operator; that of an update is ``count``.
        kind: FORWARD, INPUT, WEIGHT or UPDATE.
        place: where its results live.
        lane: which lane executes it, as an index; a collective has one of its own.
        lanes: how many there are. Those of the devices' computation come first.
        alike: of each operator, the first one that is like it.
        seconds: what it is expected to take on the machine; without one, and on one whose devices are threads of a
            host, at nominal costs.
        hazards: of the step.
        earlier, later: the operators that have to come before it and after it: by hazards, and copies that are taken
            late after what their readers wait for.
    """

    def __init__(self, program: Program, count: int, topology: Topology | None = None) -> None:
        self.program, self.count = program, count
        self._ranked: dict[tuple[int, int, int, int], tuple[list[int], list[int]]] = {}
        net = program.step
        self.hazards = hazards(net)
        self.touched, self.earlier = self.hazards.touched, list(self.hazards.earlier)
        self.devices = [str(device) for device in net.devices]
        self.places = {device: i for i, device in enumerate(self.devices)}
        self.alike = alike(net)
        self.seconds = _seconds(net, program.dims, self.alike, topology)
        self.micro, self.kind = _assigned(net, self.earlier, count)
        _hold_back(net, self.earlier, self.kind)
        self.later: list[list[int]] = [[] for _ in net.ops]
        for i, earlier in enumerate(self.earlier):
            for other in earlier:
                self.later[other].append(i)
        self._tell_inputs(net)
        self.place, self.lane = [], []
        blobs, places = net.blobs, self.places
        others: dict[str, int] = {}
        for op in net.ops:
            self.place.append(places[blobs[op.outputs[0]].device if op.outputs else op.device])
            issued = issued_as(op)
            if issued == "run":
                self.lane.append(places[op.device])
            else:
                at = "collectives" if issued == "collective" else issued_on(op, blobs)
                self.lane.append(others.setdefault(at, len(places) + len(others)))
        self.lanes = len(places) + len(others)

    def overwriting(self) -> Work:
        """The same work, its operators overwriting what is dead."""
        other = copy.copy(self)
        other.bytes = self.bytes.overwriting(self.program.step)
        vars(other).pop("most_for_weights", None)  # all else is the same
        return other

    @cached_property
    def bytes(self) -> Bytes:
        """What its operators allocate."""
        return Bytes(self.program, self.touched, self.places, self.alike)

    @cached_property
    def waits(self) -> list[int]:
        """For how many others each operator waits."""
        return list(map(len, self.earlier))

    @cached_property
    def loads(self) -> list[float]:
        """By lane, the seconds of its operators."""
        found = [0.0] * self.lanes
        for lane, seconds in zip(self.lane, self.seconds, strict=True):
            found[lane] += seconds
        return found

    def ranked(self, ranks: tuple[int, int, int, int]) -> tuple[list[int], list[int]]:
        """What operators are sorted by, if kinds have these ranks: by rank and micro-batch, and by position, too."""
        found = self._ranked.get(ranks)
        if found is None:
            bases, size = [rank * (self.count + 1) for rank in ranks], len(self.micro)
            segments = [bases[kind] + micro for kind, micro in zip(self.kind, self.micro, strict=True)]
            found = self._ranked[ranks] = segments, [segment * size + i for i, segment in enumerate(segments)]
        return found

    @cached_property
    def segments(self) -> list[tuple[bool, int] | None]:
        """Of each operator, whether it is of a forward, and of which micro-batch; None: it is an update."""
        found = [[(forward, micro) for micro in range(self.count)] for forward in (False, True)]
        return [
            None if kind == UPDATE else found[kind == FORWARD][micro]
            for kind, micro in zip(self.kind, self.micro, strict=True)
        ]

    @cached_property
    def allocating(self) -> list[bool]:
        """Whether each operator is of a micro-batch and allocates."""
        return [bool(made) and kind != UPDATE for made, kind in zip(self.bytes.made, self.kind, strict=True)]

    @cached_property
    def entering(self) -> list[bool]:
        """Whether each operator is of a forward, allocates, and is no transfer."""
        runs, devices = zip(self.allocating, self.kind, self.lane, strict=True), len(self.devices)
        return [allocates and kind == FORWARD and lane < devices for allocates, kind, lane in runs]

    @cached_property
    def counts(self) -> list[tuple[list[int], list[int]]]:
        """By device, how many operators each micro-batch's forward has there, and how many its backward."""
        found = [([0] * self.count, [0] * self.count) for _ in self.devices]
        for place, kind, micro in zip(self.place, self.kind, self.micro, strict=True):
            if kind != UPDATE:
                found[place][kind != FORWARD][micro] += 1
        return found

    @cached_property
    def most_for_weights(self) -> list[int]:
        """By device, the most bytes that an operator of the kind WEIGHT takes there."""
        found = [0] * len(self.devices)
        for place, kind, nbytes in zip(self.place, self.kind, self.bytes.takes, strict=True):
            if kind == WEIGHT and nbytes > found[place]:
                found[place] = nbytes
        return found

    def _tell_inputs(self, net: Net) -> None:
        """Tell backward operators that another device waits for from the others."""
        kind, ops, later = self.kind, net.ops, self.later
        goes_on = [False] * len(ops)  # whether the backward goes on behind it
        for i in range(len(ops) - 1, -1, -1):
            if kind[i] != WEIGHT:
                continue
            for other in later[i]:
                if kind[other] == INPUT:
                    kind[i] = INPUT
                if kind[other] in (INPUT, WEIGHT) and (goes_on[other] or _computes(ops[other])):
                    goes_on[i] = True
            if goes_on[i] and ops[i].kind == "copy":
                kind[i] = INPUT


def _seconds(net: Net, dims: Dims, kinds: Kinds, topology: Topology | None) -> list[float]:
    """What each operator takes, and each copy over its link.

    Raises:
        GraphirError: the topology lacks a device or a link.
    """
    if topology is None:
        return seconds_alike(net, dims, kinds)
    links: dict[int, float] = {}
    for i, op in enumerate(net.ops):
        if op.kind != "copy":
            continue
        blob, target = net.blobs[op.inputs[0]], net.blobs[op.outputs[0]].device
        if blob.device != target:
            links[i] = crossed(topology, blob.device, target, op, net).seconds(dense_nbytes(blob, dims))
    if topology.host is not None:  # its threads are alike, and every process is to find the same order
        return seconds_alike(net, dims, kinds)
    found = seconds_alike(net, dims, kinds, lambda device: topology.speed(device).rates())
    return [links.get(i, seconds) for i, seconds in enumerate(found)]


def _assigned(net: Net, earlier: Sequence[Sequence[int]], count: int) -> tuple[list[int], list[int]]:
    """The micro-batch and the kind of each operator; backward operators are not told apart yet."""
    micro: list[int] = []
    kind: list[int] = []
    for op, before in zip(net.ops, earlier, strict=True):
        what = _KINDS.get(op.phase, UPDATE)
        mine = micro_batch_of(op.outputs[0]) or 0 if op.outputs else 0
        for other in before:
            if micro[other] > mine:
                mine = micro[other]
        if what == UPDATE or mine == count:
            what, mine = UPDATE, count
        micro.append(mine)
        kind.append(what)
    return micro, kind


def _computes(op: Operator) -> bool:
    """Whether an operator computes more than a sum of gradients."""
    return issued_as(op) == "run" and op.type != ACCUMULATES and not op.effects.shows


def _hold_back(net: Net, earlier: list[list[int]], kind: Sequence[int]) -> None:
    """Let a copy of what the forward made, which the backward reads, wait until its reader lacks nothing else: it takes
    memory where it goes, and was put there to take it late."""
    makers: dict[str, int] = {}
    readers: dict[int, list[int]] = {}
    copies = set()
    for i, op in enumerate(net.ops):
        if op.kind == "copy" and kind[i] == WEIGHT and kind[makers.get(op.inputs[0], i)] == FORWARD:
            copies.add(i)
        for name in op.outputs:
            makers[name] = i
    if not copies:
        return
    for i, before in enumerate(earlier):
        for other in before:
            if other in copies:
                readers.setdefault(other, []).append(i)
    for held, found in readers.items():  # none of these comes after the copy: its first follower comes after them
        earlier[held] = [*earlier[held], *(other for other in earlier[found[0]] if other not in copies)]
