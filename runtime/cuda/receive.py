"""Memory for what comes in from other devices, and the reductions that write it.

A copy may be written long before the device that it is for gets to it, so its memory cannot come from what that device
has just let go of: it is taken once and kept, in a receive buffer. What a collective makes is taken anew in each step,
and so is what is parked and comes back, since a buffer would keep the memory that parking gives back.
All are memory of the owner's compute stream, on which the plan frees; the lane that writes waits until that stream has
come to the point at which the memory was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from graphir.ir.blob import overlaps, reach

from ..kernels.buffers import Buffer
from ..kernels.communication import is_marked, spanned
from .streams import Machine, Stream

__all__ = ["Anew", "JointReduction", "NativeReduction", "Owner", "PageLocked", "Reduction"]

_ALIGNMENT: Final = 256
"""Bytes. Kernels that sum choose their order by alignments of up to so many."""


class Owner:
    """Who takes memory for a lane of another stream.

    Args:
        machine: where.
        place: the real device whose memory it is.
        compute: the stream that frees it; None on the host.
        lane: the stream that writes it; None on the host.
    """

    def __init__(self, machine: Machine, place: torch.device, compute: Stream | None, lane: Stream | None) -> None:
        self.machine, self.place, self.compute, self.lane = machine, place, compute, lane
        self.taken = machine.event() if compute is not None else None

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        """What *make* allocates, for the lane to write."""
        if self.compute is None or self.lane is None or self.taken is None:
            return make()
        self.machine.use(self.compute)
        made = make()
        self.taken.record(self.compute)
        self.taken.wait(self.lane)
        self.machine.use(self.lane)
        return made

    def room(self, nbytes: int) -> Tensor:
        """Uninitialised bytes, for the lane to write."""
        return self.take(lambda: self.machine.empty(nbytes, self.place))


class Anew:
    """Receives copies, each into memory of its own, which goes back when the plan frees the copy."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def receive(self, source: Tensor) -> Tensor:
        """See :meth:`.kernels.buffers.Buffer.receive`."""
        return Buffer(self.owner.room).receive(source)


class PageLocked:
    """Takes memory of the host for a buffer, and gives the memory that the buffer had before back once no stream uses
    it.

    Torch waits by itself only for streams that use such memory from its first byte, at which a buffer need not begin.

    Args:
        machine: where.
        rest: lets the streams come to rest.
    """

    def __init__(self, machine: Machine, rest: Callable[[], None]) -> None:
        self.machine, self.rest = machine, rest
        self.taken: Tensor | None = None

    def room(self, nbytes: int) -> Tensor:
        """Uninitialised bytes."""
        if self.taken is not None:
            self.rest()
        self.taken = None  # what it holds need not be there twice
        self.taken = self.machine.empty(nbytes, torch.device("cpu"))
        return self.taken


class Reduction:
    """One participant's part of a collective.

    Args:
        owner: of the result.
        elsewhere: for each participant, whether its tensor is on another real device.
    """

    def __init__(self, owner: Owner, elsewhere: Sequence[bool]) -> None:
        self.owner, self.elsewhere = owner, elsewhere
        self.ahead = owner.lane is not None  # a host lane reads what it copies at once

    def reduce(self, inputs: Sequence[Tensor], divisor: int | None, weights: Sequence[float] | None) -> Tensor:
        """The sum in participant order, bit for bit :func:`.kernels.communication.all_reduce`.

        The lane's stream is current.
        """
        total = self.result(inputs[0])
        total.copy_(inputs[0], non_blocking=self.ahead)
        if weights is not None:
            total.mul_(weights[0])
        for i, tensor in enumerate(inputs[1:], start=1):
            if self.elsewhere[i]:
                here = self.owner.machine.like(tensor, self.owner.place)
                tensor = here.copy_(tensor, non_blocking=self.ahead)
            total.add_(tensor if weights is None else tensor.mul(weights[i]))
        return total if divisor is None else total.div_(divisor)

    def result(self, like: Tensor) -> Tensor:
        """Memory for the result, which looks like *like*."""
        return self.owner.take(lambda: self.owner.machine.like(like, self.owner.place))


