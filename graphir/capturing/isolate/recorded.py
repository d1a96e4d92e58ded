"""The tensors of recordings: fakes of the modes that recordings make."""

from __future__ import annotations

import weakref
from typing import Final

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["MODES", "is_recorded"]

MODES: Final[weakref.WeakSet[FakeTensorMode]] = weakref.WeakSet()
"""The fake modes of all recordings."""


def is_recorded(tensor: object) -> bool:
    """Whether *tensor* is a fake of a recording, of this or another capture."""
    return isinstance(tensor, FakeTensor) and tensor.fake_mode in MODES
