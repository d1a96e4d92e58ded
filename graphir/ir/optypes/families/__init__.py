"""What is known of torch's types, by family: one entry for each name.

For what a fact means, and how it was found, see :class:`graphir.ir.optypes.record.OperatorType`.
"""

from __future__ import annotations

from typing import Final

from ..facts import Known
from .attention import ATTENTION
from .images import IMAGES
from .indexing import INDEXING
from .linear_algebra import LINEAR_ALGEBRA
from .losses import LOSSES
from .making import MAKING
from .norms import NORMS
from .pointwise import POINTWISE
from .random import RANDOM
from .reductions import REDUCTIONS
from .views import VIEWS

__all__ = ["FAMILIES"]

FAMILIES: Final[tuple[Known, ...]] = (
    *ATTENTION,
    *IMAGES,
    *INDEXING,
    *LINEAR_ALGEBRA,
    *LOSSES,
    *MAKING,
    *NORMS,
    *POINTWISE,
    *RANDOM,
    *REDUCTIONS,
    *VIEWS,
)
"""All entries."""
