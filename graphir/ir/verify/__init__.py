"""Whether a net, a program or a plan is what everything else takes it for; :mod:`.net` lists the invariants."""

from .net import blamed, verify
from .problems import RAW, Problem
from .subject import require

__all__ = ["RAW", "Problem", "blamed", "require", "verify"]
