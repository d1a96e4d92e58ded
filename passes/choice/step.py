"""A step as columns, read once for groups of any size: which operator touches which storage, and how long each holds
its bytes.

::

    touch      0      1         2        3      4      …    as Net.touches has them
    op         0      0         0        1      1
    storage    x      conv.w    conv     conv   relu        as a number, in the order in which they begin
    makes      -      -         yes      -      yes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphir.analysis.alike import Kinds, alike
from graphir.analysis.cost import Work, operator_costs, seconds_alike, works
from graphir.analysis.execution import IssueSeconds
from graphir.analysis.issuing import calls_of
from graphir.analysis.memory import storage_nbytes
from graphir.analysis.profiles import Measured, Profile
from graphir.analysis.sources import held_inside, measured_of
from graphir.analysis.topology import Topology
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.plan import issued_as
from graphir.ir.program import Program
from graphir.ir.touches import Flags, Numbers

from ..recompute import repeated_alone

__all__ = ["Spans", "Step"]

_IN_ONE_CALL: Final = 8
"""Reductions that stand side by side are made in one call, some six in a plan of ResNet-50, a hundred in one of a small
GPT; which ones is known of a plan alone."""


class Spans(NamedTuple):
    """What holds bytes without being state, from the operator *start* to the one before *end*.

    Attributes:
        device: numbers of :attr:`Step.devices`.
    """

    start: Numbers
    end: Numbers
    nbytes: Numbers
    device: Numbers


class Step:
    """A step as columns.

    Args:
        program: captured, or replicated; before :func:`.copies.inject_copies`.
        profile: what was measured of calls on that machine.
        threads: how many threads one kernel uses.
        issue: what one host thread takes to issue operators; None where nobody issues them.

    Attributes:
        names: of the storages, those from outside first.
        number: by name of a storage, its number.
        blobs: of the storages, as :class:`~graphir.ir.touches.Touches` numbers them.
        given: how many of them are from outside.
        op, storage, makes: by touch, the operator, the storage, and whether the operator makes or overwrites it.
        own: by touch, whether it is by the storage's own name.
        bounds: by operator, its first touch, and the one behind its inputs.
        forward: by operator, whether it is of the forward.
        made: by storage, the operator that makes it; -1 of what is from outside.
        late: by storage, the first operator after the forward that touches what is made before; -1 where none does.
        written: by storage, the last operator that overwrites it; -1 where none does.
        devices: those of the net.
        at, on_host: by operator, the number of its device, and whether that is the host.
    """

    def __init__(
        self, program: Program, profile: Profile | None, threads: int, issue: IssueSeconds | None = None
    ) -> None:
        self.program, self.profile, self.threads, self.issue = program, profile, threads, issue
        self.net, self.dims = program.step, dict(program.dims)
        ops, touches = self.net.ops, self.net.touches
        self.op, self.makes = touches.op, touches.makes
        begin, inputs = touches.begin, touches.inputs
        self.bounds: list[tuple[int, int]] = list(zip(begin.tolist(), (begin + inputs).tolist(), strict=True))
        outside = touches.storage[[touches.number[name] for name in self.net.external_inputs]]
        self.own = touches.stored == touches.blob
        both = np.concatenate([outside, touches.stored])
        self.blobs = both[_firsts(both)]
        self.names = [touches.names[blob] for blob in self.blobs.tolist()]
        self.number = {name: i for i, name in enumerate(self.names)}
        self.given = len(set(outside.tolist()))
        numbers = np.zeros(len(touches.names), np.int64)
        numbers[self.blobs] = np.arange(len(self.blobs))
        self.storage = numbers[touches.stored]
        self.forward = np.array([op.phase == "forward" for op in ops], np.bool_)
        self.devices = self.net.devices
        places = {device: i for i, device in enumerate(self.devices)}
        self.at = np.array([places[op.device] for op in ops], np.int64)
        self.on_host = np.array([device.is_host for device in self.devices], np.bool_)[self.at]
        self.made = self.first(self.makes)
        self.made[: self.given] = -1
        makers = self.op == self.made[self.storage]
        self.late = self.first(~self.forward[self.op] & ~(self.makes & makers))
        self.written = self.last(self.makes & ~makers & ~self.viewing())
        self.costs: dict[str, list[float]] = {}

    def viewing(self) -> Flags:
        """By touch, whether it makes a view."""
        found = np.zeros(len(self.op), np.bool_)
        pairs = zip(self.bounds, self.net.ops, strict=True)
        found[[made + output for (_, made), op in pairs for output, _ in op.effects.views]] = True
        return found

    def first(self, those: Flags) -> Numbers:
        """By storage, the operator of the first of some touches; -1 where there is none."""
        found = np.full(len(self.names), -1, np.int64)
        found[self.storage[those][::-1]] = self.op[those][::-1]  # of equal indices the last one stays
        return found

    def last(self, those: Flags) -> Numbers:
        """By storage, the operator of the last of some touches; -1 where there is none."""
        found = np.full(len(self.names), -1, np.int64)
        found[self.storage[those]] = self.op[those]
        return found

    def maker(self, storage: str) -> int:
        """The operator that makes a storage; -1 of what is from outside, or of nothing."""
        number = self.number.get(storage)
        return -1 if number is None else self.makers[number]

    def read(self, i: int) -> list[int]:
        """The storages that an operator reads."""
        begin, end = self.bounds[i]
        return self.numbers[begin:end]

    @cached_property
    def makers(self) -> list[int]:
        """:attr:`made` as a list, for single look-ups."""
        found: list[int] = self.made.tolist()
        return found

    @cached_property
    def numbers(self) -> list[int]:
        """:attr:`storage` as a list, for single look-ups."""
        found: list[int] = self.storage.tolist()
        return found

    @cached_property
    def nbytes(self) -> Numbers:
        """By storage, its bytes.

        Raises:
            GraphirError: a size is negative or absurd.
        """
        geometry = self.net.touches.geometry[self.blobs]
        known = np.zeros(geometry.max(initial=-1) + 1, np.int64)
        for i in _firsts(geometry).tolist():
            known[geometry[i]] = storage_nbytes(self.net, self.net.blobs[self.names[i]], self.dims)
        found: Numbers = known[geometry]
        return found

    @cached_property
    def saved(self) -> Numbers:
        """By operator, the bytes that it makes and that are touched after the forward."""
        found = np.zeros(len(self.net.ops), np.int64)
        kept = (self.made >= 0) & (self.late >= 0)
        np.add.at(found, self.made[kept], self.nbytes[kept])
        return found

    @cached_property
    def lasting(self) -> Flags:
        """By storage, whether it is handed back."""
        found = np.zeros(len(self.names), np.bool_)
        outputs = [self.net.blobs[name].storage for name in self.net.external_outputs]
        found[[self.number[name] for name in outputs if name in self.number]] = True
        return found

    @cached_property
    def spared(self) -> Flags:
        """By storage, whether the step makes it, reads it after the forward, and neither overwrites it nor hands it
        back: it may be elsewhere meanwhile, or made again."""
        found: Flags = (self.made >= 0) & (self.late >= 0) & (self.written < 0) & ~self.lasting
        return found

    @cached_property
    def is_state(self) -> Flags:
        """By storage, whether it is state."""
        found, blobs = np.zeros(len(self.names), np.bool_), self.net.blobs
        state = [blobs[name].storage for name in self.net.external_inputs if blobs[name].role in STATE_ROLES]
        found[[self.number[storage] for storage in state]] = True
        return found

    @cached_property
    def updated(self) -> Flags:
        """By storage, whether it is state of a gpu that the update alone touches, as an optimizer's: it may live
        elsewhere."""
        blobs = self.net.blobs
        update = np.array([op.phase == "update" for op in self.net.ops], np.bool_)[self.op]
        found = np.zeros(len(self.names), np.bool_)
        found[self.storage[update]] = True
        found[self.storage[~update]] = False
        views = {blobs[name].storage for name in self.net.external_inputs if blobs[name].is_view}
        there = [not blobs[name].device.is_host and name not in views for name in self.names]
        whole: Flags = found & self.is_state & np.array(there, np.bool_)
        return whole

    @cached_property
    def owners(self) -> dict[int, str]:
        """By storage of state, the module that owns it."""
        found, paths = dict[int, str](), self.program.module_paths
        for k in np.flatnonzero(self.is_state).tolist():
            path = base_name(self.names[k])
            while path and path not in paths:
                path = path.rpartition(".")[0]
            found[k] = path
        return found

    @cached_property
    def repeatable(self) -> Flags:
        """By operator, whether it can be repeated in the backward by itself."""
        found = np.zeros(len(self.net.ops), np.bool_)
        found[repeated_alone(self.program)] = True
        return found

    @cached_property
    def kinds(self) -> Kinds:
        """Which operators are alike."""
        return alike(self.net)

    @cached_property
    def works(self) -> Sequence[Work]:
        """By operator, its work."""
        return works(self.net, self.dims, self.kinds)

    @cached_property
    def issued(self) -> list[float]:
        """By operator, what one host thread takes to issue it, on whatever device; a view may be left out, and counts
        nothing."""
        if self.issue is None:
            return [0.0] * len(self.net.ops)
        found: list[float] = []
        for i, (op, first) in enumerate(zip(self.net.ops, self.kinds, strict=True)):
            if first != i:
                found.append(found[first])
                continue
            measured = self.measured.get(i)
            if measured is not None and measured.issue is not None:
                found.append(measured.issue)
            else:
                alone = self.issue.of(calls_of(op, self.net, self.dims))
                found.append(alone / _IN_ONE_CALL if issued_as(op) == "collective" else alone)
        return found

    @cached_property
    def measured(self) -> Mapping[int, Measured]:
        """What was measured of operators, by position."""
        return measured_of(self.net, self.dims, self.threads, self.profile)

    def seconds(self, device: Device, topology: Topology) -> list[float]:
        """By operator, what it takes on a device."""
        speed = topology.speed(str(device))
        key = speed.model_dump_json()
        if key not in self.costs:
            net, dims, rates = self.net, self.dims, speed.rates()
            if self.profile is None:
                self.costs[key] = seconds_alike(net, dims, self.kinds, rates)
            else:
                found = operator_costs(net, dims, lambda _: rates, self.profile, self.threads, self.works)
                self.costs[key] = [cost.seconds for cost in found]
        return self.costs[key]

    @cached_property
    def spans(self) -> Spans:
        """What holds bytes, as :func:`graphir.memory` has it, without state; and then what operators hold inside."""
        net, blobs = self.net, self.net.blobs
        count, taken = len(net.ops), self.measured
        start = np.maximum(self.made, 0)
        end = np.maximum(self.last(np.ones(len(self.op), np.bool_)), start) + 1
        end[self.lasting] = count
        end[: self.given] = count
        nbytes = self.nbytes.copy()
        kept = {blobs[net.ops[i].outputs[0]].storage: measured.kept for i, measured in taken.items() if measured.kept}
        for storage, more in kept.items():
            nbytes[self.number[storage]] += more
        places = {device: i for i, device in enumerate(self.devices)}
        device = np.array([places[blob.device] for blob in blobs.values()], np.int64)[self.blobs]
        state = self.is_state
        held = held_inside(net, self.dims, self.threads, taken, self.kinds)
        inside = [(at, nbytes, places[device]) for at, device, nbytes in held]
        at, scratch, where = np.array(inside, np.int64).reshape(-1, 3).T
        return Spans(
            np.concatenate([start[~state], at]),
            np.concatenate([end[~state], at + 1]),
            np.concatenate([nbytes[~state], scratch]),
            np.concatenate([device[~state], where]),
        )

    def live(self, those: Flags) -> NDArray[np.int64]:
        """By device and operator, the bytes that some of the spans hold."""
        spans, count = self.spans, len(self.net.ops)
        change = np.zeros((len(self.devices), count + 1), np.int64)
        np.add.at(change, (spans.device[those], spans.start[those]), spans.nbytes[those])
        np.subtract.at(change, (spans.device[those], spans.end[those]), spans.nbytes[those])
        return change.cumsum(1)


def _firsts(numbers: Numbers) -> Numbers:
    """Where each of some numbers occurs for the first time."""
    at = np.zeros(numbers.max(initial=-1) + 1, np.int64)
    places = np.arange(len(numbers))
    at[numbers[::-1]] = places[::-1]  # of equal indices the last one stays
    return np.flatnonzero(at[numbers] == places)
