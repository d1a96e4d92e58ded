"""What executes the steps of one plan on a session's state.

A session has one for its plan, and one for each number of replicas to which a short batch has given rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from graphir.analysis.estimate import Estimate, estimated
from graphir.analysis.profile_files import cached
from graphir.ir.device import Device
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.size import Dims

from .executor import OnDevices, Setting
from .executors.choice import HOST_ONLY, Choice, choose, execution_of
from .interface.gather import Gather
from .interface.scatter import Scatter
from .interface.witness import witness_of
from .machine.calibration import host_topology
from .machine.places import generator_on
from .memory_limit import MemoryLimit, PlanLimits
from .observing.finite import FiniteWatch
from .observing.measurement import Measurement
from .observing.observed import Observed
from .observing.probes import Observable
from .observing.report import Report, report
from .options import Options
from .param_groups import ParamGroups
from .state import State

__all__ = ["Common", "Stepping"]


class Common(NamedTuple):
    """What the plans of one session have in common.

    Attributes:
        state: what their steps read and overwrite.
        groups: the numbers of the next step.
        places: the real device of each logical one.
        options: what the session was asked for.
        intraop: how many threads one kernel may use.
        witness: the program that was captured; None: steps are not compared with the module's.
        check_finite: whether a step stops at the first operator that makes NaN or infinities.
        limits: what the plans may hold on logical devices; None: any number of bytes.
    """

    state: State
    groups: ParamGroups
    places: Mapping[Device, torch.device]
    options: Options
    intraop: int
    witness: Program | None
    check_finite: bool
    limits: PlanLimits | None


class Stepping:
    """See :mod:`graphir.runtime.stepping`.

    Args:
        plan: that was admitted.
        common: what it has in common with other plans of the session.
        limit: refuses sizes at which the plan takes too much memory.
    """

    def __init__(self, plan: Plan, common: Common, limit: MemoryLimit) -> None:
        program, (state, groups, places, options, intraop, witness, check_finite, _) = plan.program, common
        self.plan, self._intraop = plan, intraop
        # What holds too much on a logical device may be placed otherwise, so that is said first.
        checks: list[Callable[[Dims], None]] = [] if common.limits is None else [common.limits.check_of(plan)]
        seen = None if witness is None else witness_of(witness, program)
        self._scatter = Scatter(program, places, options.threads, [*checks, limit.check], seen)
        self._gather = Gather(program)
        self._setting = Setting(
            plan,
            state.of_step(),
            (*self._scatter.names, *groups.names),
            places,
            {device: generator_on(place) for device, place in places.items()},
            options.deadline,
        )
        self._choice: Choice = choose(plan, options.executor, places, intraop)
        self._executor: Observable = options.make(self._setting, self._choice)
        self._watch = FiniteWatch(plan) if check_finite else None
        self._measurement: Measurement | None = None
        self._observed: Observed | None = None
        self._observe(None)

    def _observe(self, measurement: Measurement | None) -> None:
        """Let steps be watched, and measured where there is a measurement."""
        watch, self._observed = self._watch, None
        if watch is not None or measurement is not None:
            self._observed = Observed(self._executor, self._setting, watch, measurement)

    def _measure(self) -> None:
        """Measure the steps from now on, and forget what was measured before."""
        self._measurement = Measurement(self._setting, self._executor.clock, self._executor.kept)
        self._observe(self._measurement)

    def _reported(self, measurement: Measurement, places: Mapping[Device, torch.device]) -> Report:
        """The report of steps that were measured here, on these real devices."""
        held = self._executor.ledger() if isinstance(self._executor, OnDevices) else {}
        return report(measurement, places, *self._choice, held, self._predicted(measurement.last_dims))

    def _predicted(self, dims: Dims) -> Estimate | None:
        """What a step of these sizes should take; None where the plan is not on the host alone."""
        if any(place.type != "cpu" for place in self._setting.binding.values()):
            return None
        topology, profile = host_topology(self.plan.step.devices, self._intraop), cached()
        executor = self._choice.executor if self._choice.executor in HOST_ONLY else "serial"
        execution = execution_of(self.plan, executor, topology, self._intraop, profile)
        return estimated(self.plan, topology, execution, dims, profile, self._intraop)
