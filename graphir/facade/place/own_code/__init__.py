"""A module's own code as an operator, and as another one its backward.

The operator computes what the code computes, and does nothing else: what the code changes beside its outputs would be
changed twice, since the backward runs the code once more. Trials (:mod:`.trial`) find what cannot be an operator; what
a trial has not shown, a call (:mod:`.call`) finds, which fails then before anybody has its outputs.
"""

from .call import DRAWN_SEEDS, OwnCall, read_own_call, seeded_alone
from .operator import NAMESPACE, OwnCode
from .trial import tried

__all__ = ["DRAWN_SEEDS", "NAMESPACE", "OwnCall", "OwnCode", "read_own_call", "seeded_alone", "tried"]
