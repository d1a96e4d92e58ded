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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator

from graphir.analysis.cost import Cost
from graphir.analysis.element_types import refuse_element_types
from graphir.analysis.execution import streams_of
from graphir.analysis.schedule import schedule as predicted
from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError, PipelineWarning, nearest, warn
from graphir.ir.device import DeviceName
from graphir.ir.names import micro_batches
from graphir.ir.program import Program
from graphir.ir.text import nbytes_text

from .base import OptionError, Pass, build, register
from .emit import instructed
from .limits import Limits
from .machines import Machine
from .micro_work import FORWARD, Work
from .own_orders import OwnOrders
from .plan_figures import PlanFigures
from .plan_seconds import PlanSeconds
from .standing import Order
from .within_limits import Judge, Within, excess

__all__ = ["PipelineSchedule", "Schedules", "pipeline", "tried"]

Schedules: TypeAlias = Literal["zero_bubble", "1f1b", "gpipe"]


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
        return self.ordered(program)

    def ordered(self, program: Program, place: Topology | None = None) -> Program:
        """The program in the order of the schedule.

        Args:
            program: with several micro-batches.
            place: the machine at hand, where no topology was given and the caller knows it.
        """
        ordering = self.ordering(program, place)
        _warn_of_waiting(ordering.work)
        found = ordering.found()
        if found is None:
            raise ordering.refusal(self.limits or {})
        return found

    def ordering(self, program: Program, place: Topology | None = None) -> _Ordering:
        """What finds the order."""
        net, devices = program.step, program.step.devices
        try:
            place = self.topology or place or Topology.here(devices)
            for device in devices:
                place.speed(device)
            refuse_element_types(net, place, devices)
            work = Work(program, micro_batches(net.blobs), place)
        except GraphirError as e:
            raise PassError(f"pipeline: {e.what}", at=e.at, where=e.where, fix=e.fix) from None
        return _Ordering(program, work, self, place)


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
            ``graphir.memory(plan)`` at the captured sizes, with inputs, state and scratch. The fastest plan that keeps
            within them is taken: for zero bubble of the orders of all schedules, for GPipe of its own and 1F1B's, for
            1F1B of its own. No step is longer than that of such an own order within the limits. By default none for
            1F1B and GPipe; for zero bubble, on every gpu, what the simulation of 1F1B takes on the fullest one, which
            may differ from a plan's peak by a few copies. ``{}`` is no limit.
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


def tried(
    program: Program, schedules: Iterable[PipelineSchedule], place: Topology
) -> Iterator[tuple[PipelineSchedule, Program]]:
    """The program in the order of one schedule after the other, without a warning, of those that have one: to say the
    least limits that an order keeps takes as long as to look for an order. The program is read once.

    Args:
        program: with several micro-batches.
        schedules: any number in flight.
        place: the machine at hand, where a schedule has no topology.

    Raises:
        PassError: as :func:`pipeline`, but for limits.
    """
    ordering: _Ordering | None = None
    for schedule in schedules:
        if ordering is None:
            schedule.require_order(program)
            ordering = schedule.ordering(program, place)
        ordering.options = schedule
        if (found := ordering.found()) is not None:
            yield schedule, found


class _Ordering:
    """The order that was asked for."""

    def __init__(self, program: Program, work: Work, options: PipelineSchedule, place: Topology) -> None:
        self.program, self.work, self.options, self.place = program, work, options, place
        self.orders = OwnOrders(work, options.in_flight)

    @cached_property
    def judge(self) -> Judge:
        """What plans come to."""
        streams = self.place.host is None
        figures = PlanFigures(self.work, PlanSeconds(self.work, by_lane=streams))
        # No method: what holds itself stays in memory until the collector looks.
        return Judge(figures, partial(_issued, self.program, self.work, self.place) if streams else None)

    def found(self) -> Program | None:
        """The program in this order; None where no order keeps within the limits."""
        schedule, limits = self.options.schedule, self.options.limits
        if limits:
            self.refuse_unknown(limits)
            order = self.within(limits).fastest()
            return None if order is None else _ordered(self.program, order)
        found = self.orders.within_1f1b() if limits is None and schedule == "zero_bubble" else None
        return _ordered(self.program, (found or self.orders.unbeaten(schedule)).order)

    def within(self, limits: Mapping[str, int]) -> Within:
        """A search within limits."""
        return Within(self.orders, self.judge, self.options.schedule, limits)

    def refusal(self, limits: Mapping[str, int]) -> PassError:
        """The error that says that no order keeps within the limits, and the least with which one does."""
        least = self.least(limits)
        device = next(iter(least))
        return PassError(
            f"no order by {self.options.schedule!r} of the micro-batches keeps within "
            f"{nbytes_text(limits[device])} on {device}",
            where=f"program {self.program.name!r}",
            fix=f"the least that can is limits={{{', '.join(f'{d!r}: {n}' for d, n in least.items())}}}",
        )

    def least(self, limits: Mapping[str, int]) -> Mapping[str, int]:
        """By device whose limit is too small, one with which the schedule has an order: what the nearest order so far
        holds, if that one or another is found with it. Own orders do not depend on limits."""
        needed = [
            {device: peaks[device] for device, limit in limits.items() if peaks[device] > limit}
            for peaks, _ in sorted(map(self.judge.of, [*self.judge.known]), key=lambda of: excess(of.peaks, limits))
        ]
        return next(more for more in needed if self.within({**limits, **more}).is_kept())

    def refuse_unknown(self, limits: Mapping[str, int]) -> None:
        for device in limits:
            if device not in self.work.devices:
                raise PassError(
                    f"limits has {device!r}, on which the step has nothing",
                    where=f"program {self.program.name!r}",
                    fix=f"its devices: {', '.join(self.work.devices)}",
                )


def _ordered(program: Program, order: Sequence[int]) -> Program:
    """A program with its operators in an order."""
    net = program.step
    ops = tuple([net.ops[i] for i in order])
    blobs = {name: net.blobs[name] for name in net.external_inputs}
    blobs.update([(name, net.blobs[name]) for op in ops for name in op.outputs if name not in blobs])
    # Copies stand where they are due: one issued earlier lets a lane wait that could compute, and takes a second
    # receive buffer.
    return program.with_(step=net.with_(ops=ops, blobs={**blobs, **net.blobs}), ahead=0)


def _issued(program: Program, work: Work, place: Topology, order: Sequence[int]) -> float:
    """The seconds of a step in an order, which one host thread issues to streams, as :func:`graphir.estimate` predicts
    them."""
    plan = instructed(_ordered(program, order))
    costs = [Cost(work.seconds[i], "roofline") for i in order]
    return predicted(plan, plan.dims, costs, streams_of(place), place).times.seconds


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
