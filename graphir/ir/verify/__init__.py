"""Whether a net, a program or a plan is what everything else takes it for; :mod:`.net` lists the invariants."""

from .net import blamed, verify
from .problems import RAW, Problem
from .subject import Planned, require, subject_of

__all__ = ["RAW", "Planned", "Problem", "blamed", "require", "subject_of", "verify"]
