"""The most bytes that the plans of one step hold on each device, for one order of its operators after the other.

What :func:`graphir.memory` predicts for a plan, without the instructions: events take no bytes. What does not depend on
the order is found once: the bytes of storages, and what operators allocate inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphir.analysis.buffers import Buffers
from graphir.analysis.profile_files import cached
from graphir.analysis.sources import measured_of
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.plan import issued_as

from .micro_work import Work
from .order import Tasks

__all__ = ["PlanPeaks"]


class PlanPeaks:
    """Peaks of the plans of one program, its operators in several orders.

    Args:
        work: of its step.

    Attributes:
        base: by device, the bytes of state and inputs, which stay.
        nbytes: of each other storage.
        tasks: operators and frees.
        copies: the operators that receive what no operator has made before.
        parts: of each operator, what its instructions make, one after the other: (device, bytes made, bytes that are
            allocated inside).
    """

    def __init__(self, work: Work) -> None:
        self.program = work.program
        net, dims, sizes = self.program.step, self.program.dims, work.bytes
        self.tasks = Tasks(net, dims, work.hazards)
        blobs, taken = net.blobs, measured_of(net, dims, torch.get_num_threads(), cached())
        self.base = dict(zip(work.devices, sizes.base, strict=True))
        self.nbytes = dict(sizes.nbytes)
        kept = {blobs[net.ops[i].outputs[0]].storage: found.kept for i, found in taken.items() if found.kept}
        for storage, more in kept.items():
            if storage in self.nbytes:
                self.nbytes[storage] += more
            else:
                self.base[blobs[storage].device] += more
        self.copies: set[int] = set()
        made: set[str] = set()
        self.parts: list[list[tuple[Device, int, int]]] = []
        for i, op in enumerate(net.ops):
            if op.type == "Copy" and not (op.output_versions or (0,))[0]:
                self.copies.add(i)
            inside = taken[i].scratch if i in taken else sizes.scratch[i]
            parts = []
            for name in op.outputs:
                new = self.nbytes[name] if name in self.nbytes and name not in made else 0
                made.add(name)
                parts.append((blobs[name].device, new, inside))
            self.parts.append(parts if issued_as(op) == "collective" else _at_once(parts))

    def of(self, order: Sequence[int]) -> dict[str, int]:
        """The peaks by device, of the plan that issues copies where they stand.

        Args:
            order: the positions of the operators in the program.
        """
        net, nbytes = self.program.step, self.nbytes
        blobs, issues = net.blobs, self.tasks.issued(order, 0)
        buffers = Buffers(net, self.program.dims)
        buffers.freed.update([issue for issue in issues if isinstance(issue, str)])
        live, peaks = dict(self.base), dict(self.base)
        for issue in issues:
            if isinstance(issue, str):
                if issue in buffers.numbers:
                    buffers.free(issue)
                elif issue in nbytes:
                    live[blobs[issue].device] -= nbytes[issue]
                continue
            for i in issue:
                if i in self.copies:
                    buffers.receive(net.ops[i].outputs[0])
            for i in issue:
                for device, made, inside in self.parts[i]:
                    if made and net.ops[i].outputs[0] not in buffers.numbers:
                        live[device] += made
                    if live[device] + inside > peaks[device]:
                        peaks[device] = live[device] + inside
        for (device, _), most in self.received(net, buffers).items():
            peaks[device] += most
        return peaks

    def received(self, net: Net, buffers: Buffers) -> dict[tuple[Device, int], int]:
        """The bytes of each receive buffer, by device and number: those of the largest storage that it receives."""
        found: dict[tuple[Device, int], int] = {}
        for storage, number in buffers.numbers.items():
            buffer = net.blobs[storage].device, number
            found[buffer] = max(found.get(buffer, 0), self.nbytes[storage])
        return found


def _at_once(parts: Sequence[tuple[Device, int, int]]) -> list[tuple[Device, int, int]]:
    """What one instruction makes that makes all results, by device: inside, it allocates where the first one lives."""
    if len(parts) < 2:
        return [part for part in parts if part[1] or part[2]]
    found = {parts[0][0]: (0, parts[0][2])}
    for device, made, _ in parts:
        before, inside = found.get(device, (0, 0))
        found[device] = before + made, inside
    return [(device, made, inside) for device, (made, inside) in found.items() if made or inside]
