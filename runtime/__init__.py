"""How a plan is executed: sessions, and one executor a file.

A :class:`Session` takes a plan and the state that it starts from, splits each batch over the replicas, and lets an
executor run the step: :mod:`.reference` one instruction after the other, the oracle; generated Python (:mod:`.codegen`)
in one thread, :mod:`.serial`, or in one for each logical device, :mod:`.threads`. :mod:`.choice` says which of the two;
:mod:`.adversarial`, for tests, runs lanes in bad interleavings.

Steps are observed by :mod:`.probes`: :mod:`.finite` looks for NaN, :mod:`.measurement` takes the times and bytes of
which a :class:`Report` tells.
"""

from .report import Report
from .session import Session

__all__ = ["Report", "Session"]
