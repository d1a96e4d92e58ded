"""What can be known of a program or plan without running it."""

from __future__ import annotations

from .certify import Certificate, certify
from .diff import Diff, diff
from .estimate import Estimate
from .liveness import Lifetime, liveness
from .memory import Memory, memory
from .placed import PlacedModules, placed
from .topology import Host, Link, Speed, Topology
from .traffic import Traffic, traffic

__all__ = [
    "Certificate",
    "Diff",
    "Estimate",
    "Host",
    "Lifetime",
    "Link",
    "Memory",
    "PlacedModules",
    "Speed",
    "Topology",
    "Traffic",
    "certify",
    "diff",
    "liveness",
    "memory",
    "placed",
    "traffic",
]
