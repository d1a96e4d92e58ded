"""What copies of modules are, and what a replication callback is given, as eager replicas and in a program alike."""

from __future__ import annotations

from typing import Final

__all__ = ["HOOKS", "OWN_CALLBACK", "CallbackContext"]

OWN_CALLBACK: Final = "__data_parallel_replicate__"
"""The method by which a module asks to be called: ``module.__data_parallel_replicate__(ctx, copy_id)``."""

HOOKS: Final = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""A module's tables of hooks: a copy has its own, so that what is registered on it is not on the module."""


class CallbackContext:
    """What the copies of one module share: callbacks set attributes on it, and read what other copies' have set.

    There is one for each module and each replication. The interface is that of Jiayuan Mao's
    Synchronized-BatchNorm-PyTorch and Jacinle.
    """
