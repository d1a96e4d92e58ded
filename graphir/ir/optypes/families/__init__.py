"""What is known of torch's types, by family.

For what a fact means, and how it was found, see :class:`graphir.ir.optypes.record.OperatorType`.
"""

from __future__ import annotations

from typing import Final

from ..facts import Known
from .images import IMAGES
from .indexing import INDEXING
from .linear_algebra import LINEAR_ALGEBRA
from .norms import NORMS
from .pointwise import POINTWISE
from .random import RANDOM
from .tensors import TENSORS

__all__ = ["FAMILIES"]

FAMILIES: Final[tuple[Known, ...]] = (*IMAGES, *INDEXING, *LINEAR_ALGEBRA, *NORMS, *POINTWISE, *RANDOM, *TENSORS)
