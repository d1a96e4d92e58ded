"""Traces that torch takes of a function while a step is recorded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ...errors import CaptureError
from ..words.places import BRANCHES, where
from .patches import replaced

__all__ = ["traces_refused"]

_MODULES: Final = tuple([f"torch._higher_order_ops.{operator}" for operator in BRANCHES])


@contextlib.contextmanager
def traces_refused(here: Callable[[], str]) -> Iterator[None]:
    """While this is active, ``make_fx`` and what uses it, such as ``torch.func.linearize``, raise in this thread.

    The trace would be of what the recorder asks torch for, and that is nothing where it remembers a result.

    Raises:
        CaptureError: the step traces a function.
    """
    enter = ProxyTorchDispatchMode.__enter__

    def refuse(mode: ProxyTorchDispatchMode) -> Any:
        if _for_a_branch():
            return enter(mode)
        raise CaptureError(
            "the step traces a function, as make_fx, torch.func.linearize and operators such as scan do",
            where=where(here()),
            fix="call the function itself, in a loop where it runs several times",
        )

    with replaced(ProxyTorchDispatchMode, {"__enter__": refuse}):
        yield


def _for_a_branch() -> bool:
    """Whether ``torch.cond`` or ``while_loop`` is about to trace what it then calls, and is refused for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES:
            return True
        frame = frame.f_back
    return False
