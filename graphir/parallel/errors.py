"""Refusals of :mod:`graphir.parallel`: each is a :class:`graphir.ReplicationError`, and of the type that torch raises.

So code that catches ``RuntimeError`` around ``torch.nn.DataParallel`` catches the same here.
"""

from __future__ import annotations

from ..errors import ReplicationError

__all__ = [
    "ReplicationAssertionError",
    "ReplicationIndexError",
    "ReplicationRuntimeError",
    "ReplicationTypeError",
    "ReplicationValueError",
]


class ReplicationValueError(ReplicationError, ValueError):
    """A value that does not fit, of which torch says nothing, or says it by a ValueError."""


class ReplicationRuntimeError(ReplicationError, RuntimeError):
    """What torch refuses by a RuntimeError."""


class ReplicationTypeError(ReplicationError, TypeError):
    """What torch refuses by a TypeError."""


class ReplicationIndexError(ReplicationError, IndexError, ValueError):
    """What torch refuses by an IndexError: there are no device ids, or there is no such dimension."""


class ReplicationAssertionError(ReplicationError, AssertionError):
    """What torch refuses by an AssertionError: lists of different lengths."""
