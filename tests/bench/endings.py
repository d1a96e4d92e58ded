"""A process of which nothing stays: what it has started ends with it, also what has a session of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["started"]

_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER of Linux: a process whose parent has ended becomes this process's child, and is found here."""


@contextlib.contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a process, as ``subprocess.Popen`` does, and kill what is left of it afterwards."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    before = set(_below([os.getpid()]))
    process = subprocess.Popen(command, text=True, **options)
    try:
        yield process
    finally:
        _end(before)
        process.wait()


def _end(before: set[int]) -> None:
    """Kill what this process has started since, until nothing of it lives: it may be starting more."""
    while found := set(_below([os.getpid()])) - before:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):  # another one's child, which comes here when that has ended
                os.waitpid(pid, 0)


def _below(found: list[int]) -> list[int]:
    """The processes that these have started, at any remove."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    first = len(found)
    for parent in found:  # which grows
        found += [pid for pid, of in parents.items() if of == parent]
    return found[first:]
