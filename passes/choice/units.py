"""What moves as a whole: a call of a module that has parameters, on one device, and what goes with it.

What runs behind such a module until the next one begins, such as activations and additions of containers, belongs to
it; what saves much can be units of its own (:mod:`.tails`). Operators of the backward go with the operator whose
gradients they compute, updates with their parameters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import base_name, micro_batch_of, micro_batches
from graphir.ir.operator import Operator
from graphir.ir.opset import ACCUMULATES
from graphir.ir.touches import Numbers

from ..module_patterns import weighted_modules
from .step import Step

__all__ = ["Unit", "Units"]


class Unit(NamedTuple):
    """A module, the device where it is, and which of its calls it is. The state is the first one's. Or a *piece* of
    what a module without parameters computes, by the name of its first result. One that *stays* cannot be moved."""

    device: Device
    module: str
    call: int = 0
    piece: str = ""
    stays: bool = False

    def __str__(self) -> str:
        return self.piece or self.module

    @property
    def named(self) -> bool:
        """Whether the module's path stands for it; else it is moved by its activations."""
        return not self.call and not self.piece

    @property
    def moves(self) -> bool:
        """Whether it can be moved: something names it."""
        return not self.stays and bool(self.module or self.piece)


class Units:
    """The units of a program.

    Args:
        step: of a program that is captured, or replicated; before :func:`.copies.inject_copies`.

    Attributes:
        parts: how many micro-batches there are.
        cut_off: those that were a part of others.
        at: the units, in the order in which their forward begins, with their positions in it.
        of_op: by operator, its unit; None on the host.
        of_state: by number of a storage of state, its unit.
        homes: by device and module that owns state and runs nothing, as ``shared`` of models that tie embeddings, the
            units that its state goes with.
        rank: by operator, the position of its unit; -1 where it has none.

    Raises:
        PassError: no module of the program has parameters.
    """

    def __init__(self, step: Step) -> None:
        program = step.program
        self.step, self.program, self.net = step, program, step.net
        self.parts = micro_batches(self.net.blobs)
        self.weighted = weighted_modules(program) - {""} or {""}  # a model without modules is one that stays
        self.of_op: list[Unit | None] = [None] * len(self.net.ops)
        self.cut_off: frozenset[Unit] = frozenset()
        self.at = {unit: i for i, unit in enumerate(self.place_forward())}
        if not self.at:
            raise PassError(
                f"no module of program {program.name!r} has parameters of its own, so nothing can be moved",
                fix="give the model's layers as modules",
            )
        self.place_rest()
        self.rank = self.ranked()

    def ranked(self) -> Numbers:
        """By operator, the position of its unit."""
        at = self.at
        return np.array([-1 if unit is None else at[unit] for unit in self.of_op], np.int64)

    def place_forward(self) -> list[Unit]:
        """The units of the forward's operators, in the order in which they begin. Each micro-batch calls what the first
        one does; calls of replicas are not told apart."""
        now: dict[str, Unit] = {}
        waiting: list[tuple[int, str]] = []
        order: dict[Unit, None] = {}
        away = self.shown_away()
        calls, part = Counter[tuple[Device, str]](), 0
        for i, op in enumerate(self.net.ops):
            if op.phase != "forward" or op.device.is_host:
                continue
            if op.outputs and (own := micro_batch_of(op.outputs[0])) is not None and own != part:
                calls, part, now = Counter(), own, {}
            key, called = str(op.device), (op.device, op.module)
            if op.module in self.weighted and called not in away:
                if key not in now or now[key][:2] != called:
                    now[key] = Unit(*called, calls[called] if self.program.replicas == ("",) else 0)
                    calls[called] += 1
                order[now[key]] = None
            if key in now:
                self.of_op[i] = now[key]
            else:
                waiting.append((i, key))
        first: dict[str, Unit] = {}
        for unit in order:
            first.setdefault(str(unit[0]), unit)
        for i, key in waiting:
            self.of_op[i] = first.get(key)
        return list(order)

    def shown_away(self) -> set[tuple[Device, str]]:
        """Devices and modules that have nothing but views there, and compute elsewhere: a view of what a module is
        handed is where its storage is."""
        if sum(not device.is_host for device in self.net.devices) < 2:
            return set()
        forward = [op for op in self.net.ops if op.phase == "forward"]
        computing = {(op.device, op.module) for op in forward if not op.effects.shows}
        modules = {module for _, module in computing}
        return {
            called for op in forward if (called := (op.device, op.module)) not in computing and op.module in modules
        }

    def place_rest(self) -> None:
        """The units of state, and of the operators behind the forward."""
        self.of_state: dict[int, Unit] = {}
        self.homes: dict[tuple[Device, str], set[Unit]] = defaultdict(set)
        blobs, ops, numbers = self.net.blobs, self.net.ops, self.step.number
        modules = {unit.module for unit in self.at}
        resting: list[tuple[Device, str, int]] = []
        for name in self.net.external_inputs:
            module = base_name(name).rpartition(".")[0]
            if module not in self.weighted or (blob := blobs[name]).role not in STATE_ROLES:
                continue
            owner = Unit(blob.device, module)
            if owner in self.at:
                self.of_state[numbers[blob.storage]] = owner
            elif module not in modules:
                resting.append((blob.device, module, numbers[blob.storage]))
        for i in np.flatnonzero(~self.step.forward & ~self.step.on_host).tolist():
            op = ops[i]
            unit = self.of_op[i] = self.unit_behind(i, op) or next(
                (self.of_op[k] for k in range(i - 1, -1, -1) if ops[k].device == op.device and self.of_op[k]),
                None,
            )
            if op.phase == "update" and unit is not None:
                for name, storage in zip(op.inputs, self.step.read(i), strict=True):
                    blob = blobs[name]
                    if blob.role in STATE_ROLES and blob.device == op.device:
                        self.of_state.setdefault(storage, unit)
        for device, module, storage in resting:
            unit = self.of_state.get(storage) or self.first_reader(storage)  # what is frozen has no update
            if unit is not None and unit.device == device:
                self.of_state[storage] = unit
                self.homes[device, module].add(unit)

    def first_reader(self, storage: int) -> Unit | None:
        """The unit of the first operator that touches a storage."""
        touches = np.flatnonzero(self.step.storage == storage)
        return self.of_op[self.step.op[touches[0]]] if len(touches) else None

    def unit_behind(self, i: int, op: Operator) -> Unit | None:
        """The unit that an operator of the backward, a reduction or an update goes with."""
        if op.phase == "update":
            read = self.step.read(i)
            for _, source in op.effects.writes:
                if read[source] in self.of_state:
                    return self.of_state[read[source]]
        if op.type == ACCUMULATES and Unit(op.device, op.module) in self.at:
            return Unit(op.device, op.module)  # the reader's, beside what it adds
        if op.of:
            return self.beside(op, self.step.maker(self.net.blobs[op.of].storage))
        for storage in self.step.read(i):
            unit = self.of_state.get(storage) or self.beside(op, self.step.makers[storage])
            if unit is not None:
                return unit
        return None

    def beside(self, op: Operator, made: int) -> Unit | None:
        """The unit of what an operator goes with, if there is one and both are on one device."""
        unit = self.of_op[made] if made >= 0 else None
        return unit if unit is not None and unit.device == op.device else None
