"""What can be known of a program or plan without running it."""

from __future__ import annotations

from .certify import Certificate, certify
from .diff import Diff, diff
from .liveness import Lifetime, liveness
from .memory import Memory, memory

__all__ = ["Certificate", "Diff", "Lifetime", "Memory", "certify", "diff", "liveness", "memory"]
