"""Where the replicas of one forward meet.

A round is one forward. Each replica attends it in a thread of its own, and a module that needs the other copies' values
meets them there::

    replica 0   ─ meet(value 0) ┄ waits for all ┄ combine(values) ─┬─ result 0 ─▶
    replica 1   ─ meet(value 1) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄└─ result 1 ─▶

Replica 0 combines, whoever came last: autograd numbers what a thread computes, and would else add gradients in an order
that depends on timing. Nobody waits for a replica that cannot come: one that has failed or is done, or one that waits
elsewhere itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from ..errors import counted
from .errors import ReplicationRuntimeError

__all__ = ["Attendance", "Desertion", "Round", "here"]


class Desertion(ReplicationRuntimeError):
    """A replica waits for another that will not come; the other's own error says why, if it has one."""


class _Meeting:
    """One coming together at a place: what each replica gave, and what it gets."""

    def __init__(self, key: object, what: Callable[[], str]) -> None:
        self.key, self.what = key, what
        self.given: dict[int, Any] = {}
        self.results: Sequence[Any] | None = None


class Round:
    """One forward of several replicas.

    Attributes:
        copies: how many replicas there are.
    """

    def __init__(self, copies: int) -> None:
        self.copies = copies
        self._changed = threading.Condition()
        self._meetings: dict[tuple[object, int], _Meeting] = {}
        self._visits: dict[tuple[object, int], int] = {}
        self._waiting: dict[int, _Meeting] = {}
        self._gone: set[int] = set()
        self._stuck = ""

    @contextmanager
    def attend(self, copy: int, root: object) -> Iterator[None]:
        """Run the replica *root* in this thread: modules in it find the round by :func:`here`."""
        before = here()
        _thread.attendance = Attendance(self, copy, root)
        try:
            yield
        finally:
            _thread.attendance = before
            with self._changed:
                self._gone.add(copy)
                self._changed.notify_all()

    def leave(self) -> None:
        """Send all replicas home: whoever waits, or comes to wait, gets a :class:`Desertion`."""
        with self._changed:
            self._gone.update(range(self.copies))
            self._changed.notify_all()

    def meet(
        self,
        copy: int,
        key: object,
        what: Callable[[], str],
        value: Any,
        combine: Callable[[list[Any]], Sequence[Any]],
    ) -> Any:
        """Wait for the other replicas at the same place, and get this one's part of the combination.

        Args:
            copy: which replica comes.
            key: of the place, equal in all replicas. A replica's visits to a place are counted.
            what: tells the place, for messages.
            value: what the replica brings.
            combine: is called once, by replica 0, with the values in replica order; returns one part for each.

        Raises:
            Desertion: another replica will not come.
        """
        with self._changed:
            meeting = self._meeting(copy, key, what)
            meeting.given[copy] = value
            self._changed.notify_all()
            self._waiting[copy] = meeting
            try:
                while not self._may_go(copy, meeting):
                    self._refuse_vain(meeting)
                    self._changed.wait()
            finally:
                del self._waiting[copy]
            if copy == 0:
                meeting.results = combine([meeting.given[i] for i in range(self.copies)])
                self._changed.notify_all()
            assert meeting.results is not None
            return meeting.results[copy]

    def _meeting(self, copy: int, key: object, what: Callable[[], str]) -> _Meeting:
        visit = self._visits.get((key, copy), 0)
        self._visits[key, copy] = visit + 1
        return self._meetings.setdefault((key, visit), _Meeting(key, what))

    def _may_go(self, copy: int, meeting: _Meeting) -> bool:
        return len(meeting.given) == self.copies if copy == 0 else meeting.results is not None

    def _refuse_vain(self, meeting: _Meeting) -> None:
        """Raise where somebody will never come to a meeting."""
        missing = [copy for copy in range(self.copies) if copy not in meeting.given]
        gone = [copy for copy in missing if copy in self._gone] or [0] * (meeting.results is None and 0 in self._gone)
        if not self._stuck and self._all_wait():
            places = ", ".join(f"replica {copy} at {self._waiting[copy].what()}" for copy in sorted(self._waiting))
            self._stuck = f"the replicas wait for each other: {places}"
            self._changed.notify_all()
        if self._stuck or gone:
            raise Desertion(
                self._stuck
                or f"{meeting.what()} waits for replica {gone[0]}, which is done or has failed without it: called "
                f"{self._counts(meeting)}",
                where="a forward of replicas",
                fix="let each replica run the same modules, in the same order",
            )

    def _counts(self, meeting: _Meeting) -> str:
        """How often each replica has come to the place of a meeting."""
        visits = (self._visits.get((meeting.key, copy), 0) for copy in range(self.copies))
        return ", ".join(f"{counted(number, 'time')} by replica {copy}" for copy, number in enumerate(visits))

    def _all_wait(self) -> bool:
        """Whether every replica waits for others, and none for one that has gone."""
        return all(copy in self._waiting for copy in range(self.copies)) and not any(
            self._may_go(copy, meeting) for copy, meeting in self._waiting.items()
        )


class Attendance(NamedTuple):
    """Which replica of which round this thread runs.

    Attributes:
        round: the forward.
        copy: the replica.
        root: what it calls.
    """

    round: Round
    copy: int
    root: object

    def meet(
        self, key: object, what: Callable[[], str], value: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """:meth:`Round.meet`."""
        return self.round.meet(self.copy, key, what, value, combine)


_thread: Final = threading.local()


def here() -> Attendance | None:
    """The replica that this thread runs; None outside of any."""
    return getattr(_thread, "attendance", None)