class JointReduction:
    """All parts of several collectives among the same participants, which are on GPUs: what crosses is packed first.

    For participants p and q on two devices, with tensors a and b::

        lane p   ① pack a_p b_p                    ③ total p = a_p + a_q, b_p + b_q, in one piece
                            └── ② copied ──┐
        lane q   ① pack a_q b_q            └──▶    ③ total q, and so on

    So the square of the number of participants counts copies and sums of packs, and not of tensors. ② is done on the
    lane of the participant that sends: it comes behind ①, and the pack is let go behind it. There, torch lets the lanes
    of both participants wait for each other.

    Args:
        parts: each participant's.
        lanes: the stream of each.
    """

    def __init__(self, parts: Sequence[Reduction], lanes: Sequence[Stream]) -> None:
        self.parts, self.lanes = parts, lanes
        self.machine = parts[0].owner.machine
        self.places = [part.owner.place for part in parts]
        self.current: dict[torch.device, Stream] = {}
        self.device = lanes[0].device

    def reduce(
        self, inputs: Sequence[tuple[Tensor, ...]], divisor: int | None, weights: Sequence[float] | None
    ) -> tuple[Tensor, ...]:
        """Every participant's results, bit for bit :func:`.kernels.communication.all_reduce`: all of the first
        participant's, then all of the second's.

        All lanes are current, the first one's device is, and each has waited for all inputs. Others may be current
        afterwards.

        Args:
            inputs: for each participant, its tensors.
            divisor: see there.
            weights: see there.
        """
        self.current = {lane.device: lane for lane in (*self.lanes[1:], self.lanes[0])}
        self.device = self.lanes[0].device
        layout = _Layout.of(inputs)
        if layout is None:
            return tuple(self.each(inputs, divisor, weights))
        return tuple(self.packed(inputs, layout, divisor, weights))

    def each(
        self, inputs: Sequence[tuple[Tensor, ...]], divisor: int | None, weights: Sequence[float] | None
    ) -> list[Tensor]:
        """Tensors that cannot lie side by side: one after the other."""
        results = []
        for part, lane in zip(self.parts, self.lanes, strict=True):
            for tensors in zip(*inputs, strict=True):
                self.on(lane)
                results.append(part.reduce(tensors, divisor, weights))
        return results

    def packed(
        self,
        inputs: Sequence[tuple[Tensor, ...]],
        layout: _Layout,
        divisor: int | None,
        weights: Sequence[float] | None,
    ) -> list[Tensor]:
        """Tensors that lie side by side: what crosses is one copy, what is summed one tensor."""
        packs = [self.pack(i, tensors, layout) for i, tensors in enumerate(inputs)]
        results: list[Tensor] = []
        for place, part, lane in zip(self.places, self.parts, self.lanes, strict=True):
            take = partial(self.machine.elements, layout.elements, layout.dtype, place)
            self.on(lane)
            total = part.owner.take(take)
            views = layout.views(total)
            for i, tensors in enumerate(inputs):
                weight, pack = None if weights is None else weights[i], packs[i]
                if self.places[i] == place:
                    _add(views, tensors, weight, first=i == 0)
                    continue
                assert pack is not None
                if self.current[self.places[i]] is not self.lanes[i]:  # the stream that torch copies on
                    self.on(self.lanes[i])
                    self.on(lane)
                into = total if i == 0 else take()
                into.copy_(pack, non_blocking=True)
                if weight is not None:
                    into.mul_(weight)
                if i:
                    total.add_(into)
            if divisor is not None:
                total.div_(divisor)
            results += views
        return results

    def pack(self, i: int, tensors: tuple[Tensor, ...], layout: _Layout) -> Tensor | None:
        """The tensors of a participant side by side, where another one's device needs them."""
        place = self.places[i]
        if all(other == place for other in self.places):
            return None
        if len(tensors) == 1:
            return tensors[0].as_strided((layout.elements,), (1,))
        self.on(self.lanes[i])
        made = self.machine.elements(layout.elements, layout.dtype, place)
        torch._foreach_copy_(layout.views(made), tensors, non_blocking=True)
        return made

    def on(self, lane: Stream) -> None:
        """Make a lane's stream current, and its device."""
        if self.current[lane.device] is not lane or self.device != lane.device:
            self.machine.use(lane)
            self.current[lane.device], self.device = lane, lane.device


