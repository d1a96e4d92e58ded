"""Memory for what comes in from other devices, and the reductions that write it.

A copy may be written long before the device that it is for gets to it, so its memory cannot come from what that device
has just let go of: it is taken once and kept, in a receive buffer. What a collective makes is taken anew in each step,
and so is what is parked and comes back, since a buffer would keep the memory that parking gives back.
All are memory of the owner's compute stream, on which the plan frees; the lane that writes waits until that stream has
come to the point at which the memory was taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.buffers import Buffer
from ..kernels.communication import spanned
from .streams import Machine, Stream

__all__ = ["Anew", "NativeReduction", "Owner", "PageLocked", "Reduction"]


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
