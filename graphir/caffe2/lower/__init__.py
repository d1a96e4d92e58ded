"""Translation of Caffe2 programs to torch operators, so that a session runs them.

:mod:`.program` walks over the nets; :mod:`.builder` makes the new ones; :mod:`.registry` is what translations are
written with. Each other module holds the translations of one subject.
"""

from . import (  # noqa: F401  # importing them registers their translations
    convolution,
    counters,
    dense,
    fills,
    losses,
    normalisation,
    optimizers,
    order,
    pooling,
    schedules,
    shapes,
    sparse,
    sparse_optimizers,
    transfers,
)
from .program import lower

__all__ = ["lower"]
