"""A module's own code as an operator, and as another one its backward.

The code runs once in a call, in the module itself, and its backward goes through the graph that it has left. What it
changes beside its outputs no program says, so that trials (:mod:`.trial`) refuse a module that does. What it changes
only where some numbers ask for it happens once, as in the module itself.
"""

from .call import DRAWN_SEEDS, OwnCall, read_own_call, seeded_alone, storages
from .done import Done
from .hooks import unhooked
from .operator import BACKWARDS, NAMESPACE, Graphs, OwnCode
from .trial import tried

__all__ = [
    "BACKWARDS",
    "DRAWN_SEEDS",
    "NAMESPACE",
    "Done",
    "Graphs",
    "OwnCall",
    "OwnCode",
    "read_own_call",
    "seeded_alone",
    "storages",
    "tried",
    "unhooked",
]
