"""The numbers of an optimizer's parameter group that move from step to step, as torch's schedulers move them.

The learning rate and the betas are always blobs. Momentum and weight decay are blobs if they are not 0 at capture: at
0, torch does other operations and keeps no momentum buffer. The operators that update parameters take a blob as the
operand ``<name>_now``, in the place of the argument ``<name>``.
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
"""For each number, the option of ``optimizer.param_groups`` that holds it, and its place in the option if a pair."""

MOVED: Final = tuple([name for name in OPTION_OF if name != "lr"])
"""The numbers beside the learning rate."""

NOW: Final = "_now"
"""The suffix of operands that hold one of these numbers."""


def moved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers beside the learning rate among the *options* of a group, by name. Options that should be pairs and
    are not are left out."""
    found: dict[str, Any] = {}
    for name in MOVED:
        option, place = OPTION_OF[name]
        value = options.get(option)
        if place is None and value is not None:
            found[name] = value
        elif isinstance(value, (list, tuple)) and len(value) == 2 and place is not None:
            found[name] = value[place]
    return found
