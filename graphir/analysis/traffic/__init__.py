"""What a step copies between devices, which move made each copy necessary, and what crosses for nothing.

::

    crossings   the copies of a net: who made the value, who reads it first, what it is
    moves       what a program's history says of how something came to its device
    flow        the values of a net, who computes and who reads them
    detours     what crosses for nothing
    mends       the calls that move it where it need not
    listing     all of that for a program, a plan or a net
    results     what is found, and how it is printed
"""

from __future__ import annotations

from .detours import Detour
from .listing import traffic
from .moves import Reason
from .results import Copied, Link, Reduced, Traffic

__all__ = ["Copied", "Detour", "Link", "Reason", "Reduced", "Traffic", "traffic"]
