"""Checks of data in torch's own Python code, which raises where they fail and goes on alike where they hold.

A step may read their outcome: it is recorded as holding, with an operator that raises where it does not.
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
        holds: what the code reads where the check holds.
        message: what is wrong where it does not.
    """

    holds: bool
    message: str


_PARAMETER: Final = Check(True, "a parameter of a distribution is outside of what it may be")
_CHECKED: Final[Mapping[CodeType, Check]] = {
    torch.nn.functional.gaussian_nll_loss.__code__: Check(False, "var has negative entry/entries"),
    Distribution.__init__.__code__: _PARAMETER,
    Geometric.__init__.__code__: _PARAMETER,
    type(constraints.positive_definite).check.__code__: _PARAMETER,
    Distribution._validate_sample.__code__: Check(True, "a value is outside of the support of its distribution"),
}
"""By the function that reads an outcome; none of these reads another number."""

# Where torch has this function, a distribution has it read its outcomes.
_READER: Final = getattr(getattr(distribution, "_all_true_or_runtime_assert", None), "__code__", None)


def check_read_in(frame: FrameType) -> Check | None:
    """The check whose outcome the code that runs in *frame* reads, or None where it reads another number."""
    if frame.f_code is _READER and frame.f_back is not None:
        frame = frame.f_back
    return _CHECKED.get(frame.f_code)
