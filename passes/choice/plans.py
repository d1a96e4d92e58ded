"""What a choice comes to as a plan: the passes that make it, what each device holds, and how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from graphir.analysis.estimate import estimated
from graphir.analysis.execution import ONE_THREAD, THREADS, streams_of
from graphir.analysis.memory import memory
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.errors import PassError
from graphir.ir.device import Device
from graphir.ir.program import Program

from ..base import build
from ..copies import InjectCopies
from ..emit import instructed
from ..pipeline import PipelineSchedule
from .groups import Grouped
from .moves import placed
from .problem import Choice

__all__ = ["Emitted", "Plans"]


class Emitted(NamedTuple):
    """A choice that was made.

    Attributes:
        program: placed.
        then: the passes that come next, as text.
        peaks: by device, what its plan holds; nothing where it was not emitted.
        seconds: of a step.
    """

    choice: Choice
    program: Program
    then: str
    peaks: Mapping[str, int] = {}
    seconds: float = 0.0


class Plans:
    """Plans of one program.

    Args:
        program: that is placed.
        limits: by device, within which its micro-batches flow.
        topology: where it would run.
        named: the topology that was asked for, which the order of micro-batches is to be found for again; None: the
            machine at hand.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.
        flows: whether it has several micro-batches.
    """

    def __init__(
        self,
        program: Program,
        limits: Mapping[Device, int],
        topology: Topology,
        named: Topology | None,
        profile: Profile | None,
        threads: int,
        flows: bool,
    ) -> None:
        self.program, self.limits, self.topology = program, limits, topology
        self.named, self.profile, self.threads, self.flows = named, profile, threads, flows
        self.now: Emitted | None = None

    def of(self, grouped: Grouped, choice: Choice) -> Emitted:
        """A choice made, and what its plan comes to; that of the program as it is, whatever its groups, once."""
        if choice != grouped.problem.now():
            return self.made(grouped, choice)
        if self.now is None:
            self.now = self.made(grouped, choice)
        return self.now._replace(choice=choice)

    def made(self, grouped: Grouped, choice: Choice) -> Emitted:
        """The same, anew."""
        program = placed(self.program, grouped, choice)
        copied, then = InjectCopies().recorded(program), str(InjectCopies())
        if self.flows:
            copied, then = self.flowing(copied, then)
        plan = instructed(copied)
        executions = (streams_of(self.topology),) if self.topology.host is None else (ONE_THREAD, THREADS)
        peaks = memory(plan, threads=self.threads, profile=self.profile).peak
        seconds = min(
            estimated(plan, self.topology, execution, plan.dims, self.profile, self.threads).seconds
            for execution in executions
        )
        return Emitted(choice, program, then, {str(device): n for device, n in peaks.items()}, seconds)

    def flowing(self, copied: Program, then: str) -> tuple[Program, str]:
        """A program in the order in which its micro-batches flow within the limits, and the passes so far; in its own
        order where nothing flows, or none keeps within them."""
        used = {str(device) for device in copied.devices}
        limits = {str(device): limit for device, limit in self.limits.items() if str(device) in used}
        order = build(PipelineSchedule, limits=limits, topology=self.named)
        try:
            order.require_order(copied)
            found = order.ordered(copied, warns=False, place=self.topology)
        except PassError:
            return copied, then
        return found.with_(history=(*copied.history, str(order))), f"{then} | {order}"
