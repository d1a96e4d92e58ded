"""Who is on a device, what is live there, and whether more fits.

A *segment* is the forward or the backward of one micro-batch on one device. It is *let in* before its first operator
that allocates, if these fit within the limit::

    live | what begun forwards have still to allocate | sums of gradients still to come | the segment, and its backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .pipeline_needs import Need

__all__ = ["Room", "Segment"]

Segment: TypeAlias = tuple[bool, int]
"""Whether it is a forward, and of which micro-batch."""


class Room:
    """A device.

    Attributes:
        limit: of bytes; None where there is none.
        at_most: of micro-batches.
        need: what micro-batches need here; None where nothing is limited.
        spare: bytes that a gradient of a parameter takes until it is added to the sum of the others.
        left_forward, left_backward: by micro-batch, how many operators are not done.
        inside: micro-batches that are let in and not done.
        waiting: operators that are ready, by segments that are not let in.
        open: segments that are let in.
        live, copied, pool: bytes of storages but for copies; of copies; the most that copies took so far, which stay
            allocated as receive buffers.
        top: the most bytes at once so far, but for copies.
        growing: bytes that each begun forward has allocated so far, but for copies.
        computing: the begun forwards of which more was executed than copies.
        compelled: the micro-batches whose forwards go ahead whether they fit or not, as nothing else can.
        stirred: something was freed or is done, or waits anew, since somebody was last let in.
        granted: the most bytes so far that somebody asked for and that keep within the limit.
        kept_back: copies to here that are ready and would take receive buffers beyond the limit.
        backwards: micro-batches whose backward is let in and not done; ``grown``: what these have allocated so far.
    """

    __slots__ = (
        "at_most",
        "backwards",
        "compelled",
        "computing",
        "copied",
        "granted",
        "growing",
        "grown",
        "inside",
        "kept_back",
        "left_backward",
        "left_forward",
        "limit",
        "live",
        "need",
        "open",
        "pool",
        "spare",
        "stirred",
        "top",
        "waiting",
    )

    def __init__(
        self,
        counts: tuple[Sequence[int], Sequence[int]],
        limit: int | None,
        at_most: int | None,
        base: int,
        need: Need | None,
    ) -> None:
        self.left_forward, self.left_backward = list(counts[0]), list(counts[1])
        self.limit, self.at_most, self.need = limit, len(counts[0]) if at_most is None else at_most, need
        self.inside: set[int] = set()
        self.waiting: dict[Segment, list[int]] = {}
        self.open: set[Segment] = set()
        self.live, self.copied, self.pool, self.top = base, 0, 0, base
        self.kept_back: list[int] = []
        self.growing: dict[int, int] = {}
        self.computing: set[int] = set()
        self.compelled: set[int] = set()
        self.backwards: set[int] = set()
        self.grown, self.spare, self.granted, self.stirred = 0, 0, 0, False

    @property
    def peak(self) -> int:
        """The most bytes so far: receive buffers are there throughout."""
        return self.top + self.pool

    def receives(self, nbytes: int) -> bool:
        """Whether a copy of so many bytes keeps within the limit: in buffers that are free, or in new ones."""
        copied = self.copied + nbytes
        return self.limit is None or copied <= self.pool or self.grants(self.top + copied)

    def wait(self, segment: Segment, i: int) -> None:
        """An operator is ready, and its segment is not let in."""
        self.waiting.setdefault(segment, []).append(i)
        self.stirred = True

    def let_in(self, segment: Segment) -> list[int]:
        """A segment begins; which of its operators are ready."""
        forward, micro = segment
        self.open.add(segment)
        if forward:
            self.inside.add(micro)
            self.growing.setdefault(micro, 0)
        else:
            self.backwards.add(micro)
        return self.waiting.pop(segment, [])

    def turn_back(self, micro: int) -> None:
        """A forward is let in no longer: it has computed nothing."""
        self.open.discard((True, micro))
        self.inside.discard(micro)

    def frees(self, nbytes: int, copy: bool, segment: Segment | None) -> None:
        """A storage is freed, in a segment or by an update."""
        self.stirred = True
        self.takes(-nbytes, copy, segment)

    def takes(self, nbytes: int, copy: bool, segment: Segment | None) -> None:
        """A storage is made, in a segment or by an update."""
        if copy:
            self.copied = copied = self.copied + nbytes
            if copied > self.pool:
                self.pool = copied
            return
        self.live += nbytes
        if segment is None:
            return
        forward, micro = segment
        if not forward:
            if self.backwards:
                self.grown += nbytes
        elif micro in self.growing:
            self.growing[micro] += nbytes

    def goes_on(self, segment: Segment) -> None:
        """An operator of a segment is done."""
        forward, micro = segment
        todo = self.left_forward if forward else self.left_backward
        todo[micro] -= 1
        if todo[micro]:
            return
        self.stirred = True
        if forward:
            self.growing.pop(micro, None)
            self.computing.discard(micro)
        else:
            self.backwards.discard(micro)
            if not self.backwards:
                self.grown = 0
        if not self.left_forward[micro] and not self.left_backward[micro]:
            self.inside.discard(micro)

    def fits(self, segment: Segment) -> bool:
        """Whether a segment fits that computes nothing yet."""
        forward, micro = segment
        return self.fits_forward(micro) if forward else self.fits_backward()

    def fits_forward(self, micro: int) -> bool:
        """Whether a forward fits, and its backward behind it."""
        if len(self.inside - {micro}) >= self.at_most:
            return False
        need = self.need
        if self.limit is None or need is None:
            return True
        # What a backward has grown by is a part of what it needs; not where it defers gradients of parameters: then it
        # has grown by what these follow from, and they come on top.
        going_on = min(max(self.grown, 0), need.backward) if self.backwards and not self.spare else 0
        wanted = max(need.forward, need.held + need.backward - going_on) - self.growing.get(micro, 0)
        copies = 0 if micro in self.growing else need.held_copies  # what computes next has its copies
        return self.grants(self.coming(need, micro, copies) + wanted)

    def fits_backward(self) -> bool:
        """Whether a backward fits beside others."""
        if self.limit is None or self.need is None or not self.backwards:
            return True
        return self.grants(self.coming(self.need) + self.need.backward)

    def fits_deferring(self, nbytes: int) -> bool:
        """Whether a backward operator that takes so much fits while gradients of parameters are put off. A forward that
        computes nothing yet can wait."""
        if self.limit is None or self.need is None:
            return True
        held = self.need.held
        growing = sum([max(0, held - grown) for micro, grown in self.growing.items() if micro in self.computing])
        return self.grants(self.live + self.pool + growing + nbytes + self.spare)

    def grants(self, nbytes: int) -> bool:
        """Whether so many bytes keep within the limit."""
        assert self.limit is not None
        if nbytes > self.limit:
            return False
        if nbytes > self.granted:
            self.granted = nbytes
        return True

    def coming(self, need: Need, beside: int = -1, copies: int = 0) -> int:
        """Bytes that are live or sure to come: of begun forwards but one; of sums of gradients what these take beyond
        what the first micro-batch leaves free when it is done; and receive buffers, for so many bytes of copies more
        and those that a backward takes."""
        growing = sum([max(0, need.held - grown) for micro, grown in self.growing.items() if micro != beside])
        summed = not self.left_backward[0] and not self.left_forward[0]
        sums = 0 if summed else max(0, need.sums - need.held)
        pool = max(self.pool, self.copied + copies + need.copies - need.held_copies)
        return self.live + pool + growing + sums
