"""Checks of data in torch's own Python code, which raises if a check fails and does the same work whenever it holds.

A step may read the outcome of such a check. The check is recorded as holding, with an operator that raises if it fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch
from torch.distributions import Distribution, Geometric, constraints, distribution

__all__ = ["Check", "check_read_in"]


class Check(NamedTuple):
    """A check whose outcome torch's code reads.

    Attributes:
        holds: the outcome that the code reads if the check holds.
        message: what is wrong if the check fails.
    """

    holds: bool
    message: str


_PARAMETER: Final = Check(True, "a parameter of a distribution violates its constraint")
_CHECKED: Final[Mapping[CodeType, Check]] = {
    torch.nn.functional.gaussian_nll_loss.__code__: Check(False, "var has negative entry/entries"),
    Distribution.__init__.__code__: _PARAMETER,
    Geometric.__init__.__code__: _PARAMETER,
    type(constraints.positive_definite).check.__code__: _PARAMETER,
    Distribution._validate_sample.__code__: Check(True, "a value is outside of the support of its distribution"),
}
"""By the code of a function, the check whose outcome it reads. The function reads no other number out of a tensor."""

# Where torch has this function, the code of a distribution calls it to read the outcome of a check.
_READER: Final = getattr(getattr(distribution, "_all_true_or_runtime_assert", None), "__code__", None)


def check_read_in(frame: FrameType) -> Check | None:
    """The check whose outcome the code that runs in *frame* reads, or None if the code reads another number."""
    if frame.f_code is _READER and frame.f_back is not None:
        frame = frame.f_back
    return _CHECKED.get(frame.f_code)
