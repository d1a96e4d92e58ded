"""Settings of the whole process that graphir changes for a while: one owner knows who needs which value.

Every thread sees such a setting, and torch has no call that would be given it instead. Two threads that each note it,
change it and put it back would leave one's value behind. So whoever needs a value holds it here::

    thread 1      ─ held 1 ──────────────┐
    thread 2          ─ held 1 ──────────┼─────┐        equal values overlap
    thread 3              ┄ waits for 2 ┄┼┄┄┄┄┄┼─ held 2 ─┐   others take turns, in the order of asking
    the setting   0 ─ 1 ────────────────────── 2 ──────── 0   the last one puts back what the first one found

What the program itself sets meanwhile stays. In a forked process settings are as they are without other threads. Where
torch has a setting of a thread's own or an argument of a call, that is used, and nothing is held.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Setting", "fork_waits_for", "held"]


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of the process.

    Attributes:
        name: for messages.
        get: its value now.
        set: gives it another value.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


class _Claim:
    """Somebody's need of some values; *thread* is 0 where it is no thread's."""

    def __init__(self, wanted: Mapping[Setting, Any], thread: int) -> None:
        self.wanted, self.thread, self.granted = wanted, thread, False

    def agrees(self, other: _Claim) -> bool:
        """Whether both can have what they want at the same time."""
        return all(setting not in other.wanted or other.wanted[setting] == v for setting, v in self.wanted.items())


class _Owner:
    """Who holds which values, and what was there before.

    Ctrl-C may strike between any two lines, and the collector of garbage may drop a claim there. So :meth:`settle` is
    right wherever it begins again: it compares what is claimed with what is set.

    Attributes:
        claims: granted and waiting ones, in the order of asking.
        before: what the first holder of a setting found.
        ours: what it was given since.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.claims: dict[_Claim, None] = {}
        self.before: dict[Setting, Any] = {}
        self.ours: dict[Setting, Any] = {}
        self.follows_forks = False

    def enter(self, claim: _Claim) -> None:
        """Wait until the claim can be granted."""
        with self.changed:
            self.follow_forks()
            self.claims[claim] = None
            while not self.free(claim):
                self.changed.wait()
            claim.granted = True
            self.settle()

    def leave(self, claim: _Claim) -> None:
        """Drop a claim, whether it was granted or not."""
        with self.changed:
            self.claims.pop(claim, None)
            self.settle()
            self.changed.notify_all()

    def free(self, claim: _Claim) -> bool:
        """Whether nobody holds other values, nor waits for other ones for longer."""
        own = [other for other in self.claims if other.granted and other.thread == claim.thread != 0]
        if clash := next((other for other in own if not claim.agrees(other)), None):
            names = ", ".join([setting.name for setting in claim.wanted if setting in clash.wanted])
            raise RuntimeError(f"this thread holds {names} at another value, and would wait for itself")
        for other in self.claims:
            if other is claim:
                return True
            if not claim.agrees(other) and (other.granted or not own):
                return False
        return True

    def settle(self) -> None:
        """Give each setting the value that is claimed, or the one of before."""
        wanted: dict[Setting, Any] = {}
        for claim in list(self.claims):
            if claim.granted:
                wanted.update(claim.wanted)
        for setting in [setting for setting in self.before if setting not in wanted]:
            before = self.before[setting]
            given = self.ours.get(setting, setting.get())  # Ctrl-C may have struck before it was noted
            if given != before and setting.get() == given:
                setting.set(before)
            self.ours.pop(setting, None)
            self.before.pop(setting, None)
        for setting, value in wanted.items():
            if setting not in self.ours:
                self.before.setdefault(setting, setting.get())
                if self.before[setting] != value:
                    setting.set(value)
                self.ours[setting] = value

    def follow_forks(self) -> None:
        """From the first claim on. A fork waits for what is being settled, and for no holder."""
        if not self.follows_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=lambda: self.changed.acquire(),
                after_in_parent=lambda: self.changed.release(),
                after_in_child=self.forked,
            )
        self.follows_forks = True

    def forked(self) -> None:
        """In the new process only the thread that forked is left: drop all claims but its own."""
        self.changed = threading.Condition(threading.RLock())
        for claim in [claim for claim in self.claims if claim.thread != threading.get_ident()]:
            del self.claims[claim]
        self.settle()


_owner: Final = _Owner()
_waited_for: Final[dict[int, object]] = {}


def fork_waits_for(*locks: Any) -> None:
    """From now on every fork waits until these locks are free, so that the forked process finds them so.

    Who holds one may hold settings, and take the ones before it: a fork waits for the last one first.

    Args:
        locks: reentrant; the same ones may be given again, in the same order.
    """
    if all(id(lock) in _waited_for for lock in locks) or not hasattr(os, "register_at_fork"):
        return
    with _owner.changed:
        _owner.follow_forks()
        for lock in locks:
            if id(lock) not in _waited_for:
                _waited_for[id(lock)] = lock
                os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextmanager
def held(wanted: Mapping[Setting, Any], lasting: bool = False) -> Iterator[None]:
    """Hold settings at these values; wait while others hold or await them at other ones.

    Args:
        wanted: the value of each.
        lasting: whether this is no thread's, such as a session's: another thread may end it, and no forked process has
            it.

    Raises:
        RuntimeError: this thread holds one of them at another value already.
    """
    claim = _Claim(wanted, 0 if lasting else threading.get_ident())
    try:
        _owner.enter(claim)
        yield
    finally:
        try:
            _owner.leave(claim)
        except KeyboardInterrupt:
            _owner.leave(claim)
            raise
