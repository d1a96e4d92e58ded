"""Updates of several parameters in one call of a kernel, one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["one_by_one"]


def one_by_one(update: Callable[..., None], **options: Any) -> Callable[..., None]:
    """The kernel that updates each of some parameters by a call of its own, so that what one call allocates is gone
    before the next one.

    Args:
        update: takes one parameter's tensors, None for those that it lacks, and the learning rate as a float; by name
            *options* and the other numbers that move from step to step, as floats.
        options: that all calls have.
    """

    def updates(*given: Any, **followed: Tensor | float) -> None:
        *lists, lr = given
        rate, numbers = float(lr), options | {name: float(number) for name, number in followed.items()}
        for tensors in zip(*lists, strict=True):
            update(*tensors, rate, **numbers)

    return updates
