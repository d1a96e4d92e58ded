"""The most bytes that the plans of one step hold on each device, for one order of its operators after the other.

What :func:`graphir.memory` predicts for a plan, without the instructions: events take no bytes. What does not depend on
the order is found once: the bytes of storages, and what operators allocate inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphir.analysis.buffers import Buffers
from graphir.analysis.hazards import Hazards
from graphir.analysis.profile_files import cached
from graphir.analysis.sources import measured_of, scratch_of
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.plan import issued_as
from graphir.ir.program import Program

from .order import issue_order

__all__ = ["PlanPeaks"]


class PlanPeaks:
    """Peaks of the plans of one program, its operators in several orders.

    Args:
        program: whose step it is.
        found: the hazards of the step.

    Attributes:
        base: by device, the bytes of state and inputs, which stay.
        nbytes: of each other storage.
        parts: of each operator, what its instructions make, one after the other: (device, bytes made, bytes that are
            allocated inside).
    """

    def __init__(self, program: Program, found: Hazards) -> None:
        self.program, self.hazards = program, found
        net, dims, threads = program.step, program.dims, torch.get_num_threads()
        taken = measured_of(net, dims, threads, cached())
        blobs, kept = net.blobs, {net.ops[i].outputs[0]: measured.kept for i, measured in taken.items()}
        owners = {name: blob for name, blob in blobs.items() if blob.storage == name}
        self.nbytes = {name: blob.nbytes(dims) for name, blob in owners.items()}
        for name, more in kept.items():
            self.nbytes[blobs[name].storage] += more
        self.base: dict[str, int] = dict.fromkeys(map(str, net.devices), 0)
        for name in {blobs[name].storage for name in net.external_inputs}:
            self.base[blobs[name].device] += self.nbytes.pop(name)
        inside: dict[int, list[int]] = {}
        for call in scratch_of(program, dims, threads, taken):
            inside.setdefault(call.position, []).append(call.nbytes or 0)
        made: set[str] = set()
        self.parts: list[list[tuple[Device, int, int]]] = []
        for i, op in enumerate(net.ops):
            parts, scratch = [], inside.get(i, ())
            for n, name in enumerate(op.outputs):
                new = name in self.nbytes and name not in made
                made.add(name)
                parts.append(
                    (blobs[name].device, self.nbytes[name] if new else 0, scratch[n] if n < len(scratch) else 0)
                )
            self.parts.append(parts if issued_as(op) == "collective" else _at_once(parts))

    def of(self, order: Sequence[int]) -> dict[str, int]:
        """The peaks by device, of the plan that issues copies where they stand.

        Args:
            order: the positions of the operators in the program.
        """
        step = self.program.step
        net = step.with_(ops=tuple([step.ops[i] for i in order]))
        blobs, dims, nbytes = net.blobs, self.program.dims, self.nbytes
        issues = issue_order(net, dims, self.hazards.reordered(order), 0)
        buffers = Buffers(net, dims)
        buffers.freed.update([issue for issue in issues if isinstance(issue, str)])
        live, peaks = dict(self.base), dict(self.base)
        for issue in issues:
            if isinstance(issue, str):
                buffers.free(issue)
                if issue in nbytes and issue not in buffers.numbers:
                    live[blobs[issue].device] -= nbytes[issue]
                continue
            for place in issue:
                op = net.ops[place]
                if op.type == "Copy" and not (op.output_versions and op.output_versions[0]):
                    buffers.receive(op.outputs[0])
            for place in issue:
                for device, made, inside in self.parts[order[place]]:
                    if made and net.ops[place].outputs[0] not in buffers.numbers:
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
    """What one instruction makes that makes all results, by device; what takes nothing is left out."""
    found: dict[Device, tuple[int, int]] = {}
    for device, made, inside in parts:
        if made or inside:
            before = found.get(device, (0, 0))
            found[device] = before[0] + made, before[1] + inside
    return [(device, made, inside) for device, (made, inside) in found.items()]
