"""What a replication callback is given, whether modules are copied as eager replicas or in a program."""

from __future__ import annotations

__all__ = ["CallbackContext"]


class CallbackContext:
    """What the copies of one module share: callbacks set attributes on it, and read what other copies' have set.

    There is one for each module and each replication. The interface is that of Jiayuan Mao's
    Synchronized-BatchNorm-PyTorch and Jacinle.
    """
