"""Several programs of one model, one captured after the other, each placed within the same limits.

State is shared by all of their plans, so what the first placement has moved stays there::

    the first           balance ──▶ modules, what is parked, what is computed again
    later ones          modules as before ──balance──▶ what is parked, what is computed again
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from graphir.passes import Balanced, Pipeline
from graphir.passes.balance import Balance
from graphir.passes.base import build
from graphir.passes.choice.naming import patterns
from graphir.passes.shift_modules import ShiftModules
from graphir.runtime.memory_limit import PlanLimits

from .analysis.profile_files import profile_of
from .analysis.topology import Topology
from .errors import PassError, after_last
from .estimate import machine_of
from .ir.device import Device, DeviceName
from .ir.module_patterns import lineage
from .ir.names import base_name
from .ir.plan import Plan
from .ir.program import Program

__all__ = ["Placing", "flowing"]

Going: TypeAlias = "tuple[tuple[Device, Device], ...]"
"""Of each device that a module is on, one for each replica, the device to which it goes."""


class Placing:
    """Places programs of one model within limits, on this machine if it has these devices, else on ``h200x8``.

    Args:
        limits: by device, the most that a plan may hold there, as :func:`graphir.passes.balance` takes them.

    Attributes:
        limits: by device, in bytes.
        balanced: the placement that was kept last.

    Raises:
        PassError: these are no limits.
    """

    def __init__(self, limits: Mapping[DeviceName, int | str]) -> None:
        self.limits: Mapping[str, int] = build(Balance, limits=limits).limits
        self.balanced: Balanced | None = None
        self._homes: dict[str, Device] = {}

    def placed(self, program: Program) -> Balanced:
        """A program within the limits, its modules where the kept placements have them.

        Raises:
            PassError: no placement within the limits is found.
        """
        if self.balanced is None:
            return self._balance(program)
        kept = _kept(program, self._homes)
        try:
            if len(program.replicas) == 1:
                return self._balance(program, pin={path: str(to) for path, going in kept.items() for _, to in going})
            # A pin names one device, and these modules are on one for each replica.
            moves = {path: {str(s): str(t) for s, t in going if s != t} for path, going in kept.items()}
            moves = {path: to for path, to in moves.items() if to}
            moved = build(ShiftModules, modules=moves)(program) if moves else program
            found = self._balance(moved, options=("park", "recompute"))
            return replace(found, pipeline=" | ".join(found.program.history[len(program.history) :]))
        except PassError as e:
            where = "a later capture, whose modules stay where the first one has them"
            raise PassError(e.what, at=e.at, where=where, fix=e.fix) from None

    def _balance(self, program: Program, **options: object) -> Balanced:
        place, threads = self._place(program)
        if missing := next((device for device in self.limits if device not in place.devices), None):
            raise PassError(
                f"limits name {missing}, which neither this machine nor {place.name} has",
                fix=f"limits can name {', '.join(list(place.devices)[:10])}",
            )
        # Nothing else that balance takes is for users of compile to choose.
        remedy = "compile the model at its largest sizes first" if options else "name more devices in limits"
        return build(Balance, limits=self.limits, topology=place, **options).balanced(
            program, profile_of(place), threads, remedy
        )

    def _place(self, program: Program) -> tuple[Topology, int]:
        """Where a program would run, and in how many threads one kernel."""
        threads = torch.get_num_threads()
        devices = [*program.devices, *map(Device.parse, self.limits), Device.parse("cpu")]
        return machine_of(list(dict.fromkeys(devices)), threads), threads

    def limits_of(self, plan: Plan) -> PlanLimits:
        """The limits, for a session of a plan that keeps within them.

        Raises:
            PassError: it does not, after other passes.
        """
        place, threads = self._place(plan.program)
        limits = PlanLimits(self.limits, threads, profile_of(place))
        if over := limits.over(plan, plan.dims):
            raise PassError(
                f"the plan holds {over}",
                where=f"plan {plan.name!r}{after_last(plan.program.history)}",
                fix="leave out passes that move things behind balance, or give more",
            )
        return limits

    def keep(self, found: Balanced) -> None:
        """Let later programs have their modules where this placement has them."""
        self.balanced = found
        for name, device in _state(found.program):
            self._homes.setdefault(name, device)


def flowing(found: Balanced) -> Program:
    """A placed program, in the order in which its micro-batches flow where they do."""
    return Pipeline(found.then)(found.program) if found.flows else found.program


def _state(program: Program) -> Iterator[tuple[str, Device]]:
    """The parameters and buffers of a program that are on gpus, and where."""
    for name in program.step.external_inputs:
        blob = program.step.blobs[name]
        if blob.role in ("param", "buffer") and not blob.device.is_host:
            yield name, blob.device


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
