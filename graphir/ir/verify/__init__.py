"""Whether a net, a program or a plan is what everything else takes it for; :mod:`.net` lists the invariants."""

from .net import blamed, verify
from .problems import Problem
from .subject import require

__all__ = ["Problem", "blamed", "require", "verify"]
