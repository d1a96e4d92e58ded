"""The bytes and the seconds of the plans of one step, for one order of its operators after the other.

Bytes are what :func:`graphir.memory` predicts for a plan, without the instructions: events take no bytes. Seconds are
those of :mod:`.plan_seconds`. What does not depend on the order is found once: the bytes of storages, what operators
allocate inside, what they wait for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from graphir.analysis.buffers import Buffers
from graphir.analysis.hazards import outliving
from graphir.analysis.profile_files import at_hand
from graphir.analysis.sources import measured_of
from graphir.ir.plan import issued_as

from .micro_work import Work
from .order import Tasks
from .plan_seconds import Clock, PlanSeconds

__all__ = ["Figures", "PlanFigures"]


class Figures(NamedTuple):
    """What a plan comes to.

    Attributes:
        peaks: by device, the most bytes that it holds.
        seconds: of a step.
    """

    peaks: Mapping[str, int]
    seconds: float


class PlanFigures:
    """Figures of the plans of one program, its operators in several orders.

    Args:
        work: of its step.
        seconds: what its operators wait for.

    Attributes:
        base: by device, the bytes of state and inputs, which stay.
        storages: each other storage: (device, bytes).
        tasks: operators and frees; ``freed``: the storages that are freed.
        copies: the operators that receive what no operator has made before, and what that is.
        parts: of each operator, what its instructions make, one after the other: (device, bytes made, bytes that are
            allocated inside).
    """

    def __init__(self, work: Work, seconds: PlanSeconds) -> None:
        self.seconds = seconds
        self.net, self.dims, self.devices, sizes = work.program.step, work.program.dims, work.devices, work.bytes
        self.tasks = Tasks(self.net, self.dims, work.hazards)
        ops, blobs, places = self.net.ops, self.net.blobs, work.places
        taken = measured_of(self.net, self.dims, torch.get_num_threads(), at_hand())
        self.freed = set().union(*work.touched) - outliving(self.net)
        self.base = list(sizes.base)
        self.storages = {name: (place, nbytes) for name, (place, nbytes, _) in sizes.storages.items()}
        kept = {blobs[ops[i].outputs[0]].storage: found.kept for i, found in taken.items() if found.kept}
        for storage, more in kept.items():
            if storage in self.storages:
                place, nbytes = self.storages[storage]
                self.storages[storage] = place, nbytes + more
            else:
                self.base[places[blobs[storage].device]] += more
        self.copies: dict[int, str] = {}
        made: set[str] = set()
        self.parts: list[list[tuple[int, int, int]]] = []
        for i, op in enumerate(ops):
            if op.kind == "copy" and not (op.output_versions or (0,))[0]:
                self.copies[i] = op.outputs[0]
            inside = taken[i].scratch if i in taken else sizes.scratch[i]
            parts = []
            for name in op.outputs if inside or sizes.made[i] else ():
                new = self.storages[name][1] if name in self.storages and name not in made else 0
                made.add(name)
                parts.append((places[blobs[name].device], new, inside))
            self.parts.append(parts if issued_as(op) == "collective" else _at_once(parts))

    def of(self, order: Sequence[int]) -> Figures:
        """Those of the plan that issues copies where they stand.

        Args:
            order: the positions of the operators in the program.
        """
        found = self.unbeaten(order, {}, math.inf)
        assert found is not None  # nothing beats it
        return found

    def unbeaten(self, order: Sequence[int], limits: Mapping[str, int], seconds: float) -> Figures | None:
        """The same, unless the plan exceeds limits by device or takes longer than so many seconds: no more is found of
        it then."""
        storages, copies, parts = self.storages, self.copies, self.parts
        buffers = Buffers(self.net, self.dims)
        buffers.freed.update(self.freed)
        live, peaks, clock = list(self.base), list(self.base), Clock(self.seconds, seconds)
        most = [limits.get(device, math.inf) for device in self.devices]
        for issue in self.tasks.issued(order, 0):
            if isinstance(issue, str):
                clock.drop(issue)
                if issue in buffers.numbers:
                    buffers.free(issue)
                elif issue in storages:
                    place, nbytes = storages[issue]
                    live[place] -= nbytes
                continue
            held = [buffers.receive(copies[i]) for i in issue if i in copies]
            clock.issue(issue, [storage for storage in held if storage is not None])
            for i in issue:
                received = i in copies and copies[i] in buffers.numbers
                for place, made, inside in parts[i]:
                    if not received:
                        live[place] += made
                    if live[place] + inside > peaks[place]:
                        peaks[place] = live[place] + inside
                        if peaks[place] > most[place]:
                            return None
            if clock.beaten:
                return None
        for (place, _), nbytes in self.received(buffers).items():
            peaks[place] += nbytes
        if any(peak > limit for peak, limit in zip(peaks, most, strict=True)) or clock.seconds > seconds:
            return None
        return Figures(dict(zip(self.devices, peaks, strict=True)), clock.seconds)

    def received(self, buffers: Buffers) -> dict[tuple[int, int], int]:
        """The bytes of each receive buffer, by device and number: those of the largest storage that it receives."""
        found: dict[tuple[int, int], int] = {}
        for storage, number in buffers.numbers.items():
            place, nbytes = self.storages[storage]
            found[place, number] = max(found.get((place, number), 0), nbytes)
        return found


def _at_once(parts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """What one instruction makes that makes all results, by device: inside, it allocates where the first one lives."""
    if len(parts) < 2:
        return [part for part in parts if part[1] or part[2]]
    found = {parts[0][0]: (0, parts[0][2])}
    for device, made, _ in parts:
        before, inside = found.get(device, (0, 0))
        found[device] = before + made, inside
    return [(device, made, inside) for device, (made, inside) in found.items() if made or inside]
