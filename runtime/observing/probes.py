"""Probes: what an executor calls at the boundaries of instructions, where a step is observed.

An executor runs a second form of its step then, made when it is first asked for, so that a step that nobody observes
pays nothing::

    begin(7); v3 = c1(v2); end(7, (v2, ), (v3, ))          # run fc1 = aten.relu(fc0)

A probe never knows which executor calls it. What time it is on a lane, the executor's clock says: on the host that is
the time now, on a device whose streams run behind the host an event recorded on the lane's stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from graphir.ir.size import Dims

from ..executor import Executor, Feedable, Kept

__all__ = ["Clock", "HostClock", "Observable", "Probe", "Probes"]


class Probe(Protocol):
    """Called for each instruction that an executor does something for; by several threads at once, each for its lanes.

    An instruction is given by its position in the plan. What several instructions have in common, such as the call
    that makes several optimizer updates, belongs to the first of them. Where lanes are streams, the lane's stream is
    the current one.
    """

    def begin(self, position: int) -> None:
        """The instruction is about to be executed."""

    def end(self, position: int, reads: Sequence[Feedable], makes: Sequence[Tensor]) -> None:
        """It has been executed.

        Args:
            position: of the instruction.
            reads: the operator's operands, in the order of ``op.reads``; those that it overwrites hold what it wrote.
            makes: what it made, in the order of ``op.makes``; of a collective this part's result alone.

        Raises:
            RunError: the step must not go on.
        """


class Clock(Protocol):
    """Points in time on the lanes of an executor."""

    def mark(self, lane: str) -> Any:
        """This moment in the lane's order."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """The time of each mark after the step is finished, on one scale that begins anywhere."""


class HostClock:
    """The clock of lanes that are the host's threads."""

    def mark(self, lane: str) -> float:
        """Seconds."""
        return time.perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """As they are."""
        return list(marks)


class Observable(Executor, Protocol):
    """An executor whose steps can be observed; they give the same bits."""

    @property
    def clock(self) -> Clock:
        """Of its lanes."""

    def kept(self) -> Kept:
        """The receive buffers that it keeps from step to step; none where every copy takes memory of its own."""

    def run_observed(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe) -> Sequence[Tensor]:
        """One step, as ``run``, with calls of *probe*."""


class Probes:
    """Several probes as one: the last begins last and ends first, so that it sees the least of the others."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes, self.inward = tuple(probes), tuple(reversed(probes))

    def begin(self, position: int) -> None:
        """See :class:`Probe`."""
        for probe in self.probes:
            probe.begin(position)

    def end(self, position: int, reads: Sequence[Feedable], makes: Sequence[Tensor]) -> None:
        """See :class:`Probe`."""
        for probe in self.inward:
            probe.end(position, reads, makes)
