"""The numbers of an optimizer's parameter group that move from step to step, as torch's schedulers move them.

The learning rate is a blob always, and so are the betas. Momentum and weight decay are blobs where they are not 0 at
capture: torch does other operations where they are 0, and keeps no momentum buffer. The operators that update
parameters take a blob as the operand ``<name>_now``, in the place of the argument ``<name>``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MOVED", "NOW", "OPTION_OF", "moved"]

OPTION_OF: Final[Mapping[str, tuple[str, int | None]]] = {
    "lr": ("lr", None),
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "momentum": ("momentum", None),
    "weight_decay": ("weight_decay", None),
}
"""For each number the option of ``optimizer.param_groups`` that has it, and its place there where that is a pair."""

MOVED: Final = tuple([name for name in OPTION_OF if name != "lr"])
"""The numbers beside the learning rate."""

NOW: Final = "_now"
"""What the name of an operand ends with that has one of these numbers."""


def moved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers beside the learning rate among the *options* of a group, by name; pairs that are none are left
    out."""
    found: dict[str, Any] = {}
    for name in MOVED:
        option, place = OPTION_OF[name]
        value = options.get(option)
        if place is None and value is not None:
            found[name] = value
        elif isinstance(value, (list, tuple)) and len(value) == 2 and place is not None:
            found[name] = value[place]
    return found
