"""Let micro-batches flow through layers that are on several devices: nothing but another order of the operators.

As captured, a step takes one micro-batch after the other, and of each one device after the other. In another order that
keeps to the same hazards, a device works on one micro-batch while another device works on the next::

    as captured    gpu:0  0         0 1         1
                   gpu:1    0 0         1 1

    zero bubble    gpu:0  0 1 2 3 0 1 0 2 1 3 2 3        forward, what gpu:0 is waited for, gradients of parameters
                   gpu:1    0 0 1 1 2 2 3 3 0 1 2 3

GPipe (Huang et al., 2019), 1F1B (Narayanan et al., 2019) and zero bubble (Qi et al., 2024) are three rankings of what a
device could do next (:mod:`.list_schedule`). There is no table of stages: any cut will do, with several parts of the
model on one device, unlike devices, and replicas side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from graphir.analysis.element_types import refuse_element_types
from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError, PipelineWarning, nearest, warn
from graphir.ir.device import DeviceName
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.text import nbytes_text

from .base import OptionError, Pass, build, register
from .limits import Limits
from .list_schedule import RANKS, UNBEATEN, Beaten, Rules, Schedule, list_schedule
from .machines import Machine
from .micro_work import FORWARD, Work
from .pipeline_needs import Need, comes_back, most_in_flight, needs_of
from .plan_peaks import PlanPeaks
from .standing import Order

__all__ = ["PipelineSchedule", "Schedules", "pipeline"]

Schedules: TypeAlias = Literal["zero_bubble", "1f1b", "gpipe"]

_LESS: Final = (0.0, 0.0, 0.01, 0.03)
"""Of each simulation within limits, by how much of itself a limit is less at least, if the one before has exceeded it:
it is less by what exceeded it."""

_MORE: Final = 2
_WORTHWHILE: Final = 0.97
"""Where a forward comes back to a device, it waits there for others: up to so many more micro-batches are let in, each
if the step becomes shorter than this share."""


def _known_schedule(given: Any) -> Any:
    if given not in get_args(Schedules):
        known = ", ".join(map(repr, get_args(Schedules)))
        raise OptionError(f"unknown schedule {given!r}{nearest(given, get_args(Schedules))}", fix=f"schedules: {known}")
    return given


def _at_least_one(given: Any) -> Any:
    if given is not None and (type(given) is not int or given < 1):
        raise OptionError(f"{given!r} micro-batches cannot be in flight", fix="give a whole number from 1 up")
    return given


@register
class PipelineSchedule(Pass):
    """See :func:`pipeline`."""

    name: ClassVar[str] = "pipeline"
    only_behind: ClassVar[Order] = {
        "micro-batched": "there is nothing to overlap",
        "moved": "there is nothing to overlap",
        "crossing": "its order is that of the operators and the copies",
    }

    schedule: Annotated[Schedules, BeforeValidator(_known_schedule)] = "zero_bubble"
    limits: Limits | None = None
    in_flight: Annotated[int | None, BeforeValidator(_at_least_one)] = None
    topology: Machine = None

    def rewrite(self, program: Program) -> Program:
        return self.ordered(program, warns=True)

    def ordered(self, program: Program, *, warns: bool, place: Topology | None = None) -> Program:
        """The program in the order of the schedule.

        Args:
            program: with several micro-batches.
            warns: whether it warns of what holds micro-batches together.
            place: the machine at hand, where no topology was given and the caller knows it.
        """
        net, devices = program.step, program.step.devices
        try:
            place = self.topology or place or Topology.here(devices)
            for device in devices:
                place.speed(device)
            refuse_element_types(net, place, devices)
            work = Work(program, micro_batches(net.blobs), place, in_place=self.limits is None)
        except GraphirError as e:
            raise PassError(f"pipeline: {e.what}", at=e.at, where=e.where, fix=e.fix) from None
        if warns:
            _warn_of_waiting(work)
        return _Ordering(program, work, self).run()


def pipeline(
    program: Program,
    schedule: Schedules = "zero_bubble",
    *,
    limits: Mapping[DeviceName, int | str] | None = None,
    in_flight: int | None = None,
    topology: Topology | str | None = None,
) -> Program:
    """The program in an order in which devices work on several micro-batches at a time. Changes no value.

    For programs that were captured with ``accumulate``, after :func:`inject_copies` and before :func:`share_storage`.
    The order is found by a simulation at the captured sizes; it holds for any size. Operators and copies take in it
    what the devices and links of the machine say; on threads of one host, which are alike, nominal costs, so that
    every process finds the same order.

    Args:
        program: with several micro-batches, whose layers are on several devices.
        schedule: ``"gpipe"``: all forwards first, which holds every micro-batch's activations at once. ``"1f1b"``:
            backwards first, with only as many micro-batches in flight as keep the busiest device busy.
            ``"zero_bubble"``: gradients that other devices wait for first, then forwards; gradients of parameters fill
            what would be idle.
        limits: by device, the most that the plan may hold, as ``{"gpu:0": "24 MiB"}`` or in bytes: the peak of
            ``graphir.memory(plan)`` at the captured sizes, with inputs, state and scratch. By default none for 1F1B and
            GPipe; for zero bubble, on every gpu, what the simulation of 1F1B takes on the fullest one, which may differ
            from a plan's peak by a few copies. ``{}`` is no limit.
        in_flight: how many micro-batches may be on a device at a time, begun and not done; as 1F1B finds it, and any
            number for the others, by default.
        topology: how fast devices and links are: a topology, or the name of one; by default this machine, as
            :meth:`.Topology.here` has it.

    Raises:
        PassError: the program has one micro-batch, nothing was moved, copies are missing, the schedule or a device of
            *limits* is unknown, *in_flight* is below 1, the topology lacks a device or a link, this machine a card, or
            no order keeps within the limits; says the least that one does. Nothing has changed then.

    Warns:
        PipelineWarning: an operator of one micro-batch's forward has to wait for the backward of an earlier one; names
            the storage by which it does.
    """
    options = {"schedule": schedule, "limits": limits, "in_flight": in_flight, "topology": topology}
    return build(PipelineSchedule, **options)(program)


class _Ordering:
    """The search for an order within limits.

    Attributes:
        measured: the peaks of plans, by the order of their operators.
    """

    def __init__(self, program: Program, work: Work, options: PipelineSchedule) -> None:
        self.program, self.work, self.options = program, work, options
        self.measured: dict[tuple[int, ...], Mapping[str, int]] = {}

    def run(self) -> Program:
        schedule, limits = self.options.schedule, self.options.limits
        if limits is None and schedule == "zero_bubble":
            return self.within_1f1b()
        if not limits:
            return self.ordered(self.unbeaten(schedule).order)
        self.refuse_unknown(limits)
        return self.within(schedule, limits)

    def unbeaten(
        self, schedule: str, limits: Sequence[int | None] | None = None, in_flight: int | None = None
    ) -> Schedule:
        """What a schedule gives."""
        found = self.found(schedule, limits, in_flight)
        assert found is not None  # nothing beats it
        return found

    def found(
        self,
        schedule: str,
        limits: Sequence[int | None] | None = None,
        in_flight: int | None = None,
        beaten: Beaten = UNBEATEN,
    ) -> Schedule | None:
        """What a schedule gives, unless it is beaten."""
        work, ranks = self.work, RANKS[schedule]
        needs = None if limits is None else self.needs
        given = in_flight or self.options.in_flight
        finishes = schedule == "1f1b"
        if given or not finishes:
            most = [given] * len(work.devices) if given else None
            return list_schedule(work, Rules(ranks, most, limits, finishes), needs, beaten)
        most = most_in_flight(work)
        best = list_schedule(work, Rules(ranks, most, limits, finishes), needs, beaten)
        for more in range(1, _MORE + 1) if best is not None and comes_back(work) else ():
            assert best is not None
            worth = Beaten(seconds=_WORTHWHILE * best.seconds)
            other = list_schedule(work, Rules(ranks, [n + more for n in most], limits, finishes), needs, worth)
            if other is None:
                break
            best = other
        return best

    @cached_property
    def needs(self) -> list[Need]:
        """What the micro-batches need."""
        return needs_of(self.work)

    def ordered(self, order: Sequence[int]) -> Program:
        """The program with its operators in this order."""
        net = self.program.step
        ops = tuple([net.ops[i] for i in order])
        blobs = {name: net.blobs[name] for name in net.external_inputs}
        blobs.update([(name, net.blobs[name]) for op in ops for name in op.outputs if name not in blobs])
        # Copies stand where they are due: one issued earlier lets a lane wait that could compute, and takes a second
        # receive buffer.
        return self.program.with_(step=net.with_(ops=ops, blobs={**blobs, **net.blobs}), ahead=0)

    def within_1f1b(self) -> Program:
        """Zero bubble, on no gpu with more than 1F1B takes on the fullest one: 1F1B itself where that cannot be."""
        plain, devices = self.found("1f1b"), self.work.devices
        assert plain is not None and plain.peaks is not None
        peaks = [peak for device, peak in zip(devices, plain.peaks, strict=True) if device.startswith("gpu")]
        limits = [max(peaks) if device.startswith("gpu") else None for device in devices]
        for found, held in self.tightened("zero_bubble", limits, _simulated, Beaten(plain.seconds)):
            if _within(held, limits) and found.seconds < plain.seconds:
                return self.ordered(found.order)
        return self.ordered(plain.order)

    def within(self, schedule: str, limits: Mapping[str, int]) -> Program:
        """The program in the order of a schedule, or of a plainer one, whose plan keeps within the limits."""
        found = self.fitting(schedule, limits)
        if found is not None:
            return self.ordered((self.faster(found, limits) if schedule == "zero_bubble" else found).order)
        least = self.least(schedule, limits)
        device = next(iter(least))
        raise PassError(
            f"no order by {schedule!r} of the micro-batches keeps within {nbytes_text(limits[device])} on {device}",
            where=f"program {self.program.name!r}",
            fix=f"the least that can is limits={{{', '.join(f'{d!r}: {n}' for d, n in least.items())}}}",
        )

    def fitting(self, schedule: str, limits: Mapping[str, int]) -> Schedule | None:
        """The first of the attempts whose plan keeps within the limits."""
        tried = self.attempts(schedule, limits)
        return next((found for found in tried if not _excess(self.peaks(found.order), limits)), None)

    def least(self, schedule: str, limits: Mapping[str, int]) -> Mapping[str, int]:
        """By device whose limit is too small, one with which the schedule has an order: what the nearest order so far
        holds, if that one or another is found with it. The last attempts do not depend on limits."""
        needed = [
            {device: peaks[device] for device, limit in limits.items() if peaks[device] > limit}
            for peaks in sorted(self.measured.values(), key=lambda peaks: _excess(peaks, limits))
        ]
        return next(more for more in needed if self.fitting(schedule, {**limits, **more}) is not None)

    def attempts(self, schedule: str, limits: Mapping[str, int], beaten: Beaten = UNBEATEN) -> Iterator[Schedule]:
        """Schedules to try that are not beaten, the fastest first: the one without limits, if it keeps within them all
        the same. A plan issues copies and frees in an order of its own, and what is let in can come to more than was
        reckoned: where a limit is exceeded, the next simulation is given less."""
        most = [limits.get(device) for device in self.work.devices]
        free = self.found(schedule, [None for _ in most], beaten=Beaten(beaten.seconds, most))
        if free is not None:
            yield free
        for found, _ in self.tightened(schedule, most, self.planned, beaten):
            yield found
        for limited, in_flight in ((most, None), (None, 1)):
            if schedule == "1f1b" and limited:
                continue
            plainer = self.found("1f1b", limited, in_flight, beaten)
            if plainer is not None:
                yield plainer
        if beaten is UNBEATEN:
            yield Schedule(_one_after_the_other(self.work), math.inf)

    def tightened(
        self,
        schedule: str,
        limits: Sequence[int | None],
        peaks: Callable[[Schedule], Sequence[int]],
        beaten: Beaten = UNBEATEN,
    ) -> Iterator[tuple[Schedule, Sequence[int]]]:
        """A schedule and its *peaks*, as long as it is not beaten; of a device that exceeds its limit, the next
        simulation is given less."""
        inner = list(limits)
        simulated: Sequence[int] = [0 for _ in inner]
        held = simulated
        for share in _LESS:
            for d, (limit, given) in enumerate(zip(limits, inner, strict=True)):
                if limit is not None and given is not None and held[d] > limit:
                    less = min(given, simulated[d]) - (held[d] - limit)
                    inner[d] = min(less, int((1 - share) * limit))
            found = self.found(schedule, inner, beaten=beaten)
            if found is None:
                return
            simulated, held = _simulated(found), peaks(found)
            yield found, held

    def faster(self, found: Schedule, limits: Mapping[str, int]) -> Schedule:
        """What was found, or 1F1B within the limits where that takes less time: zero bubble lets in by what it needs at
        most, and where little room is left, that may be one micro-batch less."""
        for plain in self.attempts("1f1b", limits, Beaten(found.seconds)):
            if plain.seconds < found.seconds and not _excess(self.peaks(plain.order), limits):
                return plain
        return found

    @cached_property
    def plans(self) -> PlanPeaks:
        """What the program's plans hold."""
        return PlanPeaks(self.work)

    def planned(self, found: Schedule) -> Sequence[int]:
        """The most bytes on each device, as predicted for the plan of a schedule."""
        return list(self.peaks(found.order).values())

    def peaks(self, order: Sequence[int]) -> Mapping[str, int]:
        """The most bytes on each device, as predicted for the plan."""
        found = self.measured.get(key := tuple(order))
        if found is None:
            found = self.measured[key] = self.plans.of(order)
        return found

    def refuse_unknown(self, limits: Mapping[str, int]) -> None:
        for device in limits:
            if device not in self.work.devices:
                raise PassError(
                    f"limits has {device!r}, on which the step has nothing",
                    where=f"program {self.program.name!r}",
                    fix=f"its devices: {', '.join(self.work.devices)}",
                )


