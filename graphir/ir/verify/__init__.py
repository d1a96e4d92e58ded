"""Checks of the invariants of nets, programs and plans; :mod:`.net` lists them."""

from .net import blamed, verify
from .problems import RAW, Problem
from .subject import Planned, require, subject_of

__all__ = ["RAW", "Planned", "Problem", "blamed", "require", "subject_of", "verify"]
