"""Where the copies of a module meet: a reduction of one blob of each, and the order of a step that has such.

::

    gpu_0/conv ─▶ gpu_0/moments ─┐             ┌─▶ gpu_0/moments_reduced ─▶ gpu_0/bn ─▶ …
                                 ├─ AllReduce ─┤
    gpu_1/conv ─▶ gpu_1/moments ─┘             └─▶ gpu_1/moments_reduced ─▶ gpu_1/bn ─▶ …

A copy comes to a meeting behind an operator of its own. In a replicated program these stand side by side, but edits may
have put others between. So operators that need what a meeting gives wait until the last copy has come, and with them
those that depend on what waits; all others keep their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from graphir.analysis.hazards import touches
from graphir.errors import PassError
from graphir.ir.blob import Blob
from graphir.ir.operator import Arg, Operator, Phase, stored_versions

__all__ = ["Meeting", "Ticket", "in_order"]


class Ticket(NamedTuple):
    """A copy comes to a meeting here."""

    meeting: Meeting
    copy: int


class Meeting:
    """A reduction over all copies.

    Attributes:
        results: the name of each copy's result.
        given: by copy, what it brings: a blob and its version.

    Args:
        module: whose copies meet.
        args: ``reduction`` and ``shares``, as ``AllReduce`` takes them.
        results: see there.
        phase: of the operators behind which the copies meet.
        of: what the first copy's result is computed for, beside which the reduction stays.
        by: the pass that lets them meet.
    """

    def __init__(
        self, module: str, args: Mapping[str, Arg], results: Sequence[str], phase: Phase, of: str, by: str
    ) -> None:
        self.module, self.args, self.results = module, args, tuple(results)
        self.phase, self.of, self.by = phase, of, by
        self.given: dict[int, tuple[str, int]] = {}

    def ticket(self, copy: int) -> Ticket:
        """What stands in the step where a copy comes."""
        return Ticket(self, copy)

    def require_all(self, blobs: Mapping[str, Blob]) -> None:
        """Refuse where not every copy comes, or one brings something else.

        Raises:
            PassError: one does not.
        """
        missing = [copy for copy in range(len(self.results)) if copy not in self.given]
        if missing:
            raise PassError(
                f"copy {missing[0]} of module {self.module!r} does not come to an all_reduce of "
                f"{self.given[min(self.given)][0]!r}, to which copy {min(self.given)} comes",
                fix="call all_reduce as often, and in the same order, for every copy of a module",
            )
        first, *others = [blobs[self.given[copy][0]] for copy in range(len(self.results))]
        for copy, other in enumerate(others, 1):
            if (len(other.shape or ()), other.dtype) != (len(first.shape or ()), first.dtype):
                raise PassError(
                    f"copy {copy} of module {self.module!r} brings {_shown(other)} to an all_reduce, and copy 0 "
                    f"{_shown(first)}",
                    fix="let every copy bring a tensor of the same shape and element type",
                )

    def operator(self, blobs: Mapping[str, Blob]) -> Operator:
        """The reduction."""
        given = [self.given[copy] for copy in range(len(self.results))]
        pattern = f"[{'t' * len(given)}]"
        return Operator(
            type="AllReduce",
            inputs=tuple([name for name, _ in given]),
            outputs=self.results,
            args=dict(self.args),
            device=blobs[given[0][0]].device,
            phase=self.phase,
            module=self.module,
            by=self.by,
            operands=pattern,
            results=pattern,
            input_versions=stored_versions([version for _, version in given]),
            of=self.of,
        )


def _shown(blob: Blob) -> str:
    return f"{blob.name} : {blob.dtype}[{','.join(map(str, blob.shape or ()))}]"


def in_order(
    items: Sequence[Operator | Ticket], meetings: Iterable[Meeting], blobs: MutableMapping[str, Blob]
) -> list[Operator]:
    """The operators, each meeting's reduction where its last copy has come.

    Raises:
        PassError: copies wait for each other.
    """
    order = _Order({name for meeting in meetings for name in meeting.results}, blobs)
    for item in items:
        order.take(item)
    if order.waiting:
        stuck = next(meeting for meeting in meetings if not order.open.isdisjoint(meeting.results))
        raise PassError(
            f"the copies of module {stuck.module!r} wait for each other: one comes to an all_reduce after what "
            "another can only compute behind it",
            fix="let all copies come to meetings in one order",
        )
    return order.ops


class _Order:
    """Operators in their order, and those that wait.

    Attributes:
        open: results of meetings that are still to be.
    """

    def __init__(self, results: set[str], blobs: Mapping[str, Blob]) -> None:
        self.open, self.blobs = results, blobs
        self.ops: list[Operator] = []
        self.waiting: list[Operator | Ticket] = []
        self._read, self._written = set[str](), set[str]()
        self._come: dict[int, int] = {}

    def take(self, item: Operator | Ticket) -> None:
        reads, writes = self._touched(item)
        waits = not self.open.isdisjoint(reads) or (bool(self.waiting) and self._depends(reads, writes))
        if waits:
            self.waiting.append(item)
            self._read |= reads
            self._written |= writes
        elif isinstance(item, Operator):
            self.ops.append(item)
        else:
            self._comes(item.meeting)

    def _depends(self, reads: set[str], writes: set[str]) -> bool:
        """Whether what is touched is written by what waits, or written here and read by what waits."""
        return not (
            self._written.isdisjoint(reads) and self._written.isdisjoint(writes) and self._read.isdisjoint(writes)
        )

    def _touched(self, item: Operator | Ticket) -> tuple[set[str], set[str]]:
        if isinstance(item, Ticket):
            name, _ = item.meeting.given[item.copy]
            return {name, self.blobs[name].storage}, set()
        return touches(item, self.blobs)

    def _comes(self, meeting: Meeting) -> None:
        come = self._come[id(meeting)] = self._come.get(id(meeting), 0) + 1
        if come < len(meeting.results):
            return
        self.ops.append(meeting.operator(self.blobs))
        self.open -= set(meeting.results)
        waiting, self.waiting = self.waiting, []
        self._read, self._written = set(), set()
        for item in waiting:
            self.take(item)