def _excess(peaks: Mapping[str, int], limits: Mapping[str, int]) -> int:
    return sum(max(0, peaks[device] - limit) for device, limit in limits.items())


def _simulated(found: Schedule) -> Sequence[int]:
    """The most bytes on each device, as the simulation has them."""
    assert found.peaks is not None  # it was limited
    return found.peaks


def _within(peaks: Sequence[int], limits: Sequence[int | None]) -> bool:
    return all(limit is None or peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def _one_after_the_other(work: Work) -> list[int]:
    """The micro-batches as captured: each one done before the next begins."""
    return sorted(range(len(work.micro)), key=lambda i: (work.micro[i], i))


def _warn_of_waiting(work: Work) -> None:
    """Warn where a forward has to wait for the backward of an earlier micro-batch."""
    for i, kind in enumerate(work.kind):
        for other in work.earlier[i] if kind == FORWARD else ():
            if work.micro[other] < work.micro[i] and work.kind[other] != FORWARD:
                ops, blobs = work.program.step.ops, work.program.step.blobs
                written = {blobs[name].storage for op in (ops[i], ops[other]) for name in op.outputs}
                shared = [name for name in work.touched[i] if name in work.touched[other] and name in written]
                warn(
                    f"{shared[0]!r} holds the micro-batches of {work.program.name!r} together: "
                    f"{ops[i].outputs[0]!r} has to wait for {ops[other].outputs[0]!r} of an earlier one's backward",
                    PipelineWarning,
                )
                return
