"""Checks of data in torch's own Python code, which raises where they fail and goes on alike where they hold.

A step may read their outcome: it is recorded as holding, with an operator that raises where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Final, NamedTuple

import torch
from torch.distributions import Distribution

__all__ = ["CHECKED", "Check"]


class Check(NamedTuple):
    """Attributes:
    holds: what the code reads where the check holds.
    message: what is wrong where it does not.
    """

    holds: bool
    message: str


CHECKED: Final[Mapping[CodeType, Check]] = {
    torch.nn.functional.gaussian_nll_loss.__code__: Check(False, "var has negative entry/entries"),
    Distribution.__init__.__code__: Check(True, "a parameter of a distribution is outside of what it may be"),
    Distribution._validate_sample.__code__: Check(True, "a value is outside of the support of its distribution"),
}
"""By the function that reads an outcome; none of these reads another number."""
