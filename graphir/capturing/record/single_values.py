"""Recording a step whose batch norms have one value a channel, which torch refuses to normalise.

Torch refuses in Python, before it calls an operator. A batch norm over several replicas also has the values of the
other replicas, so one replica may have a single value.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

__all__ = ["REFUSAL", "single_values_allowed"]

REFUSAL: Final = "Expected more than 1 value per channel when training"
"""The beginning of torch's error message."""

_LOCK: Final = threading.Lock()


@contextlib.contextmanager
def single_values_allowed() -> Iterator[None]:
    """While this is active, batch norms in this thread take one value a channel. Another thread that enters waits."""
    functional: Any = torch.nn.functional
    ident = threading.get_ident()
    with _LOCK:
        refuse = functional._verify_batch_size

        def verify(size: list[int]) -> None:
            if threading.get_ident() != ident:
                refuse(size)

        functional._verify_batch_size = verify
        try:
            yield
        finally:
            functional._verify_batch_size = refuse
