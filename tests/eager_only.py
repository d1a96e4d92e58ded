"""A DataParallel whose replicas are never plans, for tests that look from within a forward."""

from __future__ import annotations

from typing import Any

import graphir

__all__ = ["EagerOnly"]


class EagerOnly(graphir.DataParallel):
    """One of its steps is overridden, so that each replica's forward is called by Python, once."""

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return super().gather(outputs, output_device)