def _add(totals: list[Tensor], tensors: tuple[Tensor, ...], weight: float | None, first: bool) -> None:
    """Add tensors of the same device, or begin with the first participant's."""
    if first:
        torch._foreach_copy_(totals, tensors, non_blocking=True)
        if weight is not None:
            torch._foreach_mul_(totals, weight)
    else:
        torch._foreach_add_(totals, tensors if weight is None else torch._foreach_mul(tensors, weight))


class _Layout(NamedTuple):
    """Where tensors lie in one piece of memory: each begins where torch's allocator could have put it.

    Attributes:
        dtype: of all.
        geometries: size, strides and first element of each.
        elements: how many, gaps included.
    """

    dtype: torch.dtype
    geometries: Sequence[tuple[torch.Size, tuple[int, ...], int]]
    elements: int

    @staticmethod
    def of(inputs: Sequence[tuple[Tensor, ...]]) -> _Layout | None:
        """The layout of each participant's tensors; None where they have none in common, or gaps."""
        first, *others = inputs
        dtype = first[0].dtype
        geometries, count = [], 0
        for i, tensor in enumerate(first):
            if tensor.layout is not torch.strided:
                return None
            size, strides = tensor.size(), tensor.stride()
            for same in (tensor, *[tensors[i] for tensors in others]):
                if (same.layout, same.dtype) != (torch.strided, dtype) or is_marked(same):
                    return None
                if (same.size(), same.stride()) != (size, strides):
                    return None
            if overlaps(size, strides) or reach(size, strides) != tensor.numel():
                return None
            geometries.append((size, strides, count))
            step = _ALIGNMENT // dtype.itemsize
            count += -(-tensor.numel() // step) * step if len(first) > 1 else tensor.numel()
        return _Layout(dtype, geometries, count)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors of this layout over memory."""
        return [memory.as_strided(*geometry) for geometry in self.geometries]


class NativeReduction:
    """All parts of a collective in one call of NCCL, in whose order the sum is formed.

    Args:
        parts: each participant's, on a real device of its own.
        lanes: the stream of each.
    """

    def __init__(self, parts: Sequence[Reduction], lanes: Sequence[Stream]) -> None:
        self.parts, self.lanes = parts, lanes
        self.machine = parts[0].owner.machine
        self.begun = self.machine.event()

    def reduce(
        self, inputs: Sequence[Tensor], divisor: int | None, weights: Sequence[float] | None
    ) -> tuple[Tensor, ...]:
        """Every participant's result. The first one's lane has waited for all inputs; the others now come after it."""
        self.begun.record(self.lanes[0])
        given, results = [], []
        for i, (part, lane, tensor) in enumerate(zip(self.parts, self.lanes, inputs, strict=True)):
            if i:
                self.begun.wait(lane)
            self.machine.use(lane)
            given.append(spanned(tensor.clone() if weights is None else tensor.mul(weights[i])))
            results.append(part.result(tensor))
        self.machine.all_reduce(given, [spanned(result) for result in results], self.lanes)
        if divisor is not None:
            for lane, result in zip(self.lanes, results, strict=True):
                self.machine.use(lane)
                result.div_(divisor)
        self.machine.use(self.lanes[0])
        return tuple(results)
