"""How a plan is executed: sessions, and one executor a file.

A :class:`Session` takes a plan and the state that it starts from, splits each batch over the replicas, and lets an
executor run the step: :mod:`.reference` one instruction after the other, the oracle; :mod:`.threads` generated Python
(:mod:`.codegen`) in one thread for each logical device; :mod:`.adversarial`, for tests, the lanes in bad interleavings.
"""

from .session import Session

__all__ = ["Session"]
