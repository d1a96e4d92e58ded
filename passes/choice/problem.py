"""A step as the choice of a placement sees it: few groups of modules, what they compute, and what they hand on.

A *task* is what one group computes in one go, with nothing of another group in between. A *value* is bytes that one
task makes and others read. A step is a row of tasks, and each device executes its own in that order::

    tasks      f0  f1  f2  b2  w2  b1  w1  b0  w0  u0  u1  u2       of groups 0, 1, 2
    values     f1 ── saved ──────▶ b1                               kept, parked elsewhere, or made again before b1
               f0 ─▶ f1  b2 ─▶ b1                                   they cross where the groups are on two devices
               w1 ─────────── gradient ──────────▶ u1

A *choice* says for each group on which device it is, and what becomes meanwhile of what it saves for its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

__all__ = ["AGAIN", "KEEP", "Choice", "Group", "Problem", "Task", "Value"]

T = TypeVar("T")

KEEP: Final = -1
"""What a group saves stays where it is."""

AGAIN: Final = -2
"""What can be computed again is computed again before the group's backward."""


class Group(NamedTuple):
    """What is placed as a whole.

    Attributes:
        name: for messages.
        state: bytes of parameters, optimizer state and buffers.
        devices: those on which it may be.
        stored: what may become of what it saves: :data:`KEEP`, :data:`AGAIN`, or the number of a device, or of the
            host, where it is parked.
        now: the device where it is.
        again: by device, the seconds that computing again takes. What it holds for a moment beyond the task *again_at*
            is seen in plans, from which the search goes on: reckoned by groups, it had placements refused that plans
            keep.
        again_at: the first task that reads what is computed again.
        again_issued: seconds that one host thread takes to issue what is computed again.
        updated: bytes of the state that the update alone touches.
        trips: bytes of its two largest trips, in order: as many are under way where it is parked.
        copies: how many copies bring it there, and as many take it back.
        update: the first and the last task of its update.
        away: the devices, or the host, where it may be parked.
    """

    name: str
    state: int
    devices: tuple[int, ...]
    stored: tuple[int, ...] = (KEEP,)
    now: int = 0
    again: tuple[float, ...] = ()
    again_at: int = -1
    again_issued: float = 0.0
    updated: int = 0
    trips: tuple[int, ...] = ()
    copies: int = 0
    update: tuple[int, int] = (-1, -1)
    away: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether there is anything to choose of it."""
        return len(self.devices) > 1 or len(self.stored) > 1 or bool(self.away)

    @property
    def stays(self) -> int:
        """Bytes of state that are on the group's device whatever is chosen."""
        return self.state - self.updated if self.away else self.state


class Task(NamedTuple):
    """What a group computes in one go.

    Attributes:
        group: whose.
        seconds: by device.
        room: bytes that its device holds at most meanwhile, beyond all of those values there that live during the task.
            Less than 0 where some of these are not there at the same time.
        calls: how many operators it is.
        touched: bytes that these read and write.
        kind: FORWARD, INPUT, WEIGHT or UPDATE, as :mod:`..micro_work` has them.
        part: the micro-batch.
        issued: seconds that one host thread takes to issue its operators; nothing begins before.
    """

    group: int
    seconds: tuple[float, ...]
    room: int = 0
    calls: int = 1
    touched: int = 0
    kind: int = 0
    part: int = 0
    issued: float = 0.0


class Value(NamedTuple):
    """Bytes that a task makes and others read.

    Attributes:
        nbytes: how many.
        made: the task that makes it; -1 for what is there when the step begins.
        reads: the tasks that read it, ascending.
        late: how many of these are in the forward: what is parked comes back for the one after them.
        group: whose it is: it lives where this is.
        lasts: whether it stays to the end.
        counted: whether it takes bytes where it lives; state does in :attr:`Group.state`.
        parks: whether it goes where the group's saved values are parked.
        again: whether it is computed again where its group's values are.
        rebuilds: the groups that read it when they compute again.
    """

    nbytes: int
    made: int
    reads: tuple[int, ...]
    late: int
    group: int
    lasts: bool = False
    counted: bool = True
    parks: bool = False
    again: bool = False
    rebuilds: tuple[int, ...] = ()


class Choice(NamedTuple):
    """A placement.

    Attributes:
        devices: by group, the number of the device.
        stored: by group, what becomes of what it saves, as :attr:`Group.stored` has it.
        state: by group, where the state is parked that its update alone touches; :data:`KEEP` where it stays, and
            empty where all of it does.
    """

    devices: tuple[int, ...]
    stored: tuple[int, ...]
    state: tuple[int, ...] = ()

    @property
    def parked(self) -> list[tuple[int, int]]:
        """The groups whose state is parked, each with where."""
        return [(group, to) for group, to in enumerate(self.state) if to != KEEP]


@dataclass(frozen=True)
class Problem:
    """What is to be placed, and on what.

    Attributes:
        devices: their names; the last one is the host's, where nothing but parked values go.
        limits: by device, the most bytes that it may hold; None: any number.
        held: by device, bytes that it holds whatever is chosen.
        latency: by source and destination, seconds that a copy takes however small it is; infinite where no link is.
        pace: by source and destination, seconds that a byte takes.
        groups: in the order of the forward.
        tasks: in the order of the step.
        values: in the order in which they are made.
        parts: how many micro-batches; several flow (:mod:`.flow`), in an order of their own.
        issue: seconds that one host thread takes to issue a copy; no copy begins before.
    """

    devices: tuple[str, ...]
    limits: tuple[int | None, ...]
    held: tuple[int, ...]
    latency: tuple[tuple[float, ...], ...]
    pace: tuple[tuple[float, ...], ...]
    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]
    values: tuple[Value, ...]
    parts: int = 1
    issue: float = 0.0

    @property
    def host(self) -> int:
        """The host's number."""
        return len(self.devices) - 1

    def named(self, figures: Sequence[T]) -> dict[str, T]:
        """Figures by the names of devices."""
        return dict(zip(self.devices, figures, strict=True))

    def now(self) -> Choice:
        """The placement as it is: everything where it is, and kept."""
        return Choice(tuple([group.now for group in self.groups]), (KEEP,) * len(self.groups))

    def crossing(self, source: int, destination: int, nbytes: int) -> float:
        """Seconds that a copy takes."""
        return self.latency[source][destination] + nbytes * self.pace[source][destination]
