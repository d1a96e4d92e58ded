"""Updates that run where their state is parked.

::

    w_grad      @gpu:0 = aten.mm(…)                     w_grad      @gpu:0 = aten.mm(…)
                                                        w_grad_cpu  @cpu:0 = Copy(w_grad)      w_grad is freed
                                                        w_cpu       @cpu:0 = Copy(w)
    …                                                   …
    w, w.m      @gpu:0 = graphir.sgd(w, w_grad, w.m)    w_cpu, w.m  @cpu:0 = graphir.sgd(w_cpu, w_grad_cpu, w.m)
                                                        w           @gpu:0 = Copy(w_cpu)

The optimizer's state never crosses then. A gradient crosses once. A parameter crosses to its update and back; one that
is parked, too, only for the phases that read it. What is small crosses just before the update, several at a time, by
:func:`.inject_copies`.

Source: ZeRO-Offload, J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", USENIX ATC 2021, which
keeps parameters on both sides, so that none crosses to its update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graphir.analysis.hazards import touches
from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.program import Program
from graphir.ir.size import Dims

from .order import SMALL

__all__ = ["Updates", "updates_of"]


class Updates(NamedTuple):
    """Operators of the update that run where state is parked.

    Attributes:
        step: the net with these operators where they run, in the order in which their gradients are made.
        ops: the device of each, by its position.
        state: where else state goes: what nobody but these operators uses.
        gradients: where results of the backward go that these operators read, as soon as they are made.
        params: what lives elsewhere and these operators overwrite: where, and the positions before which it goes there
            and comes back.
    """

    step: Net
    ops: Mapping[int, Device]
    state: Mapping[str, Device]
    gradients: Mapping[str, Device]
    params: Mapping[str, tuple[Device, int, int]]


def updates_of(program: Program, parked: Mapping[str, Device], by: str) -> Updates:
    """The updates of parked state, where they run, and what goes there.

    Args:
        program: captured, replicated or sharded.
        parked: by storage, the device where it is parked.
        by: the pass that moves them.

    Raises:
        PassError: no update uses what is parked.
    """
    step, ops = program.step, dict[int, Device]()
    blobs = step.blobs
    for i, op in enumerate(step.ops):
        touched = [blobs[name].storage for name in (*op.inputs, *op.outputs)] if op.phase == "update" else ()
        to = next((parked[s] for s in touched if s in parked and blobs[s].role in STATE_ROLES), None)
        if to is not None:
            ops[i] = to
    if not ops:
        raise PassError(
            f"{by}: update_there moves updates of parked state, and no update uses what is parked",
            fix="name the optimizer's state, such as '**.exp_avg', or leave update_there out",
        )
    moved = list(step.ops)
    order = _by_gradients(program, sorted(ops))
    for i, at in zip(order, sorted(ops), strict=True):
        moved[at] = step.ops[i].on(ops[i], by)
    ops = {at: moved[at].device for at in ops}
    step = step.with_(ops=tuple(moved))
    crossing = _Crossing(step, program.dims, ops)
    state = {s: to for s, to in crossing.state() if s not in parked}
    params = {s: trip for s, trip in crossing.params() if s not in parked and s not in state}
    return Updates(step, ops, state, dict(crossing.gradients()), params)


def _by_gradients(program: Program, updates: Sequence[int]) -> Sequence[int]:
    """Operators in the order in which what they read is made, as gradients are from the last module to the first. Small
    ones come last, since their copies wait for each other. Operators stay as they are where another order would change
    what one of them reads."""
    step, dims = program.step, program.dims
    first, last = updates[0], updates[-1]
    used, written = Counter[str](), set[str]()
    for op in step.ops[first : last + 1]:
        reads, writes = touches(op, step.blobs)
        used.update({*reads, *writes})
        written |= writes
    own = {s for i in updates for storages in touches(step.ops[i], step.blobs) for s in storages}
    if any(used[storage] > 1 for storage in own & written):
        return updates
    made = {name: i for i, op in enumerate(step.ops[:first]) for name in op.outputs}

    def turn(i: int) -> tuple[bool, int]:
        inputs = step.ops[i].inputs
        small = all(dense_nbytes(step.blobs[name], dims) < SMALL for name in inputs)
        return small, max([made.get(name, -1) for name in inputs])

    return sorted(updates, key=turn)


class _Crossing:
    """What operators of the update use where they run.

    Attributes:
        ops: the device of each, by its position.
        made: by blob, the operator that makes it; of blobs that nobody overwrites.
    """

    def __init__(self, step: Net, dims: Dims, ops: Mapping[int, Device]) -> None:
        self.step, self.dims, self.ops = step, dims, ops
        self.made = {name: i for i, op in enumerate(step.ops) for name in op.outputs}
        for op in step.ops:
            for output, _ in op.effects.writes:
                self.made.pop(step.blobs[op.outputs[output]].storage, None)

    def state(self) -> Iterator[tuple[str, Device]]:
        """State of the gpus that these operators use and no others, and where they run."""
        blobs, used = self.step.blobs, dict[str, Device | None]()
        for i, op in enumerate(self.step.ops):
            to = self.ops.get(i)
            for storage in {blobs[name].storage for name in (*op.inputs, *op.outputs)}:
                used[storage] = to if used.get(storage, to) == to else None
        for storage, to in used.items():
            if to is not None and blobs[storage].role in STATE_ROLES and not blobs[storage].device.is_host:
                yield storage, to

    def gradients(self) -> Iterator[tuple[str, Device]]:
        """What is made elsewhere and read whole."""
        for i, to in self.ops.items():
            for name in self.step.ops[i].inputs:
                storage = self.step.blobs[name].storage
                if storage in self.made and self.crosses(storage, to) and self.nbytes(name) == self.nbytes(storage):
                    yield storage, to

    def params(self) -> Iterator[tuple[str, tuple[Device, int, int]]]:
        """What is overwritten and lives elsewhere: it goes there when the last operand that is made has been made."""
        for i, to in self.ops.items():
            op, blobs = self.step.ops[i], self.step.blobs
            ready = max([self.made.get(blobs[name].storage, -1) for name in op.inputs])
            for _, source in op.effects.writes:
                storage = blobs[op.inputs[source]].storage
                if ready >= 0 and storage == op.inputs[source] and self.crosses(storage, to):
                    yield storage, (to, ready + 1, i + 1)

    def crosses(self, storage: str, to: Device) -> bool:
        """Whether a storage is elsewhere and too large to be one of several that cross at a time."""
        return self.step.blobs[storage].device != to and self.nbytes(storage) >= SMALL

    def nbytes(self, name: str) -> int:
        return dense_nbytes(self.step.blobs[name], self.dims)
