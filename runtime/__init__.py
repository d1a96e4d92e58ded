"""How a plan is executed: sessions, and one executor a file.

A :class:`Session` takes a plan and the state that it starts from, splits each batch over the replicas, and lets an
executor run the step. :mod:`.reference` is the oracle: one instruction after the other. On the host, generated Python
(:mod:`.codegen`) runs in one thread (:mod:`.serial`) or in one for each logical device (:mod:`.threads`), or functions
of TorchScript do there (:mod:`.segments`); :mod:`.choice` says which. Where a device is bound to CUDA it issues each
lane to a stream (:mod:`.cuda`). :mod:`.adversarial`, for tests, runs lanes in bad interleavings.

:func:`check` proves that a plan runs right in any interleaving of its lanes; a session refuses one that does not.
:mod:`.listing` shows the generated code.
"""

from .check import check
from .findings import Finding
from .listing import python
from .report import Report
from .session import Session

__all__ = ["Finding", "Report", "Session", "check", "python"]
