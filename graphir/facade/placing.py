"""Several programs of one model, one captured after the other, each placed within the same limits.

State is shared by all of their plans, so what the first placement has moved stays there::

    the first           balance ──▶ modules, what is parked, what is computed again, optimizer state that is parked
    later ones          modules as before ──balance──▶ what is parked, what is computed again
    with parked state   as the first
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias

import torch

from graphir.passes import Balanced, Pipeline
from graphir.passes.balance import Balance
from graphir.passes.base import build
from graphir.passes.choice.asked import OPTIONS, Option
from graphir.passes.choice.naming import patterns
from graphir.passes.pipeline import PipelineSchedule
from graphir.passes.shift_modules import ShiftModules
from graphir.runtime.machine.here import here
from graphir.runtime.machine.places import Binding
from graphir.runtime.memory_limit import PlanLimits

from ..analysis.profile_files import profile_of
from ..analysis.topology import Topology
from ..errors import GraphirError, PassError, after_last
from ..ir.device import Device, DeviceName
from ..ir.module_patterns import lineage
from ..ir.names import base_name
from ..ir.plan import Plan
from ..ir.program import Program
from ..ir.text import nbytes_text

__all__ = ["Placing"]

_LATER: Final = tuple([option for option in OPTIONS if option != "state"])
"""What may be done with later programs: plans share optimizer state, so that none parks some that others have at home.
"""

Going: TypeAlias = "tuple[tuple[Device, Device], ...]"
"""Of each device that a module is on, one for each replica, the device to which it goes."""


class Placing:
    """Places programs of one model within limits.

    Args:
        limits: by device, the most that a plan may hold there, as :func:`graphir.passes.balance` takes them. ``auto``
            is asked once, before this process holds any of the model's state there.
        topology: where, as :func:`graphir.passes.balance` takes it; by default this machine, its devices bound by
            *binding*.
        binding: as a session takes it.
        shares: whether the first placement also chooses the shares of the batch.
        options: what may be done, as :func:`graphir.passes.balance` takes them.

    Attributes:
        limits: by device, in bytes; ``auto`` until the first program is placed.
        balanced: the placement that was kept last.

    Raises:
        PassError: these are no limits, or this is no topology.
    """

    def __init__(
        self,
        limits: Mapping[DeviceName, int | str] | Literal["auto"],
        topology: Topology | str | None = None,
        binding: Binding = "auto",
        shares: bool = False,
        options: Sequence[Option] = OPTIONS,
    ) -> None:
        given = build(Balance, limits=limits, topology=topology, options=options)
        self.limits: Mapping[str, int] | Literal["auto"] = given.limits
        self._topology, self._binding = given.topology, binding
        self._options: tuple[Option, ...] = (*given.options, *(("shares",) if shares else ()))
        self.balanced: Balanced | None = None
        self._homes: dict[str, Device] = {}
        self._away: set[str] = set()

    def placed(self, program: Program) -> Balanced:
        """A program within the limits, its modules where the kept placements have them.

        Raises:
            PassError: no placement within the limits is found.
        """
        if self.balanced is None:
            found = self._balance(program, options=self._options)
            self._away = set(_parked(program, found.program))
            return found
        if self._away.intersection(program.step.external_inputs):
            return self._balance(program, like=self.balanced.pipeline)
        kept = _kept(program, self._homes)
        try:
            if len(program.replicas) == 1:
                return self._balance(program, pin={path: str(to) for path, going in kept.items() for _, to in going})
            # A pin names one device, and these modules are on one for each replica.
            moves = {path: {str(s): str(t) for s, t in going if s != t} for path, going in kept.items()}
            moves = {path: to for path, to in moves.items() if to}
            moved = build(ShiftModules, modules=moves)(program) if moves else program
            found = self._balance(moved, options=("park", "recompute", "share_storage"))
            return replace(found, pipeline=" | ".join(found.program.history[len(program.history) :]))
        except PassError as e:
            where = "a later capture, whose modules stay where the first one has them"
            raise PassError(e.what, at=e.at, where=where, fix=e.fix) from None

    def _balance(self, program: Program, like: str = "", **options: object) -> Balanced:
        place, threads = self._place(program)
        remedy = "" if self.balanced is None else "compile the model at its largest sizes first"
        asked: dict[str, object] = {"limits": self.limits, "topology": self._topology, "devices": self._bound()}
        later = [option for option in self._options if option in _LATER]
        given = {"options": later, **asked, **options}
        found = build(Balance, **given).balanced(program, "cached", threads, remedy, place, like)
        if self.limits == "auto":
            self.limits = found.limits
            limits = ", ".join([f"{device} {nbytes_text(most)}" for device, most in found.limits.items()])
            print(f"limits of {program.name!r} on {found.machine}: {limits}", file=sys.stderr)
        return found

    def _place(self, program: Program) -> tuple[Topology, int]:
        """Where a program would run, and in how many threads one kernel.

        Raises:
            PassError: this machine lacks a device.
        """
        threads = torch.get_num_threads()
        named = self._bound() if self.limits == "auto" else self.limits
        try:
            devices, free = [*program.devices, *named], self.limits == "auto"
            return self._topology or here(devices, threads=threads, binding=self._binding, free=free), threads
        except GraphirError as e:
            raise PassError(e.what, where=e.where, fix=e.fix) from None

    def _bound(self) -> tuple[DeviceName, ...]:
        """The devices that may be used where limits name none: those that are bound one by one, if they are."""
        one_by_one = isinstance(self._binding, Mapping) and self._topology is None and self.limits == "auto"
        return tuple(self._binding) if one_by_one else ()

    def binding_of(self, plan: Plan) -> Binding:
        """What a session of a plan binds: of devices that are bound one by one, those that are in use."""
        if not isinstance(self._binding, Mapping):
            return self._binding
        unused = set(self.limits) - set(plan.devices)
        return {device: place for device, place in self._binding.items() if Device.parse(device) not in unused}

    def limits_of(self, plan: Plan) -> PlanLimits:
        """The limits, for a session of a plan that keeps within them.

        Raises:
            PassError: it does not, after other passes.
        """
        place, threads = self._place(plan.program)
        assert self.limits != "auto"  # a program was placed
        limits = PlanLimits(self.limits, threads, profile_of(place))
        if over := limits.over(plan, plan.dims):
            raise PassError(
                f"the plan holds {over}",
                where=f"plan {plan.name!r}{after_last(plan.program.history)}",
                fix="leave out passes that move things behind balance, or give more",
            )
        return limits

    def followed(self, found: Balanced) -> Program:
        """A placed program with the passes that come next, where there are more than those that put copies in: in the
        order in which its micro-batches flow, and with shared storage."""
        first, *others = Pipeline(found.then).passes
        program = first.recorded(found.program) if others else found.program
        for one in others:
            if isinstance(one, PipelineSchedule):
                ordered = one.ordered(program, self._place(program)[0])
                program = ordered.with_(history=(*program.history, str(one)))
            else:
                program = one.recorded(program)
        return program

    def keep(self, found: Balanced) -> None:
        """Let later programs have their modules where this placement has them."""
        self.balanced = found
        for name, device in _state(found.program):
            self._homes.setdefault(name, device)


def _state(program: Program) -> Iterator[tuple[str, Device]]:
    """The parameters and buffers of a program that are on gpus, and where."""
    for name in program.step.external_inputs:
        blob = program.step.blobs[name]
        if blob.role in ("param", "buffer") and not blob.device.is_host:
            yield name, blob.device


def _parked(program: Program, placed: Program) -> Iterator[str]:
    """The optimizer state of a program that is beside its parameter, and in the placed one elsewhere."""
    for name in program.step.external_inputs:
        of = name.rpartition(".")[0]
        if program.step.blobs[name].role == "state" and of in program.step.external_inputs:
            before, after = program.step.blobs, placed.step.blobs
            if before[name].device == before[of].device and after[name].device != after[of].device:
                yield name


def _kept(program: Program, homes: Mapping[str, Device]) -> dict[str, Going]:
    """By pattern, modules all of whose state goes the same way to be at home, and which way; what is new has none."""
    targets: dict[str, dict[Device, Device | None]] = defaultdict(dict)
    for name, device in _state(program):
        targets[base_name(name).rpartition(".")[0]][device] = homes.get(name)
    inside: dict[str, set[object]] = defaultdict(set)
    for module, to in targets.items():
        for path in lineage(module):
            inside[path].add(tuple(to.items()))
    alike: dict[Going, dict[str, None]] = defaultdict(dict)
    for module, to in targets.items():
        going = tuple([(source, target) for source, target in to.items() if target is not None])
        outermost = next((path for path in lineage(module) if len(inside[path]) == 1), None)
        if outermost is not None and going:
            alike[going][outermost] = None
    return {pattern: going for going, paths in alike.items() for pattern in patterns(list(paths))}
